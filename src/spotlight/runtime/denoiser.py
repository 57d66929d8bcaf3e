"""Denoises the rollouts of a lease in this process."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

from torch import nn

from spotlight.models.slots import Slot, WeightSlots
from spotlight.rollout.engine import Engine
from spotlight.rollout.state import FailedRollout, FinishedRollout
from spotlight.runtime.assembly.components import Recipes
from spotlight.scheduler.types import Purpose, Rollout
from spotlight.training.batching.conditions import Conditions


@dataclass(frozen=True, slots=True)
class Denoiser:
    """Runs leases with their purpose's slot; previews use ``train_slot`` (the behaviour policy).

    Attributes:
        around: a context for the steps of a lease, given the module that takes them.
    """

    engine: Engine
    slots: WeightSlots
    conditions: Conditions
    recipes: Recipes
    train_slot: Slot
    evaluation_slot: Slot
    around: Callable[[nn.Module], AbstractContextManager[object]] = nullcontext

    def run(
        self,
        rollouts: Sequence[Rollout],
        on_step: Callable[[float], None],
        around: Callable[[], AbstractContextManager[object]] = nullcontext,
    ) -> list[FinishedRollout | FailedRollout]:
        """Denoise rollouts of one purpose; calls ``on_step(fraction_done)`` after every step.

        Args:
            around: a context for each step.
        """
        evaluating = rollouts[0].purpose is Purpose.EVAL
        recipe = self.recipes.by_purpose()[rollouts[0].purpose]
        conditions = self.conditions.of(rollout.prompt_id for rollout in rollouts)
        states = self.engine.start(rollouts, conditions, recipe)
        steps = max(rollout.steps for rollout in rollouts)
        slot = self.evaluation_slot if evaluating else self.train_slot
        # Autocast would round merged weights to half precision; an unmerged adapter keeps its contribution.
        with self.slots.use(slot, merged=self.engine.autocast is None) as model, self.around(model):
            for step in range(steps):
                with around():
                    states = self.engine.step(model, states)
                on_step((step + 1) / steps)
        return self.engine.finish(states)
