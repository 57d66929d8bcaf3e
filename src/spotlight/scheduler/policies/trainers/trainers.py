"""The learner's GPUs make rollouts while they wait for samples, as far as training then ends earlier.

Their budget is planned when they idle, and expires if none of them asks for work in time.
"""

from __future__ import annotations

from spotlight.config.section import Section
from spotlight.scheduler.policies.trainers.trainer_budget import Backlog, trainer_rollout_budget
from spotlight.scheduler.policy import Policy, Training
from spotlight.scheduler.rollouts import Rollouts


class Trainers(Policy):
    """See the module's docstring."""

    def __init__(self, work: Rollouts, settings: Section | None) -> None:
        self.work = work
        self._budget = self._until_s = 0.0

    def rolls_out(self, training: Training, now: float) -> bool:
        """See :class:`Policy`."""
        plan, cluster = self.work.plan, self.work.cluster
        trainable = training.ready() if training.trains_parts else 0
        made = max(0, training.untrained - trainable) if training.trains_parts else 0
        backlog = Backlog(
            plan.rollout_steps,
            plan.evaluation.steps,
            trainable,
            made,
            cluster.pace.train_s * plan.trained_share,
            whole=not training.trains_parts,
            switch_s=plan.pipeline.switch_s,
            generating=bool(cluster.serving.turned),
        )
        rollouts = trainer_rollout_budget(cluster, backlog)
        if rollouts is not None:
            self._budget, self._until_s = rollouts, now + plan.cluster.answer_s
        elif now >= self._until_s:
            self._budget = 0  # no trainer has asked for work
        return self._budget > 0

    def trainer_budget(self) -> float:
        """See :class:`Policy`."""
        return self._budget

    def trainer_budget_left(self, rollouts: float) -> None:
        """See :class:`Policy`."""
        if self._budget:
            self._budget = rollouts

    def wake_s(self, now: float) -> float | None:
        """When the budget expires."""
        waited_for = self._budget and self._until_s > now and not self.work.dispatcher.trainers_work
        return self._until_s if waited_for else None
