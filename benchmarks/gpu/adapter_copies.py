"""Adapters applied as bfloat16 copies, as bfloat16 models do it, against float32 adapters under autocast.

One base model in memory, two sets of the same adapters on it.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import chain

import torch
from torch import Tensor

from benchmarks.gpu import lab as model
from benchmarks.gpu.correct import distance, worst
from benchmarks.gpu.lab import Lab, Shape
from benchmarks.gpu.suite import Outcome
from benchmarks.gpu.timing import interleaved, kernels, medians, spread
from spotlight.models.families.qwen_image import QwenImage
from spotlight.models.slots import LoraSlots
from spotlight.training.passes import MicroBatchPolicy
from spotlight.training.recompute import recompute
from spotlight_plan.commands.gpu.random_blocks import random_adapters

COPIES, AUTOCAST = "bfloat16 copies", "float32 under autocast"


@dataclass(frozen=True, slots=True)
class Applied:
    """A model with adapters, and how its forwards compute."""

    family: QwenImage
    slots: LoraSlots
    autocast: torch.dtype | None

    def velocity(self, lab: Lab, shape: Shape) -> Tensor:
        """As rollouts and losses evaluate it."""
        latents, sigma = lab.latents(self.family, shape)
        policy = MicroBatchPolicy(
            self.family,
            self.slots,
            lab.conditions(self.family, shape),
            size=model.size(shape),
            guidance=None,
            autocast=self.autocast,
        )
        return policy.velocity(latents, sigma)

    def rolled(self, lab: Lab, shape: Shape) -> Tensor:
        """The same without gradient."""
        with torch.no_grad():
            return self.velocity(lab, shape)

    def gradient(self, lab: Lab, shape: Shape) -> Tensor:
        """Of the mean square of a velocity, with every block recomputed."""
        recompute(self.family.transformer, "blocks")
        trained = self.slots.trainable_parameters().values()
        for parameter in trained:
            parameter.grad = None
        self.velocity(lab, shape).square().mean().backward()  # type: ignore[no-untyped-call]
        return torch.cat([p.grad.flatten() for p in trained if p.grad is not None])


def both(lab: Lab, layers: int) -> dict[str, Applied]:
    """The same adapters on the same base weights, applied in both ways."""
    lab.drop()
    family = lab.fresh(layers)
    twin = copy.copy(family)
    shared = {id(t): t for t in chain(family.transformer.parameters(), family.transformer.buffers())}
    twin.transformer = copy.deepcopy(family.transformer, shared)
    return {
        COPIES: Applied(family, random_adapters(family, lab.scale.rank), None),
        AUTOCAST: Applied(twin, random_adapters(twin, lab.scale.rank, copies=False), torch.bfloat16),
    }


def copies_against_autocast(lab: Lab) -> Outcome:
    """Velocities, before and after the weights change, and gradients: the largest difference."""
    ways, shapes = both(lab, lab.scale.few_layers), (lab.scale.exact, lab.scale.train_small)
    found: dict[str, list[Tensor]] = {name: [] for name in ways}
    for name, applied in ways.items():
        state = {key: tensor.clone() for key, tensor in applied.slots.state("policy").items()}
        found[name] += [applied.rolled(lab, shape) for shape in shapes]
        applied.slots.load_state("policy", {key: 1.5 * tensor for key, tensor in state.items()})
        found[name] += [applied.rolled(lab, shape) for shape in shapes]
        found[name].append(applied.gradient(lab, lab.scale.train_small))
    *velocities, gradient = map(distance, found[COPIES], found[AUTOCAST])
    details = {"velocities": velocities, "gradient": gradient, "layers": lab.scale.few_layers}
    return Outcome(worst([*velocities, gradient]), details)


def autocast_over_copies(lab: Lab) -> Outcome:
    """Time of a rollout's forward under autocast over one with copies; details have updates and launches."""
    ways, shape, train = both(lab, lab.scale.layers), lab.scale.small, lab.scale.train_small
    rollout = _timed(lab, {name: partial(way.rolled, lab, shape) for name, way in ways.items()})
    update = _timed(lab, {name: partial(way.gradient, lab, train) for name, way in ways.items()})
    launched = {
        name: kernels(partial(way.rolled, lab, shape), lab.device).total() / lab.scale.layers
        for name, way in ways.items()
    }
    forward, backward = medians(rollout), medians(update)
    details = {
        "rollout": spread(rollout),
        "update": spread(update),
        "update_ratio": backward[AUTOCAST] / backward[COPIES],
        "kernels_a_block": launched,
    }
    return Outcome(forward[AUTOCAST] / forward[COPIES], details)


def _timed(lab: Lab, runs: Mapping[str, Callable[[], object]]) -> dict[str, list[float]]:
    whole, lab.budget_s = lab.budget_s, lab.budget_s / 2
    try:
        return interleaved(lab, runs)
    finally:
        lab.budget_s = whole
