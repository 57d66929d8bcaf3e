"""Wan 2.1 and 2.2 text-to-video, over diffusers' ``WanPipeline``.

Traps of the reference:
- The hub's scheduler (UniPC) passes timesteps as integers and starts at 1 - 1e-6; Euler's are not rounded.
  The loading snippet steps as Euler does.
- A pipeline saved with diffusers' Euler scheduler shifts its noise levels twice, since ``WanPipeline`` leaves
  them to the scheduler.
- The text is zero-padded to ``max_text_tokens`` after encoding and not masked: the model attends to padding.
- A few parts of the transformer stay float32 in a bfloat16 model, the time embedding among them.
"""

from __future__ import annotations

from functools import cached_property
from pathlib import Path
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from spotlight.models import tiny
from spotlight.models.family import ConditionBatch, MediaSize, ModelError, ModelFamily
from spotlight.models.family_facts import (
    ActivationCosts,
    Dimensions,
    PublishedModel,
    config_integer,
)
from spotlight.models.pipeline_files import PipelineComponent, PipelineFiles
from spotlight.models.shared.checks import require_equal
from spotlight.models.shared.latents import decode_normalised
from spotlight.models.shared.noise_levels import scheduler_config
from spotlight.models.shared.published_vaes import causal_vae

_TRANSFORMER: dict[str, object] = {
    "_class_name": "WanTransformer3DModel",
    "patch_size": [1, 2, 2],
    "num_attention_heads": 40,
    "attention_head_dim": 128,
    "in_channels": 16,
    "out_channels": 16,
    "text_dim": 4096,
    "freq_dim": 256,
    "ffn_dim": 13824,
    "num_layers": 40,
    "cross_attn_norm": True,
    "qk_norm": "rms_norm_across_heads",
    "eps": 1e-6,
    "rope_max_seq_len": 1024,
}
_VAE = "AutoencoderKLWan"
_UMT5_PARAMETERS = 5.68e9
_SOURCE = "`convert_wan_to_diffusers.py`"


