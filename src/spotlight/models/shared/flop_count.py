"""Floating-point operations and tokens of a DiT's forwards: noted as they run, counted by shape when asked.

Counted are matrix products, convolutions and attention of a sample's forward, on tensors without memory, at
three lengths of text for each size, with one block of each kind. All other lengths follow exactly: the count
is a polynomial of degree two in the length, or where the model pads texts, in the padded length. Tokens of
reference pictures are counted as they are.

What counts is what the model needs, however it is done:

- of a forward without gradient the products of the base, and attention (adapters can be merged);
- of a forward with its backward attention 3 times, adapters 3 times, and the products of the base twice if
  they are frozen (only the gradient of activations is needed then), else 3 times.

Neither a batch's padding nor what is computed again counts. The backward of what comes before the first
adapter is counted, though nothing needs it: below 1 % of a large model.

FakeTensorMode is torch's private interface; ``tests/contract/test_flop_count.py`` holds it.
"""

from __future__ import annotations

import copy
import json
import logging
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode

from spotlight.models.condition import FIRST_FRAME, GRIDS, NEGATIVE_EMBEDS, REFERENCES, ConditionBatch
from spotlight.models.media import MediaSize
from spotlight.models.shared.transformer_files import component_type

if TYPE_CHECKING:
    from spotlight.models.family import ModelFamily

log = logging.getLogger(__name__)
_LONGEST = 64
"""Longest text that is counted of models that do not pad."""
_NO_TEXT = (NEGATIVE_EMBEDS, REFERENCES, GRIDS, FIRST_FRAME)
"""Sequences of a condition that are no text of its forward."""
_known: dict[tuple[object, ...], _Counts | None] = {}


@dataclass(frozen=True, slots=True)
class Compute:
    """What forwards, and backwards through them, took.

    Attributes:
        tokens: of pictures and text, once per forward.
        flops: None if they were not, or cannot be counted.
        timesteps: trained on: noise levels of pictures with a backward.
    """

    tokens: float
    flops: float | None
    timesteps: float = 0.0

    def __add__(self, other: Compute) -> Compute:
        known = self.flops is not None and other.flops is not None
        flops = (self.flops or 0) + (other.flops or 0) if known else None
        return Compute(self.tokens + other.tokens, flops, self.timesteps + other.timesteps)

    def __mul__(self, share: float) -> Compute:
        flops = None if self.flops is None else share * self.flops
        return Compute(share * self.tokens, flops, share * self.timesteps)


@dataclass(frozen=True, slots=True)
class Operations:
    """Floating-point operations of one sample's forward: a product of n x k with k x m takes 2 n k m.

    Attributes:
        products: with weights, and convolutions.
        attention: queries with keys, and the weights of both with values.
        adapters: LoRA's two products of each layer.
    """

    products: float
    attention: float
    adapters: float = 0.0

    @property
    def forward(self) -> float:
        """Without adapters, which can be merged."""
        return self.products + self.attention

    def training(self, *, frozen: bool) -> float:
        """Of a forward and its backward.

        Args:
            frozen: only adapters are trained.
        """
        return (2 if frozen else 3) * self.products + 3 * (self.attention + self.adapters)


@dataclass(frozen=True, slots=True, eq=False, weakref_slot=True)
class Trained:
    """What a backward changes.

    Attributes:
        frozen: all but the adapters stay as they are.
        adapters: parameters for each layer that has some, by its name.
    """

    frozen: bool
    adapters: Mapping[str, int]

    @classmethod
    def of(cls, model: nn.Module) -> Trained:
        """Of a transformer with LoRA or without."""
        adapters: Counter[str] = Counter()
        for name, weight in model.named_parameters():
            layer, half, _ = name.partition(".lora_")
            if half and weight.requires_grad:
                adapters[layer] += weight.numel()
        return cls(not next(model.parameters()).requires_grad, adapters)


def rates(what: str, work: Compute, seconds: float, peak_flop_s: float | None) -> dict[str, float]:
    """Curves of how fast one device did ``work``.

    Args:
        what: begins the curves' names, after ``throughput/``.
        peak_flop_s: of the device; None: there is no MFU.
    """
    row = {f"throughput/{what}_tokens_s": work.tokens / seconds}
    if work.timesteps:
        row[f"throughput/{what}_timesteps_s"] = work.timesteps / seconds
    if work.flops is not None:
        row[f"throughput/{what}_tflop_s"] = 1e-12 * work.flops / seconds
        if peak_flop_s is not None:
            row[f"throughput/{what}_mfu"] = work.flops / seconds / peak_flop_s
    return row


@dataclass(frozen=True, slots=True)
class _Forward:
    """What a sample's forward takes: tokens of text and references, and what is trained through it."""

    size: MediaSize
    text: int
    seen: int
    trained: Trained | None


