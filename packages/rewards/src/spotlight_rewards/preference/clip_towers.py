"""CLIP's two towers as the preference rewards use them: unit vectors of pictures and prompts, and cosines.

Imported in the reward's own process only: it imports torch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeAlias

import torch
import torch.nn.functional as F
from PIL import Image as PILImage

from spotlight_rewards.models.pretrained_model import (
    find_device,
    load_image_processor,
    load_pretrained,
    load_tokenizer,
)
from spotlight_rewards.reward import Image, RewardSetupError

UNREAD = r"position_ids$"
Prepare: TypeAlias = Callable[[Sequence[Image]], torch.Tensor]
"""Pictures to pixels [pictures, 3, side, side]."""


class ClipTowers:
    """Embeds pictures and prompts.

    Args:
        model: transformers' CLIPModel, on its device.
        identity: what scores, as results have it.
        batch_size: pictures, or prompts, in a forward.

    Raises:
        RewardSetupError: an invalid batch size.
    """

    def __init__(
        self, name: str, model: Any, identity: str, *, tokenizer: Any, prepare: Prepare, batch_size: int
    ) -> None:
        if not isinstance(batch_size, int) or batch_size < 1:
            raise RewardSetupError(f"{name} reward: batch_size is {batch_size!r}; expected 1 or more")
        self.model, self.identity = model, identity
        self._name, self._tokenizer, self._prepare, self._batch_size = name, tokenizer, prepare, batch_size
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
        parts = []
        for part in self._parts(images):
            pixels = self._prepare(part).to(self.model.device)
            pooled = self.model.vision_model(pixel_values=pixels).pooler_output
            parts.append(self._unit(self.model.visual_projection(pooled)))
        return torch.cat(parts)

    @torch.inference_mode()
    def texts(self, texts: Sequence[str]) -> torch.Tensor:
        """Unit vectors: [texts, width]; of a long text, its beginning. Raises as :meth:`images`."""
        parts = []
        for part in self._parts(texts):
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

    def _parts(self, items: Sequence[Any]) -> Iterator[Sequence[Any]]:
        for start in range(0, len(items), self._batch_size):
            yield items[start : start + self._batch_size]


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
    return ClipTowers(name, loaded, identity, tokenizer=tokenizer, prepare=prepare, batch_size=batch_size)
