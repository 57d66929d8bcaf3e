"""Samples whose reward compares a whole group wait until no more of their group is to come.

Invariant: a sample enters once and leaves once, with its group or because it is no longer wanted. A member
whose rollout failed is not waited for.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from spotlight.config.section import Section
from spotlight.scheduler.effects import HoldSamples, ScoreSamples
from spotlight.scheduler.policy import Policy
from spotlight.scheduler.rollouts import Rollouts
from spotlight.scheduler.types import Purpose, Rollout, RolloutId, group_of


class WholeGroups(Policy):
    """See the module's docstring."""

    def __init__(self, work: Rollouts, settings: Section | None) -> None:
        self.work = work
        self._held: dict[RolloutId, Rollout] = {}

    def waits_to_score(self, rollouts: Sequence[Rollout]) -> bool:
        """All do."""
        self._held |= {rollout.id: rollout for rollout in rollouts}
        self.work.effects.append(HoldSamples(tuple(rollouts)))
        return True

    def after_event(self) -> None:
        """Ask for the scores of the groups that are complete, in order of their first arrival."""
        if not self._held:
            return
        works = [self.work.current, *self.work.extra]
        issued = Counter(group_of(rollout) for work in works for rollout in work.rollouts.values())
        to_come = {group_of(work.rollouts[name]) for work in works for name in work.unmade}
        complete: dict[str, list[Rollout]] = {}
        for rollout in [*self._held.values()]:
            if not any(rollout.id in work.unscored and rollout.id in work.makers for work in works):
                del self._held[rollout.id]
                continue
            group = group_of(rollout)
            whole = rollout.purpose is not Purpose.TRAIN or issued[group] >= self.work.plan.group_size
            if whole and group not in to_come:
                complete.setdefault(group, []).append(rollout)
        for group, members in complete.items():
            for rollout in members:
                del self._held[rollout.id]
            members.sort(key=lambda each: each.member)
            size = max(issued[group], len(members))
            self.work.effects.append(ScoreSamples(tuple(members), self.work.cluster.lineage, size))

    def rolled_back(self) -> list[RolloutId]:
        """Those that are still wanted will be held again."""
        self._held.clear()
        return []

    def check(self) -> None:
        """Every rollout that waits for scores is held, or its group was sent."""
        for name in self._held:
            assert not any(name in work.scores for work in (self.work.current, *self.work.extra)), name