class Wan(ModelFamily):
    """A Wan model: 2.1, 2.2-A14B with two transformers, or 2.2-5B with a timestep per token."""

    name = "wan"
    pipeline_class = "WanPipeline"
    components = {
        "transformer": PipelineComponent(("WanTransformer3DModel",), weights=True),
        "transformer_2": PipelineComponent(("WanTransformer3DModel",), weights=True, optional=True),
        "vae": PipelineComponent(("AutoencoderKLWan",), weights=True),
        "scheduler": PipelineComponent(
            ("UniPCMultistepScheduler", "FlowMatchEulerDiscreteScheduler"), weights=False
        ),
        "tokenizer": PipelineComponent(("T5TokenizerFast", "T5Tokenizer"), weights=False),
        "text_encoder": PipelineComponent(("UMT5EncoderModel",), weights=True, lazy=True),
    }
    lora_targets = ("to_q", "to_k", "to_v", "to_out.0", "ffn.net.0.proj", "ffn.net.2")
    activations = ActivationCosts(lora=23.5, full=31.5, checkpointed=1.15, forward=12.5, decode=14.0)
    video = True
    usual_frames_per_latent = 4
    reuses_blocks = True
    pads_last = True  # the model attends to padding, without a mask
    splits_sequence = True
    loading_lines = (
        "from diffusers import FlowMatchEulerDiscreteScheduler",
        "class Euler(FlowMatchEulerDiscreteScheduler):  # at the noise levels of the pipeline's scheduler",
        "    levels = pipe.scheduler",
        "    def set_timesteps(self, steps, device=None):",
        "        self.levels.set_timesteps(steps)",
        "        sigmas = [1.0, *self.levels.sigmas[1:-1].tolist()]",
        "        super().set_timesteps(sigmas=sigmas, device=device)",
        "pipe.scheduler = Euler(shift=1.0)",
    )
    text_tokens_max = 512
    published = {
        "Wan-AI/Wan2.1-T2V-1.3B-Diffusers": PublishedModel(
            configs={
                "transformer": _TRANSFORMER | {"num_attention_heads": 12, "ffn_dim": 8960, "num_layers": 30},
                "vae": causal_vae(_VAE),
            },
            parameters=1.42e9,
            text_parameters=_UMT5_PARAMETERS,
            source=_SOURCE,
        ),
        "Wan-AI/Wan2.1-T2V-14B-Diffusers": PublishedModel(
            configs={"transformer": _TRANSFORMER, "vae": causal_vae(_VAE)},
            parameters=14.29e9,
            text_parameters=_UMT5_PARAMETERS,
            source=_SOURCE,
        ),
        "Wan-AI/Wan2.2-T2V-A14B-Diffusers": PublishedModel(
            configs={"transformer": _TRANSFORMER, "transformer_2": _TRANSFORMER, "vae": causal_vae(_VAE)},
            parameters=28.58e9,
            text_parameters=_UMT5_PARAMETERS,
            source=_SOURCE,
            settings={"boundary_ratio": 0.875},
        ),
        "Wan-AI/Wan2.2-TI2V-5B-Diffusers": PublishedModel(
            configs={
                "transformer": _TRANSFORMER
                | {
                    "num_attention_heads": 24,
                    "in_channels": 48,
                    "out_channels": 48,
                    "ffn_dim": 14336,
                    "num_layers": 30,
                },
                "vae": causal_vae(
                    _VAE,
                    base_dim=160,
                    decoder_base_dim=256,
                    z_dim=48,
                    is_residual=True,
                    in_channels=12,
                    out_channels=12,
                    patch_size=2,
                    scale_factor_spatial=16,
                    scale_factor_temporal=4,
                ),
            },
            parameters=5.0e9,
            text_parameters=_UMT5_PARAMETERS,
            source=_SOURCE,
            settings={"expand_timesteps": True},
        ),
    }

    @classmethod
    def read_dimensions(cls, files: PipelineFiles) -> Dimensions:
        """From the configurations of transformer and VAE."""
        vae = files.config("vae")
        heads, per_head, channels = (
            config_integer(files, "transformer", key)
            for key in ("num_attention_heads", "attention_head_dim", "in_channels")
        )
        decoder = vae.get("decoder_base_dim")
        return Dimensions(
            layers=config_integer(files, "transformer", "num_layers"),
            width=heads * per_head,
            heads=heads,
            channels=4 * channels,
            patch_px=2 * _factors(files)[0],
            # The decoder of 2.2-5B works on 2 x 2 pixels at once: by its memory it has 3/8 of its channels.
            vae_width=3 * decoder // 8
            if isinstance(decoder, int)
            else config_integer(files, "vae", "base_dim"),
            frames_per_latent=_factors(files)[1],
        )

    @classmethod
    def planned_text_tokens(cls, words: int, most: int) -> int:
        """All of them: prompts are padded."""
        return most

    @classmethod
    def call_arguments(cls, scale: float, embedded: float | None) -> dict[str, object]:
        """True guidance is the pipeline's ``guidance_scale``."""
        return {"guidance_scale": scale}

    @classmethod
    def decoded_pixels(cls, size: MediaSize) -> int:
        """Of one latent frame, which are four frames; above 720p of a tile, and the finished ones."""
        frame = size.height * size.width
        if frame <= _UNTILED_PX:
            return min(size.frames, 4) * frame
        return min(size.frames, 4) * _TILE_PX + size.pixels // _FINISHED

    @classmethod
    def check_split(cls, degree: int, tokens: int, text_tokens: int) -> None:
        """Latent tokens attend to each other without a mask, so none can be padded."""
        if tokens % degree:
            raise ModelError(
                f"degrees has {degree}; expected divisors of {tokens}, the latent tokens of a sample. Change "
                "rollout.height, width or frames, or leave the degree out"
            )

    def check_parts(self) -> None:
        """Sizes of transformers, VAE and text encoder that must agree; variants of other pipelines."""
        vae = self.vae.config
        spatial, temporal = _factors(self.files)
        require_equal(
            self.files.folder("vae") / "config.json",
            {
                "scale_factor_spatial": (
                    spatial,
                    (vae.patch_size or 1) * 2 ** (len(vae.dim_mult) - 1),
                    "as its blocks and patches upsample",
                ),
                "scale_factor_temporal": (
                    temporal,
                    2 ** sum(vae.temperal_downsample),
                    "as temperal_downsample says",
                ),
            },
        )
        for name in ("transformer", "transformer_2"):
            if self.files.component_class(name) is None:
                continue
            config = self.files.config(name)
            require_equal(
                self.files.folder(name) / "config.json",
                {
                    "patch_size": (config.get("patch_size"), [1, 2, 2], "2x2 latents become one token"),
                    "in_channels": (config.get("in_channels"), vae.z_dim, "the VAE's z_dim"),
                    "out_channels": (config.get("out_channels"), vae.z_dim, "the VAE's z_dim"),
                    "text_dim": (
                        config.get("text_dim"),
                        self.files.config("text_encoder").get("d_model"),
                        "the text encoder's d_model",
                    ),
                    "image_dim": (config.get("image_dim"), None, "image-to-video is not supported"),
                },
            )
        two = self.files.component_class("transformer_2") is not None
        if two is (self._boundary is None):
            raise ModelError(
                f"{self.files.root}/model_index.json has boundary_ratio = "
                f"{self.files.setting('boundary_ratio')} and {'a' if two else 'no'} transformer_2; expected "
                "both (Wan2.2-A14B) or neither"
            )

    @classmethod
    def make_scheduler(cls, files: PipelineFiles) -> Any:
        """The pipeline's own, for its noise levels; steps are Euler's with either."""
        import diffusers

        config = scheduler_config(files)
        kind = files.component_class("scheduler") or ""
        facts: dict[str, tuple[object, object, str]] = {
            "use_dynamic_shifting": (
                config.get("use_dynamic_shifting", False),
                False,
                "the pipeline passes no mu",
            )
        }
        if kind == "UniPCMultistepScheduler":
            flow = "Wan is a flow-matching model"
            facts |= {
                "prediction_type": (config.get("prediction_type"), "flow_prediction", flow),
                "use_flow_sigmas": (config.get("use_flow_sigmas"), True, flow),
                "final_sigmas_type": (config.get("final_sigmas_type", "zero"), "zero", flow),
            }
        require_equal(files.folder("scheduler") / "scheduler_config.json", facts)
        return getattr(diffusers, kind).from_config(config)

    def set_timesteps(self, steps: int, size: MediaSize) -> None:
        """As the pipeline leaves them to its scheduler."""
        self.scheduler.set_timesteps(steps, device="cpu")
        # UniPC starts at 1 - 1e-6, where the noise of an SDE step would be immense.
        self.scheduler.sigmas[0] = 1.0

    def condition_shapes(self, text_tokens: int) -> dict[str, tuple[int, ...]]:
        """``embeds``: UMT5's last hidden state without padding."""
        return {"embeds": (text_tokens, self.config.text_dim)}

    def embed(self, pipeline: Any, prompt: str) -> dict[str, Tensor]:
        """The pipeline's own embeddings without the zeros after them."""
        embeds, _ = pipeline.encode_prompt(
            prompt,
            do_classifier_free_guidance=False,
            max_sequence_length=self.max_text_tokens,
            device=self.device,
        )
        tokens = int(embeds[0].any(dim=-1).nonzero().max()) + 1
        return {"embeds": embeds[0, :tokens]}

    def predict(
        self,
        model: nn.Module,
        latents: Tensor,
        sigma: Tensor,
        condition: ConditionBatch,
        embedded: float | None,
        size: MediaSize,
    ) -> Tensor:
        """Text padded with zeros; a timestep per token in Wan2.2-5B."""
        text, timestep = condition["embeds"], sigma * self.scheduler.config.num_train_timesteps
        if self._time_per_token:
            timestep = timestep[:, None].expand(-1, self.dimensions.tokens(size))
        prediction: Tensor = model(
            hidden_states=latents,
            timestep=timestep,
            encoder_hidden_states=F.pad(text, (0, 0, 0, self.max_text_tokens - text.shape[1])),
            return_dict=False,
        )[0]
        return prediction

    def first_transformer(self, sigma: Tensor) -> Tensor | None:
        """From the boundary up."""
        steps, boundary = self.scheduler.config.num_train_timesteps, self._boundary
        return None if boundary is None else sigma * steps >= boundary * steps

    def decode_frames(self, latents: Tensor, size: MediaSize) -> Tensor:
        """Undo the normalisation, decode frame by frame; above 720p in overlapping tiles."""
        self.vae.use_tiling = size.height * size.width > _UNTILED_PX
        return decode_normalised(self.vae, latents)

    @classmethod
    def tiny(cls, directory: Path, seed: int, variant: int = 0) -> None:
        """Wan2.1, the same with diffusers' Euler scheduler, 2.2-A14B and 2.2-5B."""
        from diffusers import FlowMatchEulerDiscreteScheduler, UniPCMultistepScheduler

        heads, layers, channels, text_width, doublings = (
            (4, 2, 4, 32, (True, True)), (2, 3, 6, 24, (False, True, True)),
            (4, 2, 4, 16, (True,)), (4, 2, 6, 32, (True, True)),
        )[variant]  # fmt: skip
        two, per_token = variant == 2, variant == 3
        unipc = {
            "prediction_type": "flow_prediction",
            "use_flow_sigmas": True,
            "flow_shift": 1.0 if two else 3.0,
        }
        tokenizer = tiny.t5_tokenizer()
        tiny.write_pipeline(
            cls.pipeline_class,
            directory,
            seed,
            transformer=_tiny_transformer(heads, layers, channels, text_width),
            transformer_2=_tiny_transformer(heads, layers, channels, text_width) if two else (None, None),
            boundary_ratio=0.6 if two else None,
            expand_timesteps=per_token,
            vae=_tiny_vae(channels, doublings, residual=per_token),
            scheduler=FlowMatchEulerDiscreteScheduler(shift=3.0)
            if variant == 1
            else UniPCMultistepScheduler(**unipc),
            tokenizer=tokenizer,
            text_encoder=tiny.t5_text_encoder(tokenizer, text_width, multilingual=True),
        )

    @cached_property
    def _boundary(self) -> float | None:
        ratio = self.files.setting("boundary_ratio")
        return ratio if isinstance(ratio, (int, float)) else None

    @cached_property
    def _time_per_token(self) -> bool:
        return bool(self.files.setting("expand_timesteps"))


