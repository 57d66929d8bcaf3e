"""Rollouts of the next iteration, before this one is trained: one published version stale.

They enter the ledger when their iteration begins, so that no checkpoint contains them.
"""

from __future__ import annotations

from spotlight.config.section import Section
from spotlight.scheduler.cluster.queue import WorkClass
from spotlight.scheduler.cluster.recovery import Recovery
from spotlight.scheduler.iteration import Work, train_rollouts
from spotlight.scheduler.policy import Begun, GroupPlan, Policy, Training
from spotlight.scheduler.rollouts import Rollouts
from spotlight.scheduler.types import DropReason, PolicyVersion, Rollout, RolloutId


class NextIteration(Policy):
    """See the module's docstring.

    Attributes:
        early: the next iteration's rollouts.
        samples: number of this iteration's samples whose rollouts were begun before it.
        older: unfinished rollouts, of this iteration or the next, by the version before the published one.
    """

    def __init__(self, work: Rollouts, settings: Section | None) -> None:
        self.work = work
        self.samples = 0
        self.older: set[RolloutId] = set()
        self.early = Work(self, recorded=False)
        self._lost: dict[RolloutId, tuple[DropReason, str]] = {}
        work.extra.append(self.early)

    def _forget(self) -> Work:
        """Start with no early work; returns what there was."""
        early, self.early, self._lost = self.early, Work(self, recorded=False), {}
        self.work.extra[self.work.extra.index(early)] = self.early
        return early

    # -- which rollouts --------------------------------------------------------------------------------

    def begin(self, iteration: int, version: PolicyVersion, now: float) -> None:
        """Queue the next iteration's first groups, behind this one's."""
        plan = self.work.plan
        if iteration + 1 >= plan.iterations:
            return
        prompts = self.work.prompts_of(iteration + 1)[: plan.early_groups]
        groups = [GroupPlan(prompt) for prompt in prompts]
        for _, prompt, rollout in train_rollouts(plan, groups, iteration + 1, version):
            self.work.issue_extra(self.early, prompt, rollout, WorkClass.NEXT)

    def take(self, rollout: Rollout) -> Begun | None:
        """See :class:`Policy`."""
        early = self.early
        if rollout.id not in early.rollouts:
            return None
        self.samples += 1
        early.unscored.discard(rollout.id)
        begun, scores = early.rollouts.pop(rollout.id), early.scores.pop(rollout.id, None)
        return Begun(begun, early.makers.get(rollout.id), scores)

    def issued(self) -> None:
        """Those that were lost are dropped now that the ledger has them."""
        lost = self._lost
        self._forget()
        for name, (reason, detail) in lost.items():
            self.work.drop(name, reason, detail)

    # -- what became of them ---------------------------------------------------------------------------

    def dropped(self, rollout: RolloutId, reason: DropReason, detail: str) -> None:
        """See :class:`Policy`."""
        self._lost[rollout] = reason, detail
        self.early.unscored.discard(rollout)

    def published(self) -> None:
        """A version is published: only rollouts under way may still be made by the one before."""
        self.samples = 0
        self.older = self.early.unmade
        self.after_event()

    def after_event(self) -> None:
        """Issue older rollouts that no worker makes any more again, with the published version."""
        work, early = self.work, self.early
        if not self.older or not work.queue.waiting:
            return
        for name in sorted(name for name in self.older if work.queue.waits(name)):
            self.older.discard(name)
            begun = work.queue.step_of(name) > 0
            work.queue.cancel([name])
            if name in early.rollouts:
                early.unscored.discard(name)
                del early.rollouts[name]  # issued again when its iteration begins
                if begun:
                    work.cluster.recoveries[Recovery.ROLLOUT_RENEWED] += 1
                    work.discard([name])  # what is committed of it is by the older weights
            else:
                work.issue_again(name)

    def rolled_back(self) -> list[RolloutId]:
        """See :class:`Policy`."""
        self.samples, self.older = 0, set()
        return list(self._forget().rollouts)

    # -- reports ---------------------------------------------------------------------------------------

    def figures(self, training: Training) -> dict[str, int]:
        """See :class:`Policy`."""
        return {"early_samples": self.samples}
