"""Stable Diffusion 3.5 (medium and large), over diffusers' ``StableDiffusion3Pipeline``."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from spotlight.models.family import ConditionBatch, MediaSize
from spotlight.models.family_facts import (
    ActivationCosts,
    Dimensions,
    block_widths,
    config_integer,
    dimensions,
    read_models,
)
from spotlight.models.shared.image_vae import ScaledVaeFamily
from spotlight_files.lora_names import SD3
from spotlight_files.pipeline_files import PipelineComponent, PipelineFiles

_CLIP_TOKENS = 77


class StableDiffusion3(ScaledVaeFamily):
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
    lora_names = {"comfyui": SD3, "kohya": SD3}
    activations = ActivationCosts(
        lora=14.5, full=27.0, elementwise=11.9, checkpointed=1.5, forward=9.5, decode=6.5
    )
    guidance_argument = "guidance_scale"
    text_tokens_max = 512
    published, tiny_models = read_models(__file__)

    @classmethod
    def read_dimensions(cls, files: PipelineFiles) -> Dimensions:
        px, vae_width = block_widths(files)
        patch = config_integer(files, "transformer", "patch_size")
        return dimensions(
            files,
            latents_per_token=patch**2,
            patch_px=patch * px,
            vae_width=vae_width,
            side_max_px=config_integer(files, "transformer", "pos_embed_max_size") * patch * px,
        )

    @classmethod
    def planned_text_tokens(cls, words: int, most: int) -> int:
        return _CLIP_TOKENS + most

    def wanted_config(self) -> dict[str, tuple[object, str]]:
        channels = self.vae.config.latent_channels
        pooled = [self.text_size(name, "projection_dim")[0] for name in ("text_encoder", "text_encoder_2")]
        return {
            "in_channels": (channels, "the VAE's latent_channels"),
            "out_channels": (channels, "the VAE's latent_channels"),
            "caption_projection_dim": (self.dimensions.width, "num_attention_heads x attention_head_dim"),
            "joint_attention_dim": self.text_size("text_encoder_3", "d_model"),
            "pooled_projection_dim": (
                sum(width for width in pooled if isinstance(width, int)),
                "the sum of projection_dim of text_encoder and text_encoder_2",
            ),
        }

    def condition_shapes(self, text_tokens: int) -> dict[str, tuple[int, ...]]:
        """``embeds``: CLIP's penultimate states side by side, then T5's; ``pooled``: both CLIPs'."""
        config = self.config
        return {
            "embeds": (_CLIP_TOKENS + self.max_text_tokens, config.joint_attention_dim),
            "pooled": (config.pooled_projection_dim,),
        }

    def embed(self, pipeline: Any, prompt: str) -> dict[str, Tensor]:
        embeds, _, pooled, _ = pipeline.encode_prompt(
            prompt,
            None,
            None,
            device=self.text_device,
            do_classifier_free_guidance=False,
            max_sequence_length=self.max_text_tokens,
        )
        return {"embeds": embeds[0], "pooled": pooled[0]}

    def set_timesteps(self, steps: int, size: MediaSize) -> None:
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
        return self.output_of(
            model,
            hidden_states=latents,
            timestep=sigma * self.scheduler.config.num_train_timesteps,
            encoder_hidden_states=condition["embeds"],
            pooled_projections=condition["pooled"],
        )