_UNTILED_PX = 1280 * 720
"""Pixels of a frame up to which the VAE decodes it whole, as the pipeline does."""
_TILE_PX = 256 * 256
_FINISHED = 90
"""So much less memory takes a finished pixel than one in work: tiles overlap, are kept, joined and cut."""


def _factors(files: PipelineFiles) -> tuple[int, int]:
    """Pixels per latent, and frames per latent frame, by the configuration of the VAE."""
    config = files.config("vae")
    spatial, temporal = config.get("scale_factor_spatial", 8), config.get("scale_factor_temporal", 4)
    if not (isinstance(spatial, int) and isinstance(temporal, int)):
        raise ModelError(
            f"{files.root / 'vae'}/config.json has scale_factor_spatial = {spatial!r} and "
            f"scale_factor_temporal = {temporal!r}; expected integers"
        )
    return spatial, temporal


def _tiny_transformer(heads: int, layers: int, channels: int, text_width: int) -> Any:
    from diffusers import WanTransformer3DModel

    return WanTransformer3DModel(
        num_attention_heads=heads,
        attention_head_dim=12,
        in_channels=channels,
        out_channels=channels,
        text_dim=text_width,
        freq_dim=32,
        ffn_dim=24,
        num_layers=layers,
        rope_max_seq_len=64,
    )


def _tiny_vae(channels: int, doublings: tuple[bool, ...], *, residual: bool) -> Any:
    """``doublings``: of height and width, from the outside in; True where the frames double too."""
    from diffusers import AutoencoderKLWan

    patches = {"patch_size": 2, "in_channels": 12, "out_channels": 12, "decoder_base_dim": 12}
    return AutoencoderKLWan(
        base_dim=8,
        z_dim=channels,
        dim_mult=[1] * (len(doublings) + 1),
        num_res_blocks=1,
        temperal_downsample=list(doublings),
        latents_mean=[0.1 * i for i in range(channels)],
        latents_std=[1 + 0.2 * i for i in range(channels)],
        scale_factor_spatial=2 ** (len(doublings) + residual),
        scale_factor_temporal=2 ** sum(doublings),
        is_residual=residual,
        **(patches if residual else {}),
    )
