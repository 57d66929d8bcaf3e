"""HunyuanVideo text-to-video, over diffusers' ``HunyuanVideoPipeline``.

Traps of the reference:
- The embedded guidance scale is multiplied by 1000; the timestep is not divided.
- The pipeline drops a fixed number of the prompt template's tokens, whatever the tokenizer.
- Without tiles, the VAE needs more memory for a 720p video than any one GPU has.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from torch import Tensor, nn

from spotlight.models.family import ConditionBatch, MediaSize, ModelFamily
from spotlight.models.family_facts import (
    ActivationCosts,
    Dimensions,
    config_integer,
    dimensions,
    read_models,
)
from spotlight.models.shared.checks import after_template
from spotlight_files.lora_names import HUNYUAN_COMFYUI, HUNYUAN_KOHYA
from spotlight_files.pipeline_files import PipelineComponent, PipelineFiles

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
    lora_names = {"comfyui": HUNYUAN_COMFYUI, "kohya": HUNYUAN_KOHYA}
    activations = ActivationCosts(
        lora=14.5, full=23.5, elementwise=9.7, checkpointed=1.15, forward=16.0, decode=10.5
    )
    video = True
    usual_frames_per_latent = 4
    splits_sequence = True
    always_masks = True
    pads_last = True
    embedded_guidance = 6.0
    published, tiny_models = read_models(__file__)

    @classmethod
    def read_dimensions(cls, files: PipelineFiles) -> Dimensions:
        return dimensions(
            files,
            layers=("num_layers", "num_single_layers"),
            latents_per_token=4,
            patch_px=2 * config_integer(files, "vae", "spatial_compression_ratio"),
            frames_per_latent=config_integer(files, "vae", "temporal_compression_ratio"),
        )

    @classmethod
    def decoded_pixels(cls, size: MediaSize) -> int:
        """Of a chunk of frames; above 512 x 512 of a tile."""
        frame = size.height * size.width
        return min(size.frames, _CHUNK_FRAMES) * (frame if frame <= _UNTILED_PX else _TILE_PX)

    def wanted_config(self) -> dict[str, tuple[object, str]]:
        channels = self.vae.config.latent_channels
        return {
            "patch_size": (2, "2x2 latents become one token"),
            "patch_size_t": (1, "each latent frame has its own tokens"),
            "in_channels": (channels, "the VAE's latent_channels"),
            "out_channels": (channels, "the VAE's latent_channels"),
            "image_condition_type": (None, "image-to-video is not supported"),
            "text_embed_dim": self.text_size("text_encoder", "hidden_size"),
            "pooled_projection_dim": self.text_size("text_encoder_2", "hidden_size"),
        }

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
            prompt, device=self.text_device, max_sequence_length=self.max_text_tokens
        )
        kept = after_template(embeds[0, mask[0].bool()], prompt, self.files, "Llama")
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
        return self.output_of(
            model,
            hidden_states=latents,
            timestep=sigma * self.scheduler.config.num_train_timesteps,
            encoder_hidden_states=text,
            encoder_attention_mask=text.new_ones(text.shape[:2]) if mask is None else mask.to(self.dtype),
            pooled_projections=condition["pooled"],
            guidance=scale,
        )

    def decode_frames(self, latents: Tensor, size: MediaSize) -> Tensor:
        """Undo the scale, decode in overlapping chunks of frames; large ones in tiles."""
        self.vae.use_tiling = size.height * size.width > _UNTILED_PX
        scaled = latents / self.vae.config.scaling_factor
        return self.output_of(self.vae.decode, scaled)
