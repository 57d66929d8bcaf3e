"""How much the learner's GPUs roll out while it waits: what policies say, or else anything. Part of the
controller.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

from spotlight.scheduler.cluster.dispatch import Dispatcher
from spotlight.scheduler.policy import Policy, overriding
from spotlight.scheduler.stages import LEARNER_IDLES, Stage
from spotlight.scheduler.training_tasks import TrainingTasks


class TrainerBudget:
    """See the module's docstring."""

    def __init__(self, policies: Iterable[Policy], dispatcher: Dispatcher) -> None:
        self._policies = overriding(policies, Policy.trainer_budget)  # asked at every event
        self._dispatcher, self._cluster = dispatcher, dispatcher.cluster

    def comes_first(self, training: TrainingTasks, now: float) -> bool:
        """Whether an idle learner's GPUs should roll out, although some samples may be trainable."""
        if not self._cluster.trainers():
            return False
        wanted = [policy.rolls_out(training, now) for policy in self._policies]  # all are asked
        return any(wanted)

    def set(self, training: TrainingTasks, stage: Stage, *, works: bool) -> None:
        """They roll out only while a learner that ``works`` idles, and as much as a policy says."""
        if not self._cluster.trainers():
            return
        preparing = stage is Stage.PREPARING
        waits = works and stage in LEARNER_IDLES and training.task is None
        rollouts = self._wanted(training, preparing) if waits else 0.0
        self._dispatcher.set_trainer_budget(rollouts, explore=preparing)

    def _wanted(self, training: TrainingTasks, preparing: bool) -> float:
        said = () if preparing else (policy.trainer_budget() for policy in self._policies)
        if limits := [limit for limit in said if limit is not None]:
            return min(limits)
        return 0.0 if training.trains_parts and training.ready() else math.inf

    def left(self, rollouts: float) -> None:
        """So many are left, after work was granted or training began."""
        for policy in self._policies:
            policy.trainer_budget_left(rollouts)
