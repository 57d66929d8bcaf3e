"""What a forward takes besides latents and noise level: conditions and guidance."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from types import MappingProxyType
from typing import TypeAlias

import torch
from torch import Tensor, nn

from spotlight.models.media import MediaSize
from spotlight_files.model_errors import ModelError
from spotlight_rewards.base.prompts import PromptId

EMBEDS, NEGATIVE_EMBEDS = "embeds", "negative_embeds"
"""Text of a condition; of the negative prompt where that depends on the prompt (its reference pictures)."""

REFERENCES, GRIDS = "references", "grids"
"""Packed latents of a condition's reference pictures, one after another; rows and columns of each."""
FIRST_FRAME, SEEN = "first_frame", "seen"
"""Latents of a picture as the first frame, which are no tokens; and what the text encoders see in it."""
OF_PICTURES = (REFERENCES, GRIDS, FIRST_FRAME, SEEN)
"""What a prompt and its negative prompt share: what their reference pictures are."""


@dataclass(frozen=True, slots=True)
class Instruction:
    """A prompt about reference pictures.

    Attributes:
        references: paths of the pictures.
        negative: the negative prompt, which is about the same pictures.
        size: of what is made.
    """

    text: str
    references: tuple[str, ...]
    negative: str
    size: MediaSize


ModelInput: TypeAlias = str | Instruction
"""What a family embeds: a prompt's text, or an instruction about reference pictures."""


def model_input(text: str, references: Sequence[str], negative: str, size: MediaSize) -> ModelInput:
    """Of a prompt; the negative prompt and the size matter where there are reference pictures."""
    return Instruction(text, tuple(references), negative, size) if references else text


@dataclass(frozen=True, slots=True, eq=False)
class Condition:
    """What one prompt adds to a forward, without batch dimension or padding.

    Attributes:
        tensors: by the family's names: sequences [tokens, width], vectors [width] (pooled embeddings), or
            latents [frames, rows, columns, channels]. These and sequences of integers are no tokens.
        checksum: of the stored value that they are; None: they are not stored.
    """

    tensors: Mapping[str, Tensor]
    checksum: str | None = None

    def __getitem__(self, name: str) -> Tensor:
        return self.tensors[name]

    @property
    def tokens(self) -> int:
        """Tokens of all sequences of a forward together."""
        return sum(
            tensor.shape[0]
            for name, tensor in self.tensors.items()
            if tensor.ndim == 2 and tensor.is_floating_point() and name != NEGATIVE_EMBEDS
        )

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors.values())

    def negative(self, common: Condition) -> Condition:
        """Of the negative prompt about the same reference pictures.

        Args:
            common: of the negative prompt about none.
        """
        own = {name: self.tensors[name] for name in OF_PICTURES if name in self.tensors}
        if (embeds := self.tensors.get(NEGATIVE_EMBEDS)) is not None:
            own[EMBEDS] = embeds
        return Condition({**common.tensors, **own})

    def to(self, device: torch.device | str) -> Condition:
        return Condition({name: tensor.to(device) for name, tensor in self.tensors.items()}, self.checksum)


class RecentConditions:
    """The conditions that were used last, up to so many bytes."""

    def __init__(self, limit_bytes: int) -> None:
        self._limit_bytes, self._held_bytes = limit_bytes, 0
        self._kept: OrderedDict[PromptId, Condition] = OrderedDict()

    def of(self, prompts: Iterable[PromptId]) -> dict[PromptId, Condition]:
        """Those that are kept."""
        return {prompt: self._kept[prompt] for prompt in prompts if prompt in self._kept}

    def use(self, conditions: Mapping[PromptId, Condition]) -> None:
        """Keep these instead of those whose use is longest ago."""
        for prompt, condition in conditions.items():
            if prompt not in self._kept:
                self._held_bytes += condition.nbytes
            self._kept[prompt] = condition
            self._kept.move_to_end(prompt)
        while self._held_bytes > self._limit_bytes:
            _, oldest = self._kept.popitem(last=False)
            self._held_bytes -= oldest.nbytes


