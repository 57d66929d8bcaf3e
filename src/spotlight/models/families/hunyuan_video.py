"""HunyuanVideo text-to-video, over diffusers' ``HunyuanVideoPipeline``.

Traps of the reference:
- The embedded guidance scale is multiplied by 1000; the timestep is not divided.
- The pipeline drops a fixed number of the prompt template's tokens, whatever the tokenizer.
- Without tiles, the VAE needs more memory for a 720p video than any one GPU has.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor, nn

from spotlight.models import tiny
from spotlight.models.family import ConditionBatch, MediaSize, ModelError, ModelFamily
from spotlight.models.family_facts import (
    ActivationCosts,
    Dimensions,
    PublishedModel,
    config_integer,
    config_list,
)
from spotlight.models.pipeline_files import PipelineComponent, PipelineFiles
from spotlight.models.shared.checks import require_equal

_UNTILED_PX = 512 * 512
"""Pixels of a frame up to which the VAE decodes it whole, as the pipeline does."""
_TILE_PX, _CHUNK_FRAMES = 256 * 256, 17


class HunyuanVideo(ModelFamily):
    """A HunyuanVideo model; the guidance scale is an input, true guidance is possible on top of it."""

    name = "hunyuan-video"
    pipeline_class = "HunyuanVideoPipeline"
    components = {
        "transformer": PipelineComponent(("HunyuanVideoTransformer3DModel",), weights=True),
        "vae": PipelineComponent(("AutoencoderKLHunyuanVideo",), weights=True),
        "scheduler": PipelineComponent(("FlowMatchEulerDiscreteScheduler",), weights=False),
        "tokenizer": PipelineComponent(("LlamaTokenizerFast", "LlamaTokenizer"), weights=False),
        "tokenizer_2": PipelineComponent(("CLIPTokenizer", "CLIPTokenizerFast"), weights=False),
        "text_encoder": PipelineComponent(("LlamaModel",), weights=True, lazy=True),
        "text_encoder_2": PipelineComponent(("CLIPTextModel",), weights=True, lazy=True),
    }
    lora_targets = (
        *("to_q", "to_k", "to_v", "to_out.0"),
        *("add_q_proj", "add_k_proj", "add_v_proj", "to_add_out"),
        *("ff.net.0.proj", "ff.net.2", "ff_context.net.0.proj", "ff_context.net.2"),
    )
    activations = ActivationCosts(lora=14.5, full=23.5, checkpointed=1.15, forward=16.0, decode=10.5)
    video = True
    usual_frames_per_latent = 4
    splits_sequence = True
    always_masks = True
    pads_last = True
    embedded_guidance = 6.0
    published = {
        "hunyuanvideo-community/HunyuanVideo": PublishedModel(
            configs={
                "transformer": {
                    "_class_name": "HunyuanVideoTransformer3DModel",
                    "in_channels": 16,
                    "out_channels": 16,
                    "num_attention_heads": 24,
                    "attention_head_dim": 128,
                    "num_layers": 20,
                    "num_single_layers": 40,
                    "num_refiner_layers": 2,
                    "mlp_ratio": 4.0,
                    "patch_size": 2,
                    "patch_size_t": 1,
                    "qk_norm": "rms_norm",
                    "guidance_embeds": True,
                    "text_embed_dim": 4096,
                    "pooled_projection_dim": 768,
                    "rope_theta": 256.0,
                    "rope_axes_dim": [16, 56, 56],
                },
                "vae": {
                    "_class_name": "AutoencoderKLHunyuanVideo",
                    "latent_channels": 16,
                    "block_out_channels": [128, 256, 512, 512],
                    "layers_per_block": 2,
                    "norm_num_groups": 32,
                    "scaling_factor": 0.476986,
                    "spatial_compression_ratio": 8,
                    "temporal_compression_ratio": 4,
                },
            },
            parameters=12.82e9,
            text_parameters=7.63e9,
            source="`convert_hunyuan_video_to_diffusers.py`",
        )
    }

    @classmethod
    def read_dimensions(cls, files: PipelineFiles) -> Dimensions:
        """From the configurations of transformer and VAE."""
        double, single, heads, per_head, channels = (
            config_integer(files, "transformer", key)
            for key in (
                *("num_layers", "num_single_layers", "num_attention_heads", "attention_head_dim"),
                "in_channels",
            )
        )
        return Dimensions(
            layers=double + single,
            width=heads * per_head,
            heads=heads,
            channels=4 * channels,
            patch_px=2 * config_integer(files, "vae", "spatial_compression_ratio"),
            vae_width=int(str(config_list(files, "vae", "block_out_channels")[0])),
            frames_per_latent=config_integer(files, "vae", "temporal_compression_ratio"),
        )

    @classmethod
    def decoded_pixels(cls, size: MediaSize) -> int:
        """Of a chunk of frames; above 512 x 512 of a tile."""
        frame = size.height * size.width
        return min(size.frames, _CHUNK_FRAMES) * (frame if frame <= _UNTILED_PX else _TILE_PX)

    def check_parts(self) -> None:
        """Sizes of transformer, VAE and text encoders that must agree; variants of other pipelines."""
        config, channels = self.config, self.vae.config.latent_channels
        require_equal(
            self.files.folder("transformer") / "config.json",
            {
                "patch_size": (config.patch_size, 2, "2x2 latents become one token"),
                "patch_size_t": (config.patch_size_t, 1, "each latent frame has its own tokens"),
                "in_channels": (config.in_channels, channels, "the VAE's latent_channels"),
                "out_channels": (config.out_channels, channels, "the VAE's latent_channels"),
                "image_condition_type": (
                    config.image_condition_type,
                    None,
                    "image-to-video is not supported",
                ),
                "text_embed_dim": (
                    config.text_embed_dim,
                    self.files.config("text_encoder").get("hidden_size"),
                    "text_encoder's hidden_size",
                ),
                "pooled_projection_dim": (
                    config.pooled_projection_dim,
                    self.files.config("text_encoder_2").get("hidden_size"),
                    "text_encoder_2's hidden_size",
                ),
            },
        )

    def set_timesteps(self, steps: int, size: MediaSize) -> None:
        """Linear from 1 towards 0 in ``steps`` steps, then shifted."""
        self.scheduler.set_timesteps(device="cpu", sigmas=np.linspace(1.0, 0.0, steps + 1)[:-1])

    def condition_shapes(self, text_tokens: int) -> dict[str, tuple[int, ...]]:
        """``embeds``: Llama's third last hidden state; ``pooled``: CLIP's pooled output."""
        config = self.config
        return {
            "embeds": (text_tokens, config.text_embed_dim),
            "pooled": (config.pooled_projection_dim,),
        }

    def embed(self, pipeline: Any, prompt: str) -> dict[str, Tensor]:
        """The pipeline's own embeddings without padding."""
        embeds, pooled, mask = pipeline.encode_prompt(
            prompt, device=self.device, max_sequence_length=self.max_text_tokens
        )
        kept = embeds[0, mask[0].bool()]
        if kept.shape[0] == 0:
            raise ModelError(
                f"prompt {prompt!r} has no tokens after those of the template that the pipeline drops: the "
                f"tokenizer of {self.files.root} does not split the template as Llama's does"
            )
        return {"embeds": kept, "pooled": pooled[0]}

    def predict(
        self,
        model: nn.Module,
        latents: Tensor,
        sigma: Tensor,
        condition: ConditionBatch,
        embedded: float | None,
        size: MediaSize,
    ) -> Tensor:
        """The guidance scale is an input, times 1000; masked text."""
        text, mask = condition["embeds"], condition.mask("embeds")
        scale = None if embedded is None else latents.new_full(sigma.shape, embedded) * 1000.0
        prediction: Tensor = model(
            hidden_states=latents,
            timestep=sigma * self.scheduler.config.num_train_timesteps,
            encoder_hidden_states=text,
            encoder_attention_mask=text.new_ones(text.shape[:2]) if mask is None else mask.to(self.dtype),
            pooled_projections=condition["pooled"],
            guidance=scale,
            return_dict=False,
        )[0]
        return prediction

    def decode_frames(self, latents: Tensor, size: MediaSize) -> Tensor:
        """Undo the scale, decode in overlapping chunks of frames; large ones in tiles."""
        self.vae.use_tiling = size.height * size.width > _UNTILED_PX
        scaled = latents / self.vae.config.scaling_factor
        decoded: Tensor = self.vae.decode(scaled, return_dict=False)[0]
        return decoded

    @classmethod
    def tiny(cls, directory: Path, seed: int, variant: int = 0) -> None:
        """See :meth:`ModelFamily.tiny`."""
        from diffusers import (
            AutoencoderKLHunyuanVideo,
            FlowMatchEulerDiscreteScheduler,
            HunyuanVideoTransformer3DModel,
        )
        from diffusers.pipelines.hunyuan_video.pipeline_hunyuan_video import DEFAULT_PROMPT_TEMPLATE

        channels, heads, double, single, text_width, factor = (
            (4, 4, 1, 2, 32, 4), (6, 2, 2, 1, 16, 8), (4, 2, 1, 3, 48, 8), (8, 4, 2, 2, 32, 4),
        )[variant]  # fmt: skip
        tokenizer = tiny.llama_tokenizer(DEFAULT_PROMPT_TEMPLATE["template"], vocabulary=270)
        tokenizer_2 = tiny.clip_tokenizer()
        levels = factor.bit_length()
        tiny.write_pipeline(
            cls.pipeline_class,
            directory,
            seed,
            transformer=HunyuanVideoTransformer3DModel(
                in_channels=channels,
                out_channels=channels,
                num_attention_heads=heads,
                attention_head_dim=8,
                num_layers=double,
                num_single_layers=single,
                num_refiner_layers=1,
                mlp_ratio=2.0,
                text_embed_dim=text_width,
                pooled_projection_dim=24,
                rope_axes_dim=(2, 2, 4),
            ),
            vae=AutoencoderKLHunyuanVideo(
                latent_channels=channels,
                down_block_types=["HunyuanVideoDownBlock3D"] * levels,
                up_block_types=["HunyuanVideoUpBlock3D"] * levels,
                block_out_channels=[8] * levels,
                layers_per_block=1,
                norm_num_groups=4,
                scaling_factor=0.7,
                spatial_compression_ratio=factor,
            ),
            scheduler=FlowMatchEulerDiscreteScheduler(shift=7.0),
            tokenizer=tokenizer,
            text_encoder=tiny.llama_text_encoder(tokenizer, text_width),
            tokenizer_2=tokenizer_2,
            text_encoder_2=tiny.clip_text_encoder(tokenizer_2, 24),
        )