class ForwardLog:
    """Forwards of one kind, of rollouts or of training, since the last :meth:`take`."""

    def __init__(self) -> None:
        self._forwards: Counter[_Forward] = Counter()
        self._timesteps = 0
        self._trained: WeakKeyDictionary[nn.Module, Trained] = WeakKeyDictionary()

    def begin(self, rows: int) -> None:
        """Note that as many noise levels of pictures are given to the model, whatever forwards that takes."""
        self._timesteps += rows if torch.is_grad_enabled() else 0

    def note(
        self, size: MediaSize, rows: int, condition: Mapping[str, Sequence[int]], model: nn.Module
    ) -> None:
        """Note a forward of a batch, and the backward that will follow if there is a gradient.

        Args:
            condition: tokens of each row, for every sequence.
        """
        none = (0,) * rows
        trained = None
        if torch.is_grad_enabled():
            trained = self._trained.get(model) or self._trained.setdefault(model, Trained.of(model))
        texts = [lengths for name, lengths in condition.items() if name not in _NO_TEXT]
        references = condition.get(REFERENCES, none)
        for seen, *text in zip(references, none, *texts, strict=True):
            self._forwards[_Forward(size, sum(text), seen, trained)] += 1

    def clear(self) -> None:
        self._forwards.clear()
        self._timesteps = 0

    def take(self, family: ModelFamily, *, operations: bool) -> Compute:
        """The work since the last call.

        Args:
            operations: count them; the first time takes a second.
        """
        forwards, timesteps = dict(self._forwards), self._timesteps
        self.clear()
        tokens = sum(
            count * (family.dimensions.tokens(one.size) + one.text + one.seen)
            for one, count in forwards.items()
        )
        if not operations:
            return Compute(tokens, None, timesteps)
        flops = [(count, _flops(family, one)) for one, count in forwards.items()]
        known = [count * each for count, each in flops if each is not None]
        return Compute(tokens, sum(known) if len(known) == len(flops) else None, timesteps)


def _flops(family: ModelFamily, one: _Forward) -> float | None:
    found = forward_operations(family, one.size, one.text, one.seen, one.trained)
    if found is None:
        return None
    return found.training(frozen=one.trained.frozen) if one.trained else found.forward


