"""How much the learner's GPUs roll out while it waits: what policies say, or else anything. Part of the
controller.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

from spotlight.scheduler.cluster.dispatch import Dispatcher
from spotlight.scheduler.policy import Policy, Training, overriding
from spotlight.scheduler.stages import LEARNER_IDLES, Stage


class TrainerRollouts:
    """See the module's docstring."""

    def __init__(self, policies: Iterable[Policy], dispatcher: Dispatcher) -> None:
        self._policies = overriding(policies, Policy.trainer_budget)  # asked at every event
        self._dispatcher, self._cluster = dispatcher, dispatcher.cluster

    def comes_first(self, training: Training, now: float) -> bool:
        """Whether an idle learner's GPUs should roll out, although some samples may be trainable."""
        if not self._cluster.trainers():
            return False
        wanted = [policy.rolls_out(training, now) for policy in self._policies]  # all are asked
        return any(wanted)

    def set_budget(self, training: Training, stage: Stage, *, untasked: bool) -> None:
        """They roll out only while a learner that works has no task, and as much as a policy says."""
        if not self._cluster.trainers():
            return
        preparing = stage is Stage.PREPARING
        rollouts = self._wanted(training, preparing) if untasked and stage in LEARNER_IDLES else 0.0
        self._dispatcher.set_trainer_budget(rollouts, explore=preparing)

    def _wanted(self, training: Training, preparing: bool) -> float:
        said = () if preparing else (policy.trainer_budget() for policy in self._policies)
        if limits := [limit for limit in said if limit is not None]:
            return min(limits)
        return 0.0 if training.trains_parts and training.ready() else math.inf

    def budget_left(self, rollouts: float) -> None:
        """So many are left, after work was granted or training began."""
        for policy in self._policies:
            policy.trainer_budget_left(rollouts)
