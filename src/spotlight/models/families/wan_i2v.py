"""Wan 2.1 and 2.2 image-to-video, over diffusers' ``WanImageToVideoPipeline``: a picture is the first frame.

Traps of the reference:
- 2.1 and 2.2-A14B take, beside the noisy latents, a mask of the first frame and the latents of a video of the
  picture and grey frames, as channels; 2.1 also what a CLIP sees in the picture.
- 2.2-5B takes the picture's latents in place of the first frame's, at noise level 0, and puts them there in
  the end. Here the velocity of the first frame leads there: in the last step, up to rounding.
- The hub's 2.2-5B names ``WanPipeline``, which draws from text.
- 2.1's attention takes the last 512 tokens for text, and those before for the picture.
- The CLIP processor's class needs torchvision: here is the one without.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from spotlight.models.condition import FIRST_FRAME, SEEN
from spotlight.models.families.wan import Wan
from spotlight.models.family import ConditionBatch, Instruction, MediaSize, ModelError, encode_normalised
from spotlight.models.family_facts import config_integer, read_models
from spotlight.models.text.references import open_reference
from spotlight_files.pipeline_files import PipelineComponent


def _picture_processor(folder: Path) -> Any:
    from transformers import CLIPImageProcessorPil

    return CLIPImageProcessorPil.from_pretrained(folder)


class WanI2V(Wan):
    """A Wan model that makes a video of a picture."""

    name = "wan-i2v"
    pipeline_class = "WanImageToVideoPipeline"
    other_pipelines = ("WanPipeline",)
    components = {
        **Wan.components,
        "image_encoder": PipelineComponent(
            ("CLIPVisionModel", "CLIPVisionModelWithProjection"), weights=True, lazy=True, optional=True
        ),
        "image_processor": PipelineComponent(
            ("CLIPImageProcessor", "CLIPImageProcessorFast", "CLIPImageProcessorPil"),
            weights=False,
            optional=True,
            load=_picture_processor,
        ),
    }
    # A layer reads the picture beside the text. Of videos longer than the text, which has all its 512 tokens.
    activations = replace(
        Wan.activations, lora=25.5, full=32.5, elementwise=15.3, checkpointed=1.22, forward=11.0
    )
    references_max = 1
    text_recipe = "a reference as the first frame"
    published, tiny_models = read_models(__file__)

    @classmethod
    def check_text_limit(cls, tokens: int) -> None:
        if tokens != cls.text_tokens_max:
            raise ModelError(
                f"max_text_tokens is {tokens}; expected {cls.text_tokens_max}: the transformer counts on it"
            )

    def own_inputs(self) -> dict[str, tuple[object, str]]:
        z, frames = self.vae.config.z_dim, self.vae.config.scale_factor_temporal
        sees = self.files.component_class("image_encoder") is not None
        width = (
            self.text_size("image_encoder", "hidden_size") if sees else (None, "there is no image_encoder")
        )
        channels = (
            (z, "the VAE's z_dim") if self._time_per_token else (2 * z + frames, "latents, mask, latents")
        )
        last = (None, "a model of first and last frames (FLF2V) takes two pictures")
        return {"in_channels": channels, "image_dim": width, "pos_embed_seq_len": last}

    def condition_shapes(self, text_tokens: int) -> dict[str, tuple[int, ...]]:
        """Wan's; the first frame's latents [frames, rows, columns, channels], of which one may stand for all;
        and the picture's patches as a CLIP sees them."""
        shapes = super().condition_shapes(text_tokens) | {FIRST_FRAME: (1, 1, 1, self.vae.config.z_dim)}
        if self.config.image_dim is None:
            return shapes
        side, patch = (
            config_integer(self.files, "image_encoder", key) for key in ("image_size", "patch_size")
        )
        return shapes | {SEEN: (1 + (side // patch) ** 2, self.config.image_dim)}

    def embed_instruction(self, pipeline: Any, instruction: Instruction) -> dict[str, Tensor]:
        """The pipeline's own embeddings, and its latents of the first frame."""
        from diffusers.video_processor import VideoProcessor

        (path,), size = instruction.references, instruction.size
        picture = open_reference(path)
        found = self.embed(pipeline, instruction.text)
        if self.config.image_dim is not None:
            found[SEEN] = pipeline.encode_image(picture, self.text_device)[0]
        resizer = VideoProcessor(vae_scale_factor=self.vae.config.scale_factor_spatial)
        pixels = resizer.preprocess(picture, height=size.height, width=size.width).unsqueeze(2)
        grey = pixels.new_zeros(
            *pixels.shape[:2], 0 if self._time_per_token else size.frames - 1, *pixels.shape[3:]
        )
        frames = torch.cat([pixels, grey], dim=2).to(self.device, torch.float32)
        self.tile(size)
        latents = encode_normalised(self.vae, frames)[0].permute(1, 2, 3, 0)
        return found | {FIRST_FRAME: latents.to(self.dtype)}

    def predict(
        self,
        model: nn.Module,
        latents: Tensor,
        sigma: Tensor,
        condition: ConditionBatch,
        embedded: float | None,
        size: MediaSize,
    ) -> Tensor:
        """The first frame is an input."""
        batch, channels, *grid = latents.shape
        first = condition[FIRST_FRAME].expand(batch, *grid, channels).permute(0, 4, 1, 2, 3)
        given = latents.new_zeros(1, 1, *grid)
        given[:, :, 0] = 1
        timestep = sigma * self.scheduler.config.num_train_timesteps
        if not self._time_per_token:
            mask = given.expand(batch, self.vae.config.scale_factor_temporal, *grid)
            return self.forward(model, torch.cat([latents, mask, first], dim=1), timestep, condition)
        seen = given * first + (1 - given) * latents
        levels = (1 - given[0, 0, :, ::2, ::2]).flatten() * timestep[:, None]
        velocity = self.forward(model, seen, levels, condition)
        leads = (latents - first) / sigma.view(-1, 1, 1, 1, 1)
        return torch.where(given.bool(), leads.to(velocity.dtype), velocity)
