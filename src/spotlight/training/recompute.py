"""What of a block is computed again in the backward pass (``learner.recompute``).

- ``none``: nothing; whatever the backward needs is kept.
- ``elementwise``: results of wide matrix products and of attention are kept, everything else is computed
  again: about half the memory of ``none``, and no product twice.
- ``blocks``: everything; only a block's inputs are kept.

Fused blocks (``model.kernels``) do by themselves what ``elementwise`` does to others, also with ``none``.

Gradients are equal to the bit: what is kept is what would be computed again.

``learner.recompute: auto`` computes as little again as memory allows. Levels of a model of L blocks: at 0 all
blocks are computed again, at L all keep their products, at 2 L nothing is computed again; between them some
blocks, evenly spread, are a step ahead of the others. A level more costs one block's memory, so a pass's peak
is affine in the level from 0 to L, and from L to 2 L.

A climb begins at 0, and goes up by as many levels as must fit: a block keeps no more than the whole pass at
level 0 needs, and as soon as two levels are measured, as much as their difference says. It ends at a level
that has run.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any, Literal, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from spotlight.models.experts import denoisers
from spotlight.models.kernels.fused import is_fused
from spotlight.models.peft_layers import largest_rank
from spotlight.training.sharding import blocks_of
from spotlight_files.model_errors import ModelError

Mode = Literal["none", "elementwise", "blocks"]


def modes_of(setting: Mode | int, blocks: int) -> list[Mode]:
    """Of each block; a number n: every n-th is computed again, the others are not."""
    if isinstance(setting, int):
        return ["none" if i % setting else "blocks" for i in range(blocks)]
    return [setting] * blocks


def recompute(module: nn.Module, setting: Mode | int | Literal["auto"]) -> Recomputation | None:
    """Run every block of a model as :func:`modes_of` says, where there is a gradient.

    Returns what may change that later, for ``auto``, which begins with ``blocks``.

    Raises:
        ModelError: the model cannot.
    """
    if setting == "none":
        for part in denoisers(module).values():
            if getattr(part, "is_gradient_checkpointing", False):  # as an earlier call left it
                cast(Any, part).disable_gradient_checkpointing()
        return None
    found = Recomputation(module)
    found.use(modes_of("blocks" if setting == "auto" else setting, found.blocks))
    return found if setting == "auto" else None


class Recomputation:
    """Runs the blocks of a model that is differentiated; without gradient nothing changes.

    Raises:
        ModelError: the model does not let its blocks be run otherwise.
    """

    def __init__(self, module: nn.Module) -> None:
        parts = list(denoisers(module).values())
        self._blocks = [blocks_of(part) for part in parts]
        self._modes: dict[nn.Module, Mode] = {}
        self._narrow = largest_rank(module)
        for part in parts:
            if not hasattr(part, "enable_gradient_checkpointing"):
                raise ModelError(
                    f"{type(part).__name__} cannot recompute activations (no enable_gradient_checkpointing): "
                    "set learner.recompute to none"
                )
            cast(Any, part).enable_gradient_checkpointing(self._run)

    @property
    def blocks(self) -> int:
        """Of the largest denoiser."""
        return max(map(len, self._blocks))

    def use(self, modes: Sequence[Mode]) -> None:
        """From the next forward on: the mode of each block, in order."""
        for blocks in self._blocks:
            self._modes |= zip(blocks, modes, strict=False)

    def _run(self, block: nn.Module, *args: Any) -> Any:
        mode = self._modes[block]
        if mode == "none" or (mode == "elementwise" and is_fused(block)):
            return block(*args)
        again = partial(checkpoint, block, *args, use_reentrant=False, preserve_rng_state=False)
        if mode == "blocks":
            return again()
        return again(context_fn=partial(_keep_products, self._narrow))


# -- products that are kept --------------------------------------------------------------------------------


def is_saved(operator: Any, args: Sequence[Any], narrow: int) -> bool:
    """Whether ``elementwise`` keeps what an operator returns.

    Args:
        narrow: products whose inner dimension is at most this, an adapter's rank, are as cheap as elementwise
            work.
    """
    if (kind := _kind(operator)) in ("other", "attention"):
        return kind == "attention"
    a, b = [each for each in args if isinstance(each, Tensor)][-2:]
    if kind == "batched" and b.shape[-1] > a.shape[-1]:
        return False  # scores of an attention that is written out: tokens x tokens
    return a.shape[-1] > narrow


@cache
def _kind(operator: Any) -> Literal["product", "batched", "attention", "other"]:
    name = operator.overloadpacket.__name__.removesuffix("_")
    if name in ("mm", "addmm"):
        return "product"
    if name in ("bmm", "baddbmm"):
        return "batched"
    return "attention" if "attention" in name or "attn" in name else "other"


def _keep_products(narrow: int) -> tuple[_AtProducts, _AtProducts]:
    """A block's forward, which keeps its products, and its recomputation, which takes them in this order."""
    saved = _SavedProducts(narrow)
    keep, take = (_OfProducts(narrow, product) for product in (saved.keep, saved.take))
    return _AtProducts(keep, saved.layer), _AtProducts(take)


