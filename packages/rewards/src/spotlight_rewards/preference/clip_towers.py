"""CLIP's two towers as the preference rewards use them: unit vectors of pictures and prompts, and cosines.

Imported in the reward's own process only: it imports torch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeAlias

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image as PILImage

from spotlight_rewards.models.batches import in_batches
from spotlight_rewards.models.pretrained_model import (
    find_device,
    load_image_processor,
    load_pretrained,
    load_tokenizer,
)
from spotlight_rewards.reward import Gradient, Image, RewardSetupError

UNREAD = r"position_ids$"
MEAN, STD = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)
"""Of the pixels that OpenAI's CLIPs, and those of open_clip, are trained on."""
Prepare: TypeAlias = Callable[[Sequence[Image]], torch.Tensor]
"""Pictures to pixels [pictures, 3, side, side]."""
Soft: TypeAlias = Callable[[torch.Tensor], torch.Tensor]


class ClipTowers:
    """Embeds pictures and prompts.

    Args:
        model: transformers' CLIPModel, on its device.
        soft: what ``prepare`` does, of pixels [pictures, 3, height, width] in [0, 1] and differentiable.
        identity: what scores, as results have it.
        batch_size: pictures, or prompts, in a forward.

    Raises:
        RewardSetupError: an invalid batch size.
    """

    def __init__(
        self,
        name: str,
        model: Any,
        identity: str,
        *,
        tokenizer: Any,
        prepare: Prepare,
        soft: Soft,
        batch_size: int,
    ) -> None:
        if not isinstance(batch_size, int) or batch_size < 1:
            raise RewardSetupError(f"{name} reward: batch_size is {batch_size!r}; expected 1 or more")
        self.model, self.identity = model, identity
        self._name, self._tokenizer, self._prepare, self._batch_size = name, tokenizer, prepare, batch_size
        self._soft = soft
        self._tokens_max: int = model.config.text_config.max_position_embeddings

    @property
    def logit_scale(self) -> float:
        """The trained temperature, exp of its stored logarithm."""
        return float(self.model.logit_scale.exp())

    @torch.inference_mode()
    def images(self, images: Sequence[Image]) -> torch.Tensor:
        """Unit vectors of pictures [height, width, 3]: [pictures, width].

        Raises:
            ValueError: the model's outputs are not finite.
        """
        return torch.cat([self._seen(self._prepare(part)) for part in in_batches(images, self._batch_size)])

    def gradients(
        self, images: Sequence[Image], score: Callable[[torch.Tensor, slice], torch.Tensor]
    ) -> list[Gradient]:
        """Of each picture's score by its pixels in [0, 1]; pictures of one size.

        Args:
            score: [pictures] of unit vectors [pictures, width], and which of ``images`` they are of.
        """
        found: list[Gradient] = []
        for start in range(0, len(images), self._batch_size):
            part = slice(start, start + self._batch_size)
            pixels = torch.from_numpy(np.stack(images[part])).permute(0, 3, 1, 2).float() / 255
            pixels.requires_grad_()
            total = score(self._seen(self._soft(pixels)), part).sum()
            (gradient,) = torch.autograd.grad(total, pixels)
            found.extend(gradient.permute(0, 2, 3, 1).numpy())
        return found

    def compared_gradients(
        self, images: Sequence[Image], prompts: Sequence[str], factor: float = 1.0
    ) -> list[Gradient]:
        """Of the score of :meth:`compare`."""
        texts = self.texts(prompts).clone()  # made in inference mode, which remembers nothing
        return self.gradients(images, lambda seen, part: factor * (seen * texts[part]).sum(-1))

    def _seen(self, pixels: torch.Tensor) -> torch.Tensor:
        pooled = self.model.vision_model(pixel_values=pixels.to(self.model.device)).pooler_output
        return self._unit(self.model.visual_projection(pooled))

    @torch.inference_mode()
    def texts(self, texts: Sequence[str]) -> torch.Tensor:
        """Unit vectors: [texts, width]; of a long text, its beginning. Raises as :meth:`images`."""
        parts = []
        for part in in_batches(texts, self._batch_size):
            tokens = self._tokenizer(
                list(part), padding="max_length", truncation=True, max_length=self._tokens_max,
                return_tensors="pt",
            ).to(self.model.device)  # fmt: skip
            pooled = self.model.text_model(**tokens).pooler_output
            parts.append(self._unit(self.model.text_projection(pooled)))
        return torch.cat(parts)

    def compare(
        self, images: Sequence[Image], prompts: Sequence[str], factor: float = 1.0
    ) -> dict[str, list[float]]:
        """Each picture with its prompt: ``score``, their cosine times ``factor``, and ``truncated``."""
        if not images:
            return {"score": [], "truncated": []}
        place = {prompt: index for index, prompt in enumerate(dict.fromkeys(prompts))}
        at = [place[prompt] for prompt in prompts]
        lengths = [len(tokens) for tokens in self._tokenizer(list(place)).input_ids]
        cosines = (self.images(images) * self.texts(list(place))[at]).sum(-1).tolist()
        return {
            "score": [factor * each for each in cosines],
            "truncated": [float(lengths[index] > self._tokens_max) for index in at],
        }

    def _unit(self, embeddings: torch.Tensor) -> torch.Tensor:
        if not torch.isfinite(embeddings).all():
            raise ValueError(
                f"{self._name} reward: the model returned numbers that are not finite; "
                "its weights may be broken"
            )
        return F.normalize(embeddings, dim=-1)


def load_towers(
    name: str, model: str, processor: str, device: str, batch_size: int, *, remedy: str
) -> ClipTowers:
    """Load a CLIP and the processor it was trained with, each by hub id or directory.

    Args:
        name: the reward's, for messages; its parameters are called ``model``, ``processor`` and ``device``.

    Raises:
        RewardSetupError: something is missing or incomplete, or the device cannot be used.
    """
    from transformers import CLIPModel

    place, key = find_device(device, f"{name} reward: device"), f"{name} reward: processor"
    loaded, identity = load_pretrained(
        CLIPModel, model, key=f"{name} reward: model", remedy=remedy, unread=UNREAD, device=place
    )
    pixels = load_image_processor(processor, key=key, remedy=remedy)

    def prepare(images: Sequence[Image]) -> torch.Tensor:
        pictures = [PILImage.fromarray(image) for image in images]
        prepared: torch.Tensor = pixels(images=pictures, return_tensors="pt")["pixel_values"]
        return prepared

    tokenizer = load_tokenizer(processor, key=key, remedy=remedy)
    return ClipTowers(
        name, loaded, identity, tokenizer=tokenizer, prepare=prepare,
        soft=partial(_softly, pixels), batch_size=batch_size,
    )  # fmt: skip


def _softly(processor: Any, pixels: torch.Tensor) -> torch.Tensor:
    """What CLIP's image processor does: the shorter side scaled, the middle, normalised."""
    side, crop = processor.size["shortest_edge"], processor.crop_size["height"]
    shorter = min(pixels.shape[2:])
    # The processor cuts off the longer side's fraction.
    height, width = (side * each // shorter for each in pixels.shape[2:])
    scaled = F.interpolate(pixels, (height, width), mode="bicubic", align_corners=False, antialias=True)
    top, left = (height - crop) // 2, (width - crop) // 2
    middle = scaled[:, :, top : top + crop, left : left + crop].clamp(0, 1)
    mean, std = (torch.tensor(each)[:, None, None] for each in (processor.image_mean, processor.image_std))
    return (middle - mean) / std
