"""Z-Image and Z-Image-Turbo, over diffusers' ``ZImagePipeline``.

Traps of the reference:
- The transformer takes lists, and pads each text and image to a multiple of 32 tokens that it attends to.
- Time runs from 0 at noise to 1 at the picture, and the output is x0 - e.
- Its guidance scale g means ``positive + g * (positive - negative)``: ours, the usual one, is g + 1.
- Noise levels are spaced in float32.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from spotlight.models.family import ConditionBatch, MediaSize
from spotlight.models.family_facts import (
    ActivationCosts,
    Dimensions,
    block_widths,
    config_integer,
    read_models,
)
from spotlight.models.shared.image_vae import ScaledVaeFamily
from spotlight_files.lora_names import Z_IMAGE_COMFYUI, Z_IMAGE_KOHYA
from spotlight_files.pipeline_files import PipelineComponent, PipelineFiles


class ZImage(ScaledVaeFamily):
    """A Z-Image model of any size. The distilled Turbo takes no guidance."""

    name = "z-image"
    pipeline_class = "ZImagePipeline"
    text_multiple = 32
    components = {
        "transformer": PipelineComponent(("ZImageTransformer2DModel",), weights=True),
        "vae": PipelineComponent(("AutoencoderKL",), weights=True),
        "scheduler": PipelineComponent(("FlowMatchEulerDiscreteScheduler",), weights=False),
        "tokenizer": PipelineComponent(("Qwen2Tokenizer", "Qwen2TokenizerFast"), weights=False),
        "text_encoder": PipelineComponent(("Qwen3Model", "Qwen3ForCausalLM"), weights=True, lazy=True),
    }
    lora_targets = (
        *("attention.to_q", "attention.to_k", "attention.to_v", "attention.to_out.0"),
        *("feed_forward.w1", "feed_forward.w2", "feed_forward.w3"),
    )
    lora_names = {"comfyui": Z_IMAGE_COMFYUI, "kohya": Z_IMAGE_KOHYA}
    activations = ActivationCosts(
        lora=21.5, full=30.9, elementwise=12.5, checkpointed=1.16, forward=16.0, decode=6.5
    )
    pads_last = True
    published, tiny_models = read_models(__file__)

    @classmethod
    def read_dimensions(cls, files: PipelineFiles) -> Dimensions:
        """The refiners of image and text count as layers."""
        layers, refiners, heads, width, channels = (
            config_integer(files, "transformer", key)
            for key in ("n_layers", "n_refiner_layers", "n_heads", "dim", "in_channels")
        )
        px, vae_width = block_widths(files)
        return Dimensions(layers + 2 * refiners, width, heads, 4 * channels, 2 * px, vae_width)

    @classmethod
    def call_arguments(cls, scale: float, embedded: float | None) -> dict[str, object]:
        """The pipeline's scale is less by one."""
        return {"guidance_scale": scale - 1}

    def wanted_config(self) -> dict[str, tuple[object, str]]:
        return {
            "all_patch_size": ([2], "the pipeline's patches are 2x2"),
            "all_f_patch_size": ([1], "of one frame"),
            "in_channels": (self.vae.config.latent_channels, "the VAE's latent_channels"),
            "cap_feat_dim": self.text_size("text_encoder", "hidden_size"),
            "siglip_feat_dim": (None, "it belongs to another pipeline"),
        }

    def condition_shapes(self, text_tokens: int) -> dict[str, tuple[int, ...]]:
        """``embeds``: the text encoder's hidden state before its last layer."""
        return {"embeds": (text_tokens, self.config.cap_feat_dim)}

    def embed(self, pipeline: Any, prompt: str) -> dict[str, Tensor]:
        """The pipeline's own embeddings, cut at ``max_text_tokens``."""
        embeds, _ = pipeline.encode_prompt(
            prompt,
            device=self.text_device,
            do_classifier_free_guidance=False,
            max_sequence_length=self.max_text_tokens,
        )
        return {"embeds": embeds[0]}

    def given_sigmas(self, steps: int) -> Sequence[float]:
        sigmas: list[float] = torch.linspace(1.0, 1 / steps, steps).tolist()
        return sigmas

    def predict(
        self,
        model: nn.Module,
        latents: Tensor,
        sigma: Tensor,
        condition: ConditionBatch,
        embedded: float | None,
        size: MediaSize,
    ) -> Tensor:
        """Lists of rows, time from 0 at noise, output negated."""
        steps = self.scheduler.config.num_train_timesteps
        time = (steps - sigma * steps) / steps  # in the pipeline's order: each operation rounds
        frames = latents.unsqueeze(2)
        outputs: list[Tensor] = model(
            list(frames.unbind(0)), time, condition.rows("embeds"), return_dict=False
        )[0]
        return -torch.stack([output.float() for output in outputs]).squeeze(2)

    def combine(self, prediction: Tensor, negative: Tensor, scale: float) -> Tensor:
        """In the pipeline's order of operations."""
        return prediction + (scale - 1) * (prediction - negative)
