"""What a DiT family must provide. A new family is one file that implements :class:`ModelFamily`."""

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
        mask: [batch, text_tokens] bool, True on real tokens; None when nothing is padded.
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
    """Pixels; must suit the family's patching (see :meth:`ModelFamily.check_size`)."""

    height: int
    width: int


class ModelFamily(Protocol):
    """A DiT family over a diffusers pipeline directory or hub id.

    ``velocity`` is the one forward that rollout and training share: it takes the module to run, so that
    adapters, copies and sharded modules all go through the same code.
    """

    name: str
    default_lora_targets: tuple[str, ...]
    transformer: nn.Module
    device: torch.device

    def check_size(self, size: ImageSize) -> None:
        """Raise :class:`ModelError` when the size does not suit the family, naming the nearest that do."""

    def latent_shape(self, size: ImageSize) -> tuple[int, int]:
        """(tokens, channels) of the packed latents of one image."""

    def sigmas(self, steps: int, size: ImageSize) -> Tensor:
        """The noise levels visited: [steps + 1] float32 on the CPU, from 1 to 0, dynamic shift applied."""

    def encode(self, prompts: Sequence[str]) -> list[Condition]:
        """Embed prompts (disk cache by content hash; the text encoder is loaded only on a miss)."""

    def not_embedded(self, prompts: Sequence[str]) -> list[str]:
        """Those of ``prompts`` that the disk cache lacks, each once: no file is read."""

    def free_text_encoder(self) -> None:
        """Release the text encoder's memory; a later miss loads it again."""

    def collate(self, conditions: Sequence[Condition]) -> ConditionBatch:
        """Pad embeddings of several prompts into one batch on the model's device."""

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
        """Decode final latents to pictures: [batch, height, width, 3] uint8."""

    def save_lora(
        self, directory: Path, layers: Mapping[str, Tensor], metadata: Mapping[str, object]
    ) -> Path:
        """Write a LoRA that plain diffusers' ``load_lora_weights`` takes; returns the file.

        ``layers`` is peft's adapter state dict of the transformer; ``metadata`` peft's LoraConfig fields
        (rank, alpha, targets), which diffusers needs to restore alpha.
        """

    def save_merged(self, directory: Path, state: Mapping[str, Tensor], *, replace: bool = False) -> Path:
        """Write a whole pipeline directory whose transformer holds ``state``; returns it.

        With ``replace`` a pipeline directory that is there gives way to the new one; else it is an error.
        """


class FamilyLoader(Protocol):
    """How every family is loaded."""

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

        With ``read_transformer=False`` the transformer has no weights and refuses to run until
        :func:`spotlight.models.skeleton.filling` was used on it.
        """