@dataclass(frozen=True, slots=True, eq=False)
class ConditionBatch:
    """Conditions of a batch, sequences zero-padded to the longest.

    Attributes:
        tensors: [batch, tokens, width] or [batch, width], by name.
        lengths: tokens of each row, for every sequence.
    """

    tensors: Mapping[str, Tensor]
    lengths: Mapping[str, tuple[int, ...]]

    def __getitem__(self, name: str) -> Tensor:
        return self.tensors[name]

    def mask(self, name: str) -> Tensor | None:
        """[batch, tokens] bool, True on real tokens; None if nothing is padded."""
        lengths, tensor = self.lengths[name], self.tensors[name]
        if min(lengths) == tensor.shape[1]:
            return None
        positions = torch.arange(tensor.shape[1], device=tensor.device)
        return positions < torch.tensor(lengths, device=tensor.device)[:, None]

    def at(self, rows: Tensor | slice) -> ConditionBatch:
        """Some rows, with the whole batch's padding."""
        picked = range(*rows.indices(self.size)) if isinstance(rows, slice) else rows.tolist()
        return ConditionBatch(
            {name: tensor[rows] for name, tensor in self.tensors.items()},
            {name: tuple(lengths[row] for row in picked) for name, lengths in self.lengths.items()},
        )

    @property
    def size(self) -> int:
        return next(iter(self.tensors.values())).shape[0]

    def rows(self, name: str) -> list[Tensor]:
        """A sequence of each row without its padding."""
        return [row[:length] for row, length in zip(self.tensors[name], self.lengths[name], strict=True)]


def collate(
    conditions: Sequence[Condition],
    shapes: Mapping[str, tuple[int, ...]],
    device: torch.device,
    dtype: torch.dtype,
    owner: str,
) -> ConditionBatch:
    """Pad and stack ``conditions`` on ``device``.

    Args:
        shapes: expected of each tensor, of which only a vector's size and the last are fixed.
        dtype: of floating-point tensors.
        owner: whose shapes these are, for the error.

    Raises:
        ModelError: other names or widths.
    """
    for condition in conditions:
        found = {name: list(tensor.shape) for name, tensor in condition.tensors.items()}
        if not _fit(found, shapes):
            wanted = {
                name: ["tokens", *shape[1:]] if shape[1:] else [*shape] for name, shape in shapes.items()
            }
            raise ModelError(
                f"text embeddings of shape {found}; {owner} takes {wanted}: another text encoder made them"
            )
    tensors: dict[str, Tensor] = {}
    lengths: dict[str, tuple[int, ...]] = {}
    for name, shape in shapes.items():
        given = (condition.tensors[name] for condition in conditions)
        rows = [each.to(device, dtype if each.is_floating_point() else each.dtype) for each in given]
        if len(shape) == 1:
            tensors[name] = torch.stack(rows)
            continue
        lengths[name] = tuple(row.shape[0] for row in rows)
        tensors[name] = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
    return ConditionBatch(MappingProxyType(tensors), MappingProxyType(lengths))


Pass = Callable[[], Tensor]
"""One forward of guidance: the velocity with the prompt, or with the negative one."""
Passes = Callable[[Pass, Pass], tuple[Tensor, Tensor]]
"""Makes both."""


def in_turn(conditional: Pass, negative: Pass) -> tuple[Tensor, Tensor]:
    """The conditional velocity, then the negative one, both made here."""
    return conditional(), negative()


@dataclass(frozen=True, slots=True)
class Guidance:
    """How a forward is guided.

    Attributes:
        scale: of true classifier-free guidance; above 1 it costs a second forward with ``negative``.
        negative: condition of the second forward.
        embedded: the scale that a guidance-distilled model takes as an input; None if it takes none.
        passes: how the two forwards are made.
    """

    scale: float = 1.0
    negative: ConditionBatch | None = None
    embedded: float | None = None
    passes: Passes = in_turn


def guidance_pass(model: nn.Module, name: str) -> AbstractContextManager[None]:
    """Name a guidance pass: diffusers' step cache keeps passes apart by name."""
    from diffusers import CacheMixin

    if not isinstance(model, CacheMixin) or not model.is_cache_enabled:
        return nullcontext()
    context: AbstractContextManager[None] = CacheMixin.cache_context(model, name)
    return context


def _fit(found: Mapping[str, Sequence[int]], shapes: Mapping[str, tuple[int, ...]]) -> bool:
    return found.keys() == shapes.keys() and all(
        len(found[name]) == len(shape) and found[name][-1] == shape[-1] for name, shape in shapes.items()
    )
