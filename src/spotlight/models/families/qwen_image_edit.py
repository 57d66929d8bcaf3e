"""Qwen-Image-Edit-2509 and -2511, over diffusers' ``QwenImageEditPlusPipeline``: edits reference pictures.

Traps of the reference:
- Each reference is read twice: at about 384 x 384 pixels by the text encoder, for the negative prompt too,
  and at about 1024 x 1024 pixels by the VAE, whatever the size of the result.
- The references' latents follow the picture's in the sequence: the velocity is the output's head. Rotary
  positions are taken from the first row of a batch, so only prompts with references of equal shapes share a
  forward.
- In 2511 (``zero_cond_t``) references are modulated as at noise level 0.
- Prompts are never cut: one longer than ``max_text_tokens`` is an error.
- The pipeline passes no ``mm_token_type_ids``: with transformers 5 the text encoder counts a picture's tokens
  like those of text.
- The processor's class makes a video processor, which needs torchvision: here is one for pictures alone.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from spotlight.models.condition import EMBEDS, GRIDS, NEGATIVE_EMBEDS, REFERENCES
from spotlight.models.families.qwen_image import TOKENIZER_MAX_TOKENS, QwenImage
from spotlight.models.family import (
    ConditionBatch,
    Instruction,
    MediaSize,
    ModelError,
    encode_normalised,
    pack,
)
from spotlight.models.family_facts import ActivationCosts, read_models
from spotlight.models.shared.rows import by_kind
from spotlight.models.text.references import open_reference
from spotlight_files.pipeline_files import PipelineComponent

_REFERENCE_PX, _PATCH_PX, _VISION_PATCH_PX = 1024, 16, 28
_SEEN_PX = 384
_PICTURE = "<|image_pad|>"


class PictureProcessor:
    """A ``Qwen2VLProcessor`` for texts and pictures."""

    def __init__(self, folder: Path) -> None:
        from transformers import Qwen2Tokenizer, Qwen2VLImageProcessorPil

        self.tokenizer = Qwen2Tokenizer.from_pretrained(folder)
        self.image_processor = Qwen2VLImageProcessorPil.from_pretrained(folder)

    def __call__(
        self, text: Sequence[str], images: Sequence[Any] | None = None, **options: Any
    ) -> Mapping[str, Any]:
        """Token ids, mask, and the pictures' patches; a picture's one token becomes as many as it takes."""
        from transformers import BatchFeature

        seen = {} if images is None else dict(self.image_processor(images, return_tensors="pt"))
        merged = self.image_processor.merge_size**2
        counts = [int(each.prod()) // merged for each in seen.get("image_grid_thw", ())]
        filled = []
        for part in text:
            first, *others = part.split(_PICTURE)
            filled.append(first + "".join(_PICTURE * counts.pop(0) + other for other in others))
        found: Mapping[str, Any] = BatchFeature({**self.tokenizer(filled, **options), **seen})
        return found


class QwenImageEdit(QwenImage):
    """A Qwen-Image-Edit model of any size; guidance as in Qwen-Image."""

    name = "qwen-image-edit"
    pipeline_class = "QwenImageEditPlusPipeline"
    components = {
        **QwenImage.components,
        "processor": PipelineComponent(("Qwen2VLProcessor",), weights=False, load=PictureProcessor),
    }
    activations = ActivationCosts(
        lora=20.0, full=27.0, elementwise=11.2, checkpointed=1.2, forward=15.0, decode=21.0
    )
    reuses_blocks = False  # rows with references of other shapes take forwards of their own
    cuts_prompts = False
    references_max = math.inf
    reference_tokens = (_REFERENCE_PX // _PATCH_PX) ** 2 + (_SEEN_PX // _VISION_PATCH_PX) ** 2
    text_recipe = f"references at {_SEEN_PX} and {_REFERENCE_PX} px"
    published, tiny_models = read_models(__file__)

    def condition_shapes(self, text_tokens: int) -> dict[str, tuple[int, ...]]:
        """``embeds``, those of the negative prompt, the references' packed latents, and rows and columns of
        each reference."""
        width = self.config.joint_attention_dim
        return {
            EMBEDS: (text_tokens, width),
            NEGATIVE_EMBEDS: (text_tokens, width),
            REFERENCES: (self.reference_tokens, self.dimensions.channels),
            GRIDS: (1, 2),
        }

    def embed(self, pipeline: Any, prompt: str) -> dict[str, Tensor]:
        """Without a reference picture, as of the run's negative prompt; prompts to draw need one."""
        return self._about(pipeline, prompt, prompt, ())

    def embed_instruction(self, pipeline: Any, instruction: Instruction) -> dict[str, Tensor]:
        """The pipeline's own embeddings, and its latents of the references."""
        return self._about(pipeline, instruction.text, instruction.negative, instruction.references)

    def _about(self, pipeline: Any, text: str, negative: str, references: Sequence[str]) -> dict[str, Tensor]:
        pictures = [open_reference(path) for path in references]
        embeds = self._text(pipeline, text, pictures)
        latents = [self._reference(picture) for picture in pictures]
        grids = [[latent.shape[2] // 2, latent.shape[3] // 2] for latent in latents]
        tokens = [pack(latent)[0].to(self.dtype) for latent in latents]
        return {
            EMBEDS: embeds,
            NEGATIVE_EMBEDS: embeds.clone() if negative == text else self._text(pipeline, negative, pictures),
            REFERENCES: torch.cat([embeds.new_zeros(0, self.dimensions.channels), *tokens]),
            GRIDS: torch.tensor(grids, dtype=torch.int64).reshape(-1, 2),
        }

    def _text(self, pipeline: Any, text: str, pictures: list[Any]) -> Tensor:
        from diffusers.image_processor import VaeImageProcessor
        from diffusers.pipelines.qwenimage import pipeline_qwenimage_edit_plus as reference

        resizer = VaeImageProcessor(vae_scale_factor=self.dimensions.patch_px)
        seen = []
        for picture in pictures:
            width, height = reference.calculate_dimensions(reference.CONDITION_IMAGE_SIZE, _ratio(picture))
            seen.append(resizer.resize(picture, height, width))
        embeds: Tensor = pipeline.encode_prompt(text, image=seen or None, device=self.text_device)[0][0]
        if embeds.shape[0] > self.max_text_tokens:
            raise ModelError(
                f"prompt {text!r} with {len(pictures)} reference pictures has {embeds.shape[0]} tokens; "
                f"expected at most {self.max_text_tokens}: {self.pipeline_class} cuts no prompts, so raise "
                f"model.max_text_tokens (up to {TOKENIZER_MAX_TOKENS}), shorten it or give fewer pictures"
            )
        return embeds

    def _reference(self, picture: Any) -> Tensor:
        """Normalised latents [1, channels, height, width]."""
        from diffusers.image_processor import VaeImageProcessor
        from diffusers.pipelines.qwenimage import pipeline_qwenimage_edit_plus as reference

        width, height = reference.calculate_dimensions(reference.VAE_IMAGE_SIZE, _ratio(picture))
        resizer = VaeImageProcessor(vae_scale_factor=self.dimensions.patch_px)
        pixels = resizer.preprocess(picture, height, width).to(self.device, torch.float32)
        return encode_normalised(self.vae, pixels.unsqueeze(2))[:, :, 0]

    def predict(
        self,
        model: nn.Module,
        latents: Tensor,
        sigma: Tensor,
        condition: ConditionBatch,
        embedded: float | None,
        size: MediaSize,
    ) -> Tensor:
        """Rows whose references have equal shapes share a forward; the picture is its output's head."""
        timestep, text, mask = self.rounded(sigma), condition[EMBEDS], condition.mask(EMBEDS)
        references, tokens = condition[REFERENCES], latents.shape[1]
        grids = [tuple((rows, columns) for rows, columns in each.tolist()) for each in condition.rows(GRIDS)]

        def run(shapes: tuple[tuple[int, int], ...], rows: list[int]) -> Tensor:
            shown = references[rows, : sum(math.prod(shape) for shape in shapes)]
            return self.output_of(
                model,
                hidden_states=torch.cat([latents[rows], shown], dim=1),
                timestep=timestep[rows],
                encoder_hidden_states=text[rows],
                encoder_hidden_states_mask=None if mask is None else mask[rows],
                img_shapes=[[(1, *shape) for shape in (self.dimensions.grid(size), *shapes)]] * len(rows),
            )[:, :tokens]

        return by_kind(model, grids, run)


def _ratio(picture: Any) -> float:
    return float(picture.width / picture.height)
