"""CUDA graphs of forwards without gradient (``model.cuda_graphs``): a replay launches all kernels at once,
where small batches otherwise wait for the host.

A forward is captured the second time that its kind comes: weight slot, autocast, shapes, and every argument
that is no tensor. The first time runs eagerly, fills the model's caches, and keeps the tensors that it makes
of Python numbers for the second one: making one waits for the device, which a capture may not.

Invariants:
- A replay reads weights where they lay at capture, so slots are written in place, and never merged.
- Outputs are copies: graphs share their memory, and the next replay overwrites it.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map

from spotlight.models.experts import denoisers
from spotlight.models.shared.sharded import gathers
from spotlight.models.slots import WeightSlots
from spotlight_files.model_errors import ModelError
from spotlight_rewards.base.device_errors import is_out_of_memory

KINDS_MAX = 64
"""Kinds of forwards that a transformer remembers; then it forgets the one that was not used for longest."""

_PLAIN = {bool, int, float, torch.dtype, torch.device, str, type(None)}
"""Types that ``repr`` tells whole."""

Capture: TypeAlias = Callable[[Callable[[], Any]], tuple[Any, Callable[[], None]]]
"""Runs a function once and returns its output, and what repeats it on the same memory."""


def capture_forwards(slots: WeightSlots, device: torch.device, capture: Capture | None = None) -> None:
    """Capture the forwards of all slots from now on, in place. Sharded ones run eagerly.

    Args:
        capture: default: a CUDA graph.

    Raises:
        ModelError: the device has no CUDA graphs.
    """
    if capture is None:
        if device.type != "cuda":
            raise ModelError(
                f"model.cuda_graphs is true, and the device is {device.type}; expected a CUDA device: set "
                "the key to false"
            )
        capture = _cuda_graphs()
    for module in slots.modules().values():
        for part in denoisers(module).values():
            part.forward = CapturedForward(part, lambda: slots.active, capture)


def release_forwards(module: nn.Module) -> None:
    """Undo :func:`capture_forwards` for one module, and free what was captured."""
    for part in denoisers(module).values():
        vars(part).pop("forward", None)


class CapturedForward:
    """In place of a transformer's ``forward``.

    Args:
        slot: the weights that are in use.
        kinds_max: see :data:`KINDS_MAX`.
    """

    def __init__(
        self, module: nn.Module, slot: Callable[[], Hashable], capture: Capture, kinds_max: int = KINDS_MAX
    ) -> None:
        self._module, self._forward = module, module.forward
        self._slot, self._capture, self._kinds_max = slot, capture, kinds_max
        self._seen: OrderedDict[Hashable, _Captured | _OfNumbers] = OrderedDict()

    @property
    def captured(self) -> int:
        return sum(isinstance(each, _Captured) for each in self._seen.values())

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """See the module's docstring. Raises :class:`ModelError` if the forward cannot be captured."""
        if torch.is_grad_enabled() or gathers(self._module):
            return self._forward(*args, **kwargs)
        leaves, structure = tree_flatten((args, kwargs))
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        around = self._slot(), self._module.training, _precision(tensors), repr(structure)
        kind = (*around, *map(_leaf_kind, leaves))
        if kind not in self._seen:
            with (made := _OfNumbers()):
                output = self._forward(*args, **kwargs)
            self._seen[kind] = made
            while len(self._seen) > self._kinds_max:
                self._seen.popitem(last=False)
            return output
        self._seen.move_to_end(kind)
        found = self._seen[kind]
        if isinstance(found, _OfNumbers):
            found = self._seen[kind] = self._captured(leaves, structure.unflatten, found)
        return found.replayed(tensors)

    def _captured(
        self, leaves: list[Any], structured: Callable[[list[Any]], Any], made: _OfNumbers
    ) -> _Captured:
        own = [leaf.clone() if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        args, kwargs = structured(own)
        cached = torch.is_autocast_cache_enabled()
        # What autocast has cached is freed with its context, and a replay would still read it.
        torch.set_autocast_cache_enabled(False)

        def run() -> Any:
            with made:
                return self._forward(*args, **kwargs)

        try:
            output, replay = self._capture(run)
        except RuntimeError as error:
            if is_out_of_memory(error):
                self._seen.clear()
                raise
            raise ModelError(
                f"model.cuda_graphs is true, and a forward of {type(self._module).__name__} cannot be "
                f"captured: {error}: set the key to false"
            ) from error
        finally:
            torch.set_autocast_cache_enabled(cached)
        return _Captured([leaf for leaf in own if isinstance(leaf, Tensor)], made, output, replay)


@dataclass(frozen=True, slots=True, eq=False)
class _Captured:
    inputs: list[Tensor]
    made: _OfNumbers
    output: Any
    replay: Callable[[], None]

    def replayed(self, tensors: list[Tensor]) -> Any:
        for own, given in zip(self.inputs, tensors, strict=True):
            own.copy_(given)
        self.replay()
        return tree_map(lambda leaf: leaf.clone() if isinstance(leaf, Tensor) else leaf, self.output)


class _OfNumbers(TorchFunctionMode):
    """Makes each tensor of Python numbers once; forwards within get copies of it."""

    def __init__(self) -> None:
        super().__init__()
        self._made: dict[str, Tensor] = {}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func not in (torch.tensor, torch.as_tensor) or not _PLAIN.issuperset(
            map(type, tree_leaves((args, kwargs)))
        ):
            return func(*args, **kwargs)
        key = repr((args, kwargs))
        if key not in self._made:
            self._made[key] = func(*args, **kwargs)
        return self._made[key].clone()


def _leaf_kind(leaf: Any) -> Hashable:
    if isinstance(leaf, Tensor):
        return leaf.shape, leaf.stride(), leaf.dtype, leaf.device
    return type(leaf), leaf  # 1, 1.0 and True are equal, and give other types


def _precision(tensors: list[Tensor]) -> torch.dtype | None:
    """Autocast's type for these tensors' device; None: off."""
    kind = tensors[0].device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None


def _cuda_graphs() -> Capture:
    pool = torch.cuda.graph_pool_handle()

    def capture(run: Callable[[], Any]) -> tuple[Any, Callable[[], None]]:
        nonlocal pool
        graph = torch.cuda.CUDAGraph()
        try:
            # Other threads of the process, such as scorers, use the device meanwhile.
            with torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
                output = run()
        except RuntimeError as error:
            if is_out_of_memory(error):
                pool = torch.cuda.graph_pool_handle()  # blocks of this one may live on, in the traceback
            raise
        return output, graph.replay

    return capture
