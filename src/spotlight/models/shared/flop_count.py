"""Floating-point operations and tokens of a DiT's forwards: noted as they run, counted by shape when asked.

Counted are matrix products, convolutions and attention of a sample's forward, on tensors without memory, at
three lengths of text for each size, with one block of each kind. All other lengths follow exactly: the count
is a polynomial of degree two in the length, or where the model pads texts, in the padded length. Tokens of
reference pictures are counted as they are. A batch's padding, recomputed activations and adapters are left
out.

FakeTensorMode is torch's private interface; ``tests/contract/test_flop_count.py`` holds it.
"""

from __future__ import annotations

import copy
import json
import logging
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from spotlight.models.condition import GRIDS, NEGATIVE_EMBEDS, REFERENCES, ConditionBatch
from spotlight.models.media import MediaSize
from spotlight.models.shared.transformer_files import component_type

if TYPE_CHECKING:
    from spotlight.models.family import ModelFamily

Points = tuple[tuple[int, int], ...]
log = logging.getLogger(__name__)
_LONGEST = 64
"""Longest text that is counted of models that do not pad."""
_NO_TEXT = (NEGATIVE_EMBEDS, REFERENCES, GRIDS)
"""Sequences of a condition that are no text of its forward."""
_known: dict[tuple[object, ...], Points | None] = {}


@dataclass(frozen=True, slots=True)
class Compute:
    """What forwards, and backwards through them, took.

    Attributes:
        tokens: of pictures and text, once per forward.
        flops: None if they were not, or cannot be counted.
    """

    tokens: float
    flops: float | None

    def __add__(self, other: Compute) -> Compute:
        known = self.flops is not None and other.flops is not None
        return Compute(self.tokens + other.tokens, (self.flops or 0) + (other.flops or 0) if known else None)

    def __mul__(self, share: float) -> Compute:
        return Compute(share * self.tokens, None if self.flops is None else share * self.flops)


def rates(what: str, work: Compute, seconds: float, peak_flop_s: float | None) -> dict[str, float]:
    """Curves of how fast one device did ``work``.

    Args:
        what: begins the curves' names, after ``throughput/``.
        peak_flop_s: of the device; None: there is no MFU.
    """
    row = {f"throughput/{what}_tokens_s": work.tokens / seconds}
    if work.flops is not None:
        row[f"throughput/{what}_tflop_s"] = 1e-12 * work.flops / seconds
        if peak_flop_s is not None:
            row[f"throughput/{what}_mfu"] = work.flops / seconds / peak_flop_s
    return row


class ForwardLog:
    """Forwards of one kind, of rollouts or of training, since the last :meth:`take`."""

    def __init__(self) -> None:
        self._forwards: Counter[tuple[MediaSize, int, int]] = Counter()  # by tokens of text and references
        self._work: Counter[tuple[MediaSize, int, int]] = Counter()

    def note(
        self, size: MediaSize, rows: int, condition: Mapping[str, Sequence[int]], model: nn.Module
    ) -> None:
        """Note a forward of a batch, and the backward that will follow if there is a gradient.

        A backward through frozen weights costs one forward (gradients of activations), otherwise two.

        Args:
            condition: tokens of each row, for every sequence.
        """
        cost = 1
        if torch.is_grad_enabled():
            cost += 2 if next(model.parameters()).requires_grad else 1
        none = (0,) * rows
        texts = [lengths for name, lengths in condition.items() if name not in _NO_TEXT]
        references = condition.get(REFERENCES, none)
        for seen, *text in zip(references, none, *texts, strict=True):
            self._forwards[size, sum(text), seen] += 1
            self._work[size, sum(text), seen] += cost

    def clear(self) -> None:
        self._forwards.clear()
        self._work.clear()

    def take(self, family: ModelFamily, *, operations: bool) -> Compute:
        """The work since the last call.

        Args:
            operations: count them; the first time takes a second.
        """
        forwards, work = dict(self._forwards), dict(self._work)
        self.clear()
        tokens = sum(
            count * (family.dimensions.tokens(size) + text + seen)
            for (size, text, seen), count in forwards.items()
        )
        if not operations:
            return Compute(tokens, None)
        counted = [(times, forward_flops(family, *key)) for key, times in work.items()]
        flops = [times * each for times, each in counted if each is not None]
        return Compute(tokens, sum(flops) if len(flops) == len(counted) else None)


