"""A worker's hands: leases in, finished rollouts out."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from spotlight.models.slots import Slot, WeightSlots
from spotlight.rollout.engine import Engine
from spotlight.rollout.state import FailedRollout, FinishedRollout, RolloutState
from spotlight.runtime.build.parts import Recipes
from spotlight.scheduler.types import Purpose, Rollout
from spotlight.training.batching.conditions import Conditions


@dataclass(frozen=True, slots=True)
class Denoiser:
    """Runs leases with the weights their purpose asks for.

    Attributes:
        train_slot: weights of train rollouts and their previews (the algorithm's behaviour policy).
        evaluation_slot: weights that are judged.
    """

    engine: Engine
    slots: WeightSlots
    conditions: Conditions
    recipes: Recipes
    train_slot: Slot
    evaluation_slot: Slot

    def run(
        self, rollouts: Sequence[Rollout], on_step: Callable[[float], None]
    ) -> list[FinishedRollout | FailedRollout]:
        """Denoise rollouts of one purpose to the end; ``on_step(share done)`` after every step."""
        evaluating = rollouts[0].purpose is Purpose.EVAL
        recipe = self.recipes.by_purpose()[rollouts[0].purpose]
        states: list[RolloutState] = self.engine.start(
            rollouts, self.conditions.of(rollout.prompt_id for rollout in rollouts), recipe
        )
        steps = max(rollout.steps for rollout in rollouts)
        slot = self.evaluation_slot if evaluating else self.train_slot
        # Not under autocast: there the sum would be rounded to half precision, the adapter alone is not.
        with self.slots.use(slot, merged=self.engine.autocast is None) as model:
            for step in range(steps):
                states = self.engine.step(model, states)
                on_step((step + 1) / steps)
        return self.engine.finish(states)
