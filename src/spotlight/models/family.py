"""The interface of DiT families. A new family is one file that implements :class:`ModelFamily`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from spotlight.models.model_errors import ModelError as ModelError


@dataclass(frozen=True, slots=True)
class Condition:
    """Text embeddings of one prompt, without padding: ``embeds: [text_tokens, width]``."""

    embeds: Tensor


@dataclass(frozen=True, slots=True)
class ConditionBatch:
    """Padded embeddings of a batch.

    Attributes:
        embeds: [batch, text_tokens, width], zero where padded.
        mask: [batch, text_tokens] bool, True on real tokens; None if nothing is padded.
    """

    embeds: Tensor
    mask: Tensor | None


@dataclass(frozen=True, slots=True)
class Guidance:
    """True classifier-free guidance: ``scale`` > 1 costs a second forward with ``negative``."""

    scale: float
    negative: ConditionBatch


@dataclass(frozen=True, slots=True)
class ImageSize:
    """In pixels; must fit the family's patches (:meth:`ModelFamily.check_size`)."""

    height: int
    width: int


class ModelFamily(Protocol):
    """A DiT family over a diffusers pipeline directory or hub id.

    Rollout and training share one forward, ``velocity``. It takes the module to run, so that adapters, copies
    and sharded modules all use the same code.
    """

    name: str
    default_lora_targets: tuple[str, ...]
    transformer: nn.Module
    device: torch.device

    def check_size(self, size: ImageSize) -> None:
        """Raise :class:`ModelError`, naming the nearest valid sizes, if the size does not fit the patches."""

    def latent_shape(self, size: ImageSize) -> tuple[int, int]:
        """(tokens, channels) of one image's packed latents."""

    def sigmas(self, steps: int, size: ImageSize) -> Tensor:
        """The schedule: [steps + 1] float32 on the CPU, from 1 to 0, dynamic shift applied."""

    def encode(self, prompts: Sequence[str]) -> list[Condition]:
        """Embed prompts (disk cache by content hash; the text encoder is only loaded on a miss)."""

    def not_embedded(self, prompts: Sequence[str]) -> list[str]:
        """The distinct prompts that the disk cache lacks; reads no file."""

    def free_text_encoder(self) -> None:
        """Release the text encoder's memory; a later miss loads it again."""

    def collate(self, conditions: Sequence[Condition]) -> ConditionBatch:
        """Pad prompts' embeddings into one batch on the model's device."""

    def velocity(
        self,
        model: nn.Module,
        latents: Tensor,
        sigma: Tensor,
        condition: ConditionBatch,
        guidance: Guidance | None,
        size: ImageSize,
    ) -> Tensor:
        """Predicted velocity, float32, shape of ``latents`` [batch, tokens, channels]; sigma: [batch]."""

    def decode(self, latents: Tensor, size: ImageSize) -> NDArray[np.uint8]:
        """Decode final latents to images: [batch, height, width, 3] uint8."""

    def save_lora(
        self, directory: Path, layers: Mapping[str, Tensor], metadata: Mapping[str, object]
    ) -> Path:
        """Write a LoRA for plain diffusers' ``load_lora_weights``; returns the file.

        ``layers`` is peft's adapter state dict; ``metadata`` peft's LoraConfig fields (diffusers needs
        alpha).
        """

    def save_merged(self, directory: Path, state: Mapping[str, Tensor], *, replace: bool = False) -> Path:
        """Write a whole pipeline directory whose transformer holds ``state``; returns it.

        An existing pipeline directory is an error unless ``replace`` is set.
        """


class FamilyLoader(Protocol):
    """Signature of every family's loader."""

    def __call__(
        self,
        path: str | Path,
        *,
        device: torch.device | str,
        dtype: torch.dtype,
        revision: str | None = None,
        embeddings_cache: Path,
        max_text_tokens: int = 512,
        read_transformer: bool = True,
    ) -> ModelFamily:
        """Load a family from a pipeline directory or hub id (see the family's ``load``).

        With ``read_transformer=False`` the transformer has no weights and refuses to run until filled by
        :func:`spotlight.models.skeleton.filling`.
        """