def forward_flops(
    family: ModelFamily, size: MediaSize, text_tokens: int, reference_tokens: int = 0
) -> float | None:
    """Of one sample's forward; None if it cannot be counted without values."""
    key: tuple[object, ...] = (
        family.name,
        json.dumps(dict(family.config), sort_keys=True, default=str),
        family.max_text_tokens,
    )
    key = (*key, size, reference_tokens)
    if key not in _known:
        _known[key] = _count(family, size, reference_tokens)
    points = _known[key]
    unit = family.text_multiple
    return None if points is None else _interpolated(points, -(-text_tokens // unit) * unit)


def _count(family: ModelFamily, size: MediaSize, reference_tokens: int) -> Points | None:
    family = copy.copy(family)
    family.device = torch.device("cpu")  # where models compute their tables
    most, unit = min(_LONGEST, family.max_text_tokens), family.text_multiple
    lengths = {max(1, most // 4), max(1, most // 2), most} if unit == 1 else {unit, 2 * unit, 3 * unit}
    points: dict[int, int] = {}
    try:
        model, copies = _without_memory(component_type(family.files, "transformer"), family.config)
        for tokens in sorted(lengths):
            shapes = family.condition_shapes(tokens)
            if REFERENCES in shapes:
                shapes[REFERENCES] = (reference_tokens, *shapes[REFERENCES][1:])
            text = sum(s[0] for name, s in shapes.items() if len(s) > 1 and name not in _NO_TEXT)
            points[text] = _counted(family, model, copies, size, shapes)
    except Exception as error:  # noqa: BLE001 - whatever a model's forward raises there must not end a run
        log.info("operations of %s cannot be counted: %s", family.name, error)
        return None
    return tuple(points.items())


def _without_memory(kind: Any, config: Mapping[str, object]) -> tuple[nn.Module, dict[nn.Module, int]]:
    """A model of diffusers' class with one block of each kind, and how many there were of each."""
    from accelerate import init_empty_weights

    with init_empty_weights():
        model: nn.Module = kind.from_config(dict(config))
    copies: dict[nn.Module, int] = {}
    for name, child in list(model.named_children()):
        if not isinstance(child, nn.ModuleList):
            continue
        kinds: dict[object, list[nn.Module]] = {}
        for block in child:
            shapes = tuple((key, tuple(weight.shape)) for key, weight in block.named_parameters())
            kinds.setdefault((type(block), shapes), []).append(block)
        copies |= {blocks[0]: len(blocks) for blocks in kinds.values()}
        setattr(model, name, nn.ModuleList(blocks[0] for blocks in kinds.values()))
    return model.requires_grad_(False), copies


def _counted(
    family: ModelFamily,
    model: nn.Module,
    copies: Mapping[nn.Module, int],
    size: MediaSize,
    shapes: Mapping[str, Sequence[int]],
) -> int:
    # Imported here: only a run that trains needs it, and it is slow.
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.utils.flop_counter import FlopCounterMode

    before, repeated = dict[nn.Module, int](), 0

    def enter(block: nn.Module, *_: object) -> None:
        before[block] = counter.get_total_flops()

    def leave(block: nn.Module, *_: object) -> None:
        nonlocal repeated
        repeated += (copies[block] - 1) * (counter.get_total_flops() - before[block])

    with FakeTensorMode(allow_non_fake_inputs=True):
        for part in model.modules():
            for name, weight in part.named_parameters(recurse=False):
                empty = torch.empty(weight.shape)
                part._parameters[name] = nn.Parameter(empty, requires_grad=False)
        tensors = {name: torch.zeros(1, *shape) for name, shape in shapes.items()}
        latents = torch.zeros(1, *family.latent_shape(size))
    with ExitStack() as stack:
        for block in copies:
            stack.callback(block.register_forward_pre_hook(enter).remove)
            stack.callback(block.register_forward_hook(leave).remove)
        # Not every kernel of attention has a formula; plain products have.
        stack.enter_context(sdpa_kernel(SDPBackend.MATH))
        stack.enter_context(torch.no_grad())
        counter = stack.enter_context(FlopCounterMode(display=False))
        # Outside the mode: what the forward makes itself, masks and positions, has values that it may read.
        level = torch.full([1], 0.5)
        if GRIDS in tensors:  # one reference of as many tokens, whatever its sides
            tensors[GRIDS] = torch.tensor([[[1, shapes[REFERENCES][0]]]])
        lengths = {name: (shape[0],) for name, shape in shapes.items() if len(shape) > 1}
        condition = ConditionBatch(tensors, lengths)
        family.predict(model, latents, level, condition, family.embedded_guidance, size)
    return int(counter.get_total_flops()) + repeated


def _interpolated(points: Points, at: int) -> float:
    total = 0.0
    for x, value in points:
        term = float(value)
        for other, _ in points:
            if other != x:
                term *= (at - other) / (x - other)
        total += term
    return total