def forward_operations(
    family: ModelFamily,
    size: MediaSize,
    text_tokens: int,
    reference_tokens: int = 0,
    trained: Trained | None = None,
) -> Operations | None:
    """Of one sample's forward, with what adapters are trained; None if they cannot be counted by shape."""
    key: tuple[object, ...] = (
        family.name,
        json.dumps(dict(family.config), sort_keys=True, default=str),
        family.max_text_tokens,
    )
    key = (*key, size, reference_tokens)
    if key not in _known:
        _known[key] = _count(family, size, reference_tokens)
    counts = _known[key]
    adapters = None if counts is None else counts.of_adapters(trained)
    if counts is None or adapters is None:
        return None
    unit = family.text_multiple
    padded = -(-text_tokens // unit) * unit
    return Operations(
        _interpolated({text: one.products for text, one in counts.points.items()}, padded),
        _interpolated({text: one.attention for text, one in counts.points.items()}, padded),
        _interpolated(adapters, padded),
    )


@dataclass(slots=True)
class _Counted:
    """A forward with a text of some length.

    Attributes:
        rows: that each layer's weights are multiplied with, by its name in the counted model.
    """

    products: int = 0
    attention: int = 0
    rows: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class _Counts:
    """Of a size, by tokens of text.

    Attributes:
        counted_as: the counted block that stands for a block, by their names.
    """

    points: Mapping[int, _Counted]
    counted_as: Mapping[str, str]
    _adapters: WeakKeyDictionary[Trained, Mapping[int, int] | None] = field(default_factory=WeakKeyDictionary)

    def of_adapters(self, trained: Trained | None) -> Mapping[int, int] | None:
        """By tokens of text, 2 for each parameter and row; None if a layer is no plain product."""
        if trained is None:
            return dict.fromkeys(self.points, 0)
        if trained not in self._adapters:
            try:
                self._adapters[trained] = {
                    text: sum(
                        2 * size * one.rows[self._named(layer)] for layer, size in trained.adapters.items()
                    )
                    for text, one in self.points.items()
                }
            except KeyError as error:
                log.info("operations of adapters cannot be counted: %s is no plain product", error)
                self._adapters[trained] = None
        return self._adapters[trained]

    def _named(self, layer: str) -> str:
        block = ".".join(layer.split(".")[:2])
        return self.counted_as.get(block, block) + layer[len(block) :]


def _count(family: ModelFamily, size: MediaSize, reference_tokens: int) -> _Counts | None:
    family = copy.copy(family)
    family.device = torch.device("cpu")  # where models compute their tables
    most, unit = min(_LONGEST, family.max_text_tokens), family.text_multiple
    lengths = {max(1, most // 4), max(1, most // 2), most} if unit == 1 else {unit, 2 * unit, 3 * unit}
    points: dict[int, _Counted] = {}
    try:
        model, copies, counted_as = _without_memory(
            component_type(family.files, "transformer"), family.config
        )
        for tokens in sorted(lengths):
            shapes = family.condition_shapes(tokens)
            if REFERENCES in shapes:
                shapes[REFERENCES] = (reference_tokens, *shapes[REFERENCES][1:])
            text = sum(s[0] for name, s in shapes.items() if len(s) > 1 and name not in _NO_TEXT)
            points[text] = _counted(family, model, copies, size, shapes)
    except Exception as error:  # noqa: BLE001 - whatever a model's forward raises there must not end a run
        log.info("operations of %s cannot be counted: %s", family.name, error)
        return None
    return _Counts(points, counted_as)


def _without_memory(
    kind: Any, config: Mapping[str, object]
) -> tuple[nn.Module, dict[nn.Module, int], dict[str, str]]:
    """A model of diffusers' class with one block of each kind, how many there were of each, and which stands
    for which.
    """
    from accelerate import init_empty_weights

    with init_empty_weights():
        model: nn.Module = kind.from_config(dict(config))
    copies: dict[nn.Module, int] = {}
    counted_as: dict[str, str] = {}
    for name, child in list(model.named_children()):
        if not isinstance(child, nn.ModuleList):
            continue
        kinds: dict[object, list[nn.Module]] = {}
        for index, block in enumerate(child):
            shapes = tuple((key, tuple(weight.shape)) for key, weight in block.named_parameters())
            kinds.setdefault((type(block), shapes), []).append(block)
            counted_as[f"{name}.{index}"] = f"{name}.{list(kinds).index((type(block), shapes))}"
        copies |= {blocks[0]: len(blocks) for blocks in kinds.values()}
        setattr(model, name, nn.ModuleList(blocks[0] for blocks in kinds.values()))
    return model.requires_grad_(False), copies, counted_as


class KnownRows(TorchFunctionMode):
    """Rows without memory that are picked by a mask with values, of which there are as many as it says."""

    def __torch_function__(self, call: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if call is Tensor.__getitem__ and isinstance(args[1], Tensor) and args[1].dtype == torch.bool:
            args = args[0], args[1].nonzero(as_tuple=True)
        return call(*args, **(kwargs or {}))


class _Calls(TorchFunctionMode):
    """Divides what is counted by the functions called, each as often as its block occurs."""

    def __init__(self, total: Callable[[], int], model: nn.Module, copies: Mapping[nn.Module, int]) -> None:
        super().__init__()
        self.found = _Counted()
        self._total, self._times = total, 1
        self._layers = {id(w): name.removesuffix(".weight") for name, w in model.named_parameters()}
        for block, times in copies.items():
            block.register_forward_pre_hook(partial(self._enter, times))
            block.register_forward_hook(partial(self._enter, 1))

    def _enter(self, times: int, *_: object) -> None:
        self._times = times

    def __torch_function__(self, call: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        before = self._total()
        result = call(*args, **(kwargs or {}))
        taken = self._times * (self._total() - before)
        if call is functional.scaled_dot_product_attention:
            self.found.attention += taken
        else:
            self.found.products += taken
        if call is functional.linear and id(args[1]) in self._layers:
            self.found.rows[self._layers[id(args[1])]] = args[0].numel() // args[0].shape[-1]
        return result


def _counted(
    family: ModelFamily,
    model: nn.Module,
    copies: Mapping[nn.Module, int],
    size: MediaSize,
    shapes: Mapping[str, Sequence[int]],
) -> _Counted:
    # Imported here: only a run that trains needs it, and it is slow.
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.utils.flop_counter import FlopCounterMode

    with FakeTensorMode(allow_non_fake_inputs=True):
        for part in model.modules():
            for name, weight in part.named_parameters(recurse=False):
                empty = torch.empty(weight.shape)
                part._parameters[name] = nn.Parameter(empty, requires_grad=False)
        tensors = {name: torch.zeros(1, *shape) for name, shape in shapes.items()}
        latents = torch.zeros(1, *family.latent_shape(size))
    with ExitStack() as stack:
        # Not every kernel of attention has a formula; plain products have.
        stack.enter_context(sdpa_kernel(SDPBackend.MATH))
        stack.enter_context(torch.no_grad())
        counter = stack.enter_context(FlopCounterMode(display=False))
        calls = _Calls(counter.get_total_flops, model, copies)
        stack.enter_context(calls)
        stack.enter_context(KnownRows())
        # Outside the mode: what the forward makes itself, masks and positions, has values that it may read.
        level = torch.full([1], 0.5)
        if GRIDS in tensors:  # one reference of as many tokens, whatever its sides
            tensors[GRIDS] = torch.tensor([[[1, shapes[REFERENCES][0]]]])
        lengths = {name: (shape[0],) for name, shape in shapes.items() if len(shape) > 1}
        condition = ConditionBatch(tensors, lengths)
        family.predict(model, latents, level, condition, family.embedded_guidance, size)
    return calls.found


def _interpolated(points: Mapping[int, int], at: int) -> float:
    total = 0.0
    for x, value in points.items():
        term = float(value)
        for other in points:
            if other != x:
                term *= (at - other) / (x - other)
        total += term
    return total
