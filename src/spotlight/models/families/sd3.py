"""Stable Diffusion 3.5 (medium and large), over diffusers' ``StableDiffusion3Pipeline``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch import Tensor, nn

from spotlight.models import tiny
from spotlight.models.family import ConditionBatch, MediaSize, ModelFamily
from spotlight.models.family_facts import (
    ActivationCosts,
    Dimensions,
    PublishedModel,
    config_integer,
    config_list,
)
from spotlight.models.pipeline_files import PipelineComponent, PipelineFiles
from spotlight.models.shared.checks import require_equal
from spotlight.models.shared.latents import decode_image
from spotlight.models.shared.published_vaes import image_vae

_CLIP_TOKENS = 77


def _published(heads: int, layers: int, positions: int, dual: list[int], parameters: float) -> PublishedModel:
    transformer = {
        "_class_name": "SD3Transformer2DModel",
        "attention_head_dim": 64,
        "caption_projection_dim": 64 * heads,
        "dual_attention_layers": dual,
        "in_channels": 16,
        "joint_attention_dim": 4096,
        "num_attention_heads": heads,
        "num_layers": layers,
        "out_channels": 16,
        "patch_size": 2,
        "pooled_projection_dim": 2048,
        "pos_embed_max_size": positions,
        "qk_norm": "rms_norm",
        "sample_size": 128,
    }
    vae = image_vae(scaling_factor=1.5305, shift_factor=0.0609)
    return PublishedModel(
        configs={"transformer": transformer, "vae": vae},
        parameters=parameters,
        text_parameters=5.6e9,
        source="`convert_sd3_to_diffusers.py`; layers and positions: the models' `config.json`",
    )


class StableDiffusion3(ModelFamily):
    """A Stable Diffusion 3 or 3.5 model.

    - Text is 77 CLIP tokens and ``max_text_tokens`` of T5; the transformer sees the padding unmasked, so
      another limit gives other pictures (the pipeline's default is 256).
    - The scheduler shifts its own limits and then the levels between them: levels are left to it.
    - The noise level is an input in units of 1/1000, in float32 at any dtype of the weights.
    - Position embeddings are a centred crop of a table, which limits the size.
    """

    name = "sd3"
    chooses_kernels = False
    pipeline_class = "StableDiffusion3Pipeline"
    components = {
        "transformer": PipelineComponent(("SD3Transformer2DModel",), weights=True),
        "vae": PipelineComponent(("AutoencoderKL",), weights=True),
        "scheduler": PipelineComponent(("FlowMatchEulerDiscreteScheduler",), weights=False),
        "tokenizer": PipelineComponent(("CLIPTokenizer", "CLIPTokenizerFast"), weights=False),
        "tokenizer_2": PipelineComponent(("CLIPTokenizer", "CLIPTokenizerFast"), weights=False),
        "tokenizer_3": PipelineComponent(("T5TokenizerFast", "T5Tokenizer"), weights=False),
        "text_encoder": PipelineComponent(("CLIPTextModelWithProjection",), weights=True, lazy=True),
        "text_encoder_2": PipelineComponent(("CLIPTextModelWithProjection",), weights=True, lazy=True),
        "text_encoder_3": PipelineComponent(("T5EncoderModel",), weights=True, lazy=True),
    }
    lora_targets = (
        *("attn.to_q", "attn.to_k", "attn.to_v", "attn.to_out.0"),
        *("attn.add_q_proj", "attn.add_k_proj", "attn.add_v_proj", "attn.to_add_out"),
    )
    activations = ActivationCosts(lora=14.5, full=27.0, checkpointed=1.5, forward=9.5, decode=6.5)
    text_tokens_max = 512
    published = {
        "stabilityai/stable-diffusion-3.5-medium": _published(24, 24, 384, [*range(13)], 2.24e9),
        "stabilityai/stable-diffusion-3.5-large": _published(38, 38, 192, [], 8.06e9),
    }

    @classmethod
    def read_dimensions(cls, files: PipelineFiles) -> Dimensions:
        """From the configurations of transformer and VAE."""
        layers, heads, per_head, channels, patch, positions = (
            config_integer(files, "transformer", key)
            for key in (
                *("num_layers", "num_attention_heads", "attention_head_dim"),
                *("in_channels", "patch_size", "pos_embed_max_size"),
            )
        )
        widths = config_list(files, "vae", "block_out_channels")
        patch_px = patch * 2 ** (len(widths) - 1)
        return Dimensions(
            layers=layers,
            width=heads * per_head,
            heads=heads,
            channels=channels * patch**2,
            patch_px=patch_px,
            vae_width=int(str(widths[0])),
            side_max_px=positions * patch_px,
        )

    @classmethod
    def planned_text_tokens(cls, words: int, most: int) -> int:
        """All of them: prompts are padded."""
        return _CLIP_TOKENS + most

    @classmethod
    def call_arguments(cls, scale: float, embedded: float | None) -> dict[str, object]:
        """True guidance is the pipeline's ``guidance_scale``."""
        return {"guidance_scale": scale}

    def check_parts(self) -> None:
        """Sizes of transformer, VAE and text encoders that must agree."""
        config, channels = self.config, self.vae.config.latent_channels
        pooled = [
            self.files.config(name).get("projection_dim") for name in ("text_encoder", "text_encoder_2")
        ]
        require_equal(
            self.files.folder("transformer") / "config.json",
            {
                "in_channels": (config.in_channels, channels, "the VAE's latent_channels"),
                "out_channels": (config.out_channels, channels, "the VAE's latent_channels"),
                "caption_projection_dim": (
                    config.caption_projection_dim,
                    self.dimensions.width,
                    "num_attention_heads x attention_head_dim",
                ),
                "joint_attention_dim": (
                    config.joint_attention_dim,
                    self.files.config("text_encoder_3").get("d_model"),
                    "text_encoder_3's d_model",
                ),
                "pooled_projection_dim": (
                    config.pooled_projection_dim,
                    sum(width for width in pooled if isinstance(width, int)),
                    "the sum of projection_dim of text_encoder and text_encoder_2",
                ),
            },
        )

    def condition_shapes(self, text_tokens: int) -> dict[str, tuple[int, ...]]:
        """``embeds``: CLIP's penultimate states side by side, then T5's; ``pooled``: both CLIPs'."""
        config = self.config
        return {
            "embeds": (_CLIP_TOKENS + self.max_text_tokens, config.joint_attention_dim),
            "pooled": (config.pooled_projection_dim,),
        }

    def embed(self, pipeline: Any, prompt: str) -> dict[str, Tensor]:
        """The pipeline's own ``encode_prompt``."""
        embeds, _, pooled, _ = pipeline.encode_prompt(
            prompt,
            None,
            None,
            device=self.device,
            do_classifier_free_guidance=False,
            max_sequence_length=self.max_text_tokens,
        )
        return {"embeds": embeds[0], "pooled": pooled[0]}

    def set_timesteps(self, steps: int, size: MediaSize) -> None:
        """The scheduler's own levels."""
        self.scheduler.set_timesteps(steps, device="cpu", **self.dynamic_shift(steps, size))

    def predict(
        self,
        model: nn.Module,
        latents: Tensor,
        sigma: Tensor,
        condition: ConditionBatch,
        embedded: float | None,
        size: MediaSize,
    ) -> Tensor:
        """The timestep is float32 at any dtype."""
        prediction: Tensor = model(
            hidden_states=latents,
            timestep=sigma * self.scheduler.config.num_train_timesteps,
            encoder_hidden_states=condition["embeds"],
            pooled_projections=condition["pooled"],
            return_dict=False,
        )[0]
        return prediction

    def decode_frames(self, latents: Tensor, size: MediaSize) -> Tensor:
        """Undo scale and shift, decode."""
        return decode_image(self.vae, latents)

    @classmethod
    def tiny(cls, directory: Path, seed: int, variant: int = 0) -> None:
        """See :meth:`ModelFamily.tiny`."""
        from diffusers import FlowMatchEulerDiscreteScheduler, SD3Transformer2DModel

        channels, heads, layers, dual, factor, shift = (
            (4, 4, 2, (0,), 2, 3), (8, 2, 2, (), 4, 3), (4, 6, 3, (0, 1), 8, 1), (8, 4, 2, (0,), 2, 6),
        )[variant]  # fmt: skip
        tokenizer, tokenizer_2, tokenizer_3 = (
            tiny.clip_tokenizer(), tiny.clip_tokenizer(pad="!"), tiny.t5_tokenizer(),
        )  # fmt: skip
        tiny.write_pipeline(
            cls.pipeline_class,
            directory,
            seed,
            transformer=SD3Transformer2DModel(
                sample_size=8,
                in_channels=channels,
                out_channels=channels,
                num_layers=layers,
                attention_head_dim=8,
                num_attention_heads=heads,
                caption_projection_dim=8 * heads,
                joint_attention_dim=32,
                pooled_projection_dim=20,
                pos_embed_max_size=24,
                dual_attention_layers=dual,
                qk_norm="rms_norm",
            ),
            vae=tiny.image_vae(channels, factor, 8, scaling_factor=1.5, shift_factor=0.1),
            scheduler=FlowMatchEulerDiscreteScheduler(shift=shift),
            tokenizer=tokenizer,
            text_encoder=tiny.clip_text_encoder(tokenizer, 8, projection=8),
            tokenizer_2=tokenizer_2,
            text_encoder_2=tiny.clip_text_encoder(tokenizer_2, 16, projection=12),
            tokenizer_3=tokenizer_3,
            text_encoder_3=tiny.t5_text_encoder(tokenizer_3, 32),
        )
