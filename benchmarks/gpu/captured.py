"""Forwards captured as CUDA graphs. On a CPU a tape takes the graph's place: it repeats, on the same memory,
what was called while it recorded, and so goes wrong where a graph would.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from benchmarks.gpu.correct import distance, worst
from benchmarks.gpu.lab import Lab
from benchmarks.gpu.suite import Outcome
from benchmarks.gpu.timing import interleaved, medians, spread
from spotlight.models.kernels.cuda_graphs import CapturedForward, capture_forwards
from spotlight.models.slots import WeightSlots


class Tape(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Operators with the tensors that they read and wrote."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.calls: list[tuple[Any, Any, dict[str, Any], list[Tensor]]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        self.calls.append((func, args, kwargs or {}, _tensors(found)))
        return found

    @torch.no_grad()
    def replay(self) -> None:
        """Call them again, and write the results where the first ones are."""
        for func, args, kwargs, outputs in self.calls:
            for place, value in zip(outputs, _tensors(func(*args, **kwargs)), strict=True):
                place.copy_(value)


def record(run: Callable[[], Any]) -> tuple[Any, Callable[[], None]]:
    """A :data:`spotlight.models.kernels.cuda_graphs.Capture` for any device."""
    with Tape() as tape:
        output = run()
    return output, tape.replay


def _tensors(tree: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]


@contextmanager
def captured(lab: Lab, slots: WeightSlots) -> Iterator[CapturedForward]:
    """With forwards that are captured, and eager again afterwards."""
    capture_forwards(slots, lab.device, None if lab.device.type == "cuda" else record)
    (module,) = slots.modules().values()
    forward = module.forward
    assert isinstance(forward, CapturedForward)
    try:
        yield forward
    finally:
        del module.forward


def captured_against_eager(lab: Lab) -> Outcome:
    """Velocities of replays against eager ones: two shapes, and unequal prompts, whose forward has a mask;
    before and after the weights have changed."""
    family, slots = lab.family(), lab.slots()
    shape = lab.scale.train_small
    unequal = [lab.condition(family, shape.text - i, i) for i in range(shape.batch)]
    kinds = ((lab.scale.small, None), (shape, None), (shape, unequal))
    before = {name: tensor.clone() for name, tensor in slots.state("policy").items()}
    changed = {name: 1.5 * tensor for name, tensor in before.items()}
    eager, found = [], []
    with slots.use("policy") as module:
        try:
            for weights in (before, changed):
                slots.load_state("policy", weights)
                eager += [lab.velocity(family, module, *kind) for kind in kinds]
            with captured(lab, slots) as forward:
                for weights in (changed, before, before, changed):  # eager, captured, and twice only replayed
                    slots.load_state("policy", weights)
                    found += [lab.velocity(family, module, *kind) for kind in kinds]
                count = forward.captured
        finally:
            slots.load_state("policy", before)
    values = [distance(a, b) for a, b in zip(found[2 * len(kinds) :], eager, strict=True)]
    return Outcome(worst(values), {"captured": count, "by kind and weights": values})


def captured_cost(lab: Lab) -> Outcome:
    """Time of a replayed forward of one picture over that of an eager one."""
    family, slots = lab.family(), lab.slots()
    shape = dataclasses.replace(lab.scale.small, batch=1)
    with slots.use("policy") as module:
        eager = module.forward
        with captured(lab, slots) as forward:

            def run(replayed: bool) -> Tensor:
                module.forward = forward if replayed else eager
                return lab.velocity(family, module, shape)

            run(True)  # the second call captures
            seconds = interleaved(lab, {"captured": lambda: run(True), "eager": lambda: run(False)})
    typical = medians(seconds)
    return Outcome(typical["captured"] / typical["eager"], spread(seconds))
