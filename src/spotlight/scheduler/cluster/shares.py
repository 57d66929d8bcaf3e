"""How work that waits is divided among the groups that pull. Pure.

Each gets at most its share of what is outstanding, so that all are done at about the same time: a group on a
slow GPU gets less, and near the end nothing, if faster ones that can work have it all done before it had one
more rollout done. Work is still pulled: a share is a bound, not an assignment.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TypeAlias

from spotlight.scheduler.cluster.members import Group
from spotlight.scheduler.overlap.pace import Pace
from spotlight.scheduler.types import GroupKind

Able: TypeAlias = Callable[[], Mapping[GroupKind, int]]
"""How many groups of each kind can work."""

_FEW = 4


@dataclass(slots=True)
class Shares:
    """Groups that share the work, those that still form too, by whether they train and by kind."""

    pace: Pace
    takers: Counter[tuple[bool, GroupKind]] = field(default_factory=Counter)

    def count(self, group: Group, change: int) -> None:
        """A group shares from now on, or no more."""
        self.takers[group.trains, group.kind] += change

    def of(self, group: Group, rollouts: int, *, trainers: bool) -> int:
        """A group's share of ``rollouts``; ``trainers``: GPUs that train share too."""
        speeds = self._speeds()
        all_speeds = sum(
            speeds[kind] * count for (trains, kind), count in self.takers.items() if trainers or not trains
        )
        speed = speeds[group.kind]
        return math.ceil(rollouts * speed / max(all_speeds, speed))

    def is_sooner_done(self, group: Group, share: int, rollouts: int, able: Able) -> bool:
        """Whether faster groups have done all that is left, before ``group`` has done its share.

        Args:
            share: of ``rollouts``; where it is more than a few, one of them more or less does not matter.
            able: groups that work, or wait for work: others may never come. Asked only where it matters.
        """
        if not 0 < share <= _FEW:
            return False
        speeds = self._speeds()
        speed = speeds[group.kind]
        if speed >= max(speeds.values()):
            return False
        done = sum(
            math.floor(share * speeds[kind] / speed) * count
            for kind, count in able().items()
            if speeds.get(kind, 0.0) > speed
        )
        return done > rollouts - share

    def _speeds(self) -> dict[GroupKind, float]:
        """Of all kinds of groups, relative to the first; 1 until a kind's pace is known."""
        kinds = list(dict.fromkeys(kind for _, kind in self.takers))
        times_s = [self.pace.step_s(kind) for kind in kinds]
        return {
            kind: times_s[0] / each_s if each_s and times_s[0] else 1.0
            for kind, each_s in zip(kinds, times_s, strict=True)
        }

    def check(self, groups: list[Group]) -> None:
        """Assert that exactly these groups share."""
        assert +self.takers == Counter((group.trains, group.kind) for group in groups)