class _AtProducts(TorchFunctionMode):
    """Enters a mode for operators around functions that call products.

    It costs the host 3 to 6 us an operator, of which a block calls 300: for a small batch more than the GPU
    takes to compute them. So layers, the most frequent, go without it in a forward.
    """

    def __init__(self, of_products: _OfProducts, layer: Callable[..., Tensor] | None = None) -> None:
        super().__init__()
        self._of_products, self._layer = of_products, layer

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if not _calls_products(func):
            return func(*args, **kwargs)
        if func is F.linear and self._layer is not None:
            return self._layer(*args, **kwargs)
        with self._of_products:
            return func(*args, **kwargs)


@cache
def _calls_products(function: Any) -> bool:
    name = getattr(function, "__name__", "")
    return "mm" in name or "attention" in name or "attn" in name or name.strip("_") in ("linear", "matmul")


# torch's own create_selective_checkpoint_contexts gives a caller of addmm_, which looks at the tensor that it
# wrote to and not at what is returned, that tensor without the product.
class _OfProducts(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Calls ``product`` for a block's wide products, with the operator and its arguments."""

    def __init__(self, narrow: int, product: Callable[[Any, Any, Any], Any]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._narrow, self._product = narrow, product

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if is_saved(func, args, self._narrow):
            return self._product(func, args, kwargs)
        return func(*args, **kwargs)


class _SavedProducts:
    """Of one block, whose forward and recomputation call the same operators in the same order."""

    def __init__(self, narrow: int) -> None:
        self._narrow = narrow
        self._saved: deque[tuple[Any, tuple[Any, ...], tuple[int, ...]]] = deque()
        """Operator, its results, and how often each had been written."""

    def layer(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """A linear one: a product of ``x``, of any number of dimensions, whatever the operator."""
        result = F.linear(x, *args, **kwargs)
        if x.shape[-1] > self._narrow:
            alias = result.detach()
            self._saved.append((None, (alias,), (alias._version,)))
        return result

    def keep(self, func: Any, args: Any, kwargs: Any) -> Any:
        result = func(*args, **kwargs)
        each = tuple(map(_alias, result if isinstance(result, tuple) else (result,)))
        later = int(func._schema.is_mutable)  # its own writing is counted when it has returned
        self._saved.append((func, each, tuple(count + later for count in _written(each))))
        return result

    def take(self, func: Any, args: Any, kwargs: Any) -> Any:
        operator, each, written = self._saved.popleft()
        if operator is None and func._schema.name.endswith("mm"):
            operator, each = func, (each[0].view(*args[-2].shape[:-1], -1),)
        if operator is not func or written != _written(each):
            raise RuntimeError(
                f"a product of a block was {operator} and is {func} when it is computed again, or its result "
                "was written to in place: set learner.recompute to blocks"
            )
        if func._schema.is_mutable:  # the caller looks at the tensor that it had written to
            return kwargs.get("out", args[0]).copy_(each[0])
        return each if len(each) > 1 else each[0]


def _alias(result: Any) -> Any:
    if not isinstance(result, Tensor):
        return result
    # Beneath autograd, where modes are, a detached tensor else has a count of writes of its own.
    with torch._C._SetExcludeDispatchKeyGuard(torch._C.DispatchKey.ADInplaceOrView, False):
        return result.detach()


def _written(each: Sequence[Any]) -> tuple[int, ...]:
    return tuple(result._version for result in each if isinstance(result, Tensor))


# -- how little is computed again in the memory there is (``learner.recompute: auto``) ---------------------


def modes_at(level: int, blocks: int) -> list[Mode]:
    """Of each block."""
    steps: tuple[Mode, ...] = ("blocks", "elementwise", "none")
    low, high = steps[:2] if level < blocks else steps[1:]
    ahead = level if level < blocks else level - blocks
    return [high if i * ahead % blocks < ahead else low for i in range(blocks)]


@dataclass(frozen=True, slots=True)
class Climb:
    """Passes of one shape.

    Attributes:
        peaks: (level, bytes) of those that ran, levels rising.
        ceiling: the highest level not known to need more than there is.
    """

    blocks: int
    ceiling: int
    peaks: tuple[tuple[int, int], ...] = ()

    @property
    def level(self) -> int:
        """The last that ran; -1: none did."""
        return self.peaks[-1][0] if self.peaks else -1

    def next(self, budget_bytes: float) -> int:
        """The highest level known to fit; at the end, the last that ran."""
        if not self.peaks:
            return 0
        level, used = self.peaks[-1]
        begin = 0 if level < self.blocks else self.blocks
        first, needed = next(peak for peak in self.peaks if peak[0] >= begin)
        cost = (used - needed) / (level - first) if level > first else self.peaks[0][1]
        higher = level + int((budget_bytes - used) / max(cost, 1))
        return max(level, min(higher, begin + self.blocks, self.ceiling))

    def after(self, level: int, peak_bytes: int | None) -> Climb:
        """With one more pass. None: it ran out of memory."""
        if peak_bytes is None:
            return replace(self, ceiling=(self.level + level) // 2)
        return replace(self, peaks=(*self.peaks, (level, peak_bytes)))
