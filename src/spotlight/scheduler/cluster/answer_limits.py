"""How long groups may take between two answers, from the steps they took before. Part of the cluster; pure.

A worker commits rollouts and obeys commands only between two denoising steps. A limit that a healthy step
exceeds would take its work away and then end its process, and every one after it.

Invariants: a limit derived here only lengthens a configured one. It never exceeds the largest of that,
``first_s``, and ``SLOWER_MAX * MORE_MAX`` times the median of the last intervals of the group's kind; so
silences that were waited for lengthen the next limits no further, unless most intervals are as long.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from spotlight.scheduler.types import GroupKind, WorkerId

SLOWER_MAX = 4.0
"""An interval may be so many times as long as the median of the last; as the third longest up to ``first_s``,
since some intervals contain more steps than others."""
MORE_MAX = 2.0
"""An interval counts up to so many times if more rollouts are held than were then."""
REMEMBERED = 15
"""Intervals of a kind from which the median is taken."""
AGREE = 2
"""Fewer intervals tell nothing."""

_Measure: TypeAlias = tuple[GroupKind, bool, bool]
"""Of which groups, on GPUs that train or not; and whether with the decoding that ends a rollout."""


def longest_s(
    measured: Iterable[Sequence[float]], first_s: float, least_s: float = 0.0, *, warm: bool
) -> float:
    """How long an answer may take, from what the last took.

    Args:
        measured: ascending intervals by what they contain; empty: too few.
        warm: the process has answered like this before; else it may compile, for ``first_s``.
    """
    found = [each for each in measured if each]
    most_s = max((each[(len(each) - 1) // 2] for each in found), default=0.0)  # medians
    some_s = max((each[-3] for each in found if len(each) > 2), default=0.0)
    return max(least_s, min(first_s, SLOWER_MAX * some_s) if warm else first_s, SLOWER_MAX * most_s)


@dataclass(slots=True)
class _MeasuredGroup:
    """``rollouts``: that it works on; 0: it has no work, so it answers at once."""

    members: tuple[WorkerId, ...]
    kind: GroupKind
    trains: bool
    rollouts: int = 0


@dataclass(slots=True)
class AnswerLimits:
    """See the module's docstring.

    Attributes:
        first_s: limit until the group's processes are warmed up: each has finished a rollout with this degree
            (their first steps compile), and so have others of their kind, twice.
    """

    first_s: float = 0.0
    _intervals: dict[_Measure, deque[tuple[int, float]]] = field(default_factory=dict)
    _groups: dict[WorkerId, _MeasuredGroup] = field(default_factory=dict)
    _first: dict[WorkerId, dict[tuple[int, bool], float]] = field(default_factory=dict)
    """When a process first answered and first finished a rollout, with each degree."""

    def started(self, worker: WorkerId) -> None:
        """A worker gets a new process."""
        self._first.pop(worker, None)

    def formed(self, members: tuple[WorkerId, ...], kind: GroupKind, *, trains: bool) -> None:
        """Workers, the leader first, become a group."""
        self._groups[members[0]] = _MeasuredGroup(members, kind, trains)

    def works_on(self, leader: WorkerId, rollouts: int) -> None:
        """A group got work, finished some, or has none."""
        if (group := self._groups.get(leader)) is not None:
            group.rollouts = rollouts

    def answered(self, leader: WorkerId, rollouts: int, since_s: float, now: float, *, ends: bool) -> None:
        """A group that held ``rollouts`` answered, and before that at ``since_s``: the interval is measured.

        An interval may contain compiling, and is left out, if it began before the processes had answered
        like this once.

        Args:
            ends: it finished rollouts.
        """
        if (group := self._groups.get(leader)) is None:
            return
        like = group.kind.degree, ends
        if all(since_s >= self._first.get(name, {}).get(like, math.inf) for name in group.members):
            measure = group.kind, group.trains, ends
            recent = self._intervals.setdefault(measure, deque(maxlen=REMEMBERED))
            recent.append((max(1, rollouts), now - since_s))
        for name in group.members:
            self._first.setdefault(name, {}).setdefault(like, now)

    def expired(self, leader: WorkerId) -> None:
        """A limit passed: what was measured does not tell how long this group's steps take."""
        if (group := self._groups.get(leader)) is not None:
            for name in group.members:
                self.started(name)

    def limit_s(self, leader: WorkerId | None, least_s: float = 0.0) -> float:
        """Longest time to the next answer of a group; ``least_s`` if it works on nothing."""
        group = None if leader is None else self._groups.get(leader)
        if group is None or not group.rollouts:
            return least_s
        steps_s, ends_s = self._scaled_s(group, ends=False), self._scaled_s(group, ends=True)
        ended = group.kind.degree, True
        warm = bool(ends_s) and all(ended in self._first.get(name, ()) for name in group.members)
        return longest_s((steps_s, ends_s), self.first_s, least_s, warm=warm)

    def _scaled_s(self, group: _MeasuredGroup, *, ends: bool) -> list[float]:
        """Intervals of its kind, as long as they may be with what it has, ascending; none if too few."""
        recent = self._intervals.get((group.kind, group.trains, ends), ())
        if len(recent) < AGREE:
            return []
        has = group.rollouts
        # A list, not a generator: this runs for every answer and every grant.
        return sorted(
            [seconds if has <= held else seconds * min(MORE_MAX, has / held) for held, seconds in recent]
        )
