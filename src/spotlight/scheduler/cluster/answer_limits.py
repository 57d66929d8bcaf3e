"""How long groups may take between two answers, from the steps they took before. Part of the cluster; pure.

A worker commits rollouts and obeys commands only between two denoising steps. A limit that a healthy step
exceeds would take its work away and then end its process, and every one after it.

Invariants: a limit derived here only lengthens a configured one; it never exceeds the larger of ``first_s``
and ``SLOWER_MAX`` times what was measured.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TypeAlias

from spotlight.scheduler.types import GroupKind, WorkerId

SLOWER_MAX = 4.0
"""A step may take so many times as long as the slowest of the last did, for as many rollouts."""
_FADES = 0.9
"""Weight of the slowest step so far once a faster one is measured."""

_Measure: TypeAlias = tuple[GroupKind, bool, bool]
"""Of which groups, on GPUs that train or not; and whether with the decoding that ends a rollout."""


@dataclass(slots=True)
class _MeasuredGroup:
    """``rollouts``: held after its last grant; 0: it never had any, so that it is in no step."""

    members: tuple[WorkerId, ...]
    kind: GroupKind
    trains: bool
    rollouts: int = 0


@dataclass(slots=True)
class AnswerLimits:
    """See the module's docstring.

    Attributes:
        first_s: limit until a process has finished a rollout, with each degree: its first steps compile.
    """

    first_s: float = 0.0
    _each_s: dict[_Measure, float] = field(default_factory=dict)
    _groups: dict[WorkerId, _MeasuredGroup] = field(default_factory=dict)
    _proven: dict[WorkerId, set[int]] = field(default_factory=dict)

    def started(self, worker: WorkerId) -> None:
        """A worker gets a new process."""
        self._proven.pop(worker, None)

    def formed(self, members: tuple[WorkerId, ...], kind: GroupKind, *, trains: bool) -> None:
        """Workers, the leader first, become a group."""
        self._groups[members[0]] = _MeasuredGroup(members, kind, trains)

    def granted(self, leader: WorkerId, rollouts: int) -> None:
        """A group got work and now holds ``rollouts``."""
        if (group := self._groups.get(leader)) is not None:
            group.rollouts = rollouts

    def took(self, leader: WorkerId, rollouts: int, seconds: float, *, ends: bool) -> None:
        """A group that holds ``rollouts`` was heard ``seconds`` after the time before.

        Args:
            ends: it finished rollouts.
        """
        if (group := self._groups.get(leader)) is None:
            return
        of, each_s = (group.kind, group.trains, ends), seconds / max(1, rollouts)
        self._each_s[of] = max(each_s, _FADES * self._each_s.get(of, 0.0))
        if ends:
            for name in group.members:
                self._proven.setdefault(name, set()).add(group.kind.degree)

    def ran_out(self, leader: WorkerId) -> None:
        """A limit passed: what was measured no longer tells how long this group's steps take."""
        if (group := self._groups.get(leader)) is not None:
            for name in group.members:
                self.started(name)

    def limit_s(self, leader: WorkerId | None, least_s: float = 0.0) -> float:
        """Longest time to the next answer of a group; ``least_s`` if it is in no step."""
        group = None if leader is None else self._groups.get(leader)
        if group is None or not group.rollouts:
            return least_s
        slowest_s = max(self._each_s.get((group.kind, group.trains, ends), 0.0) for ends in (False, True))
        proven = all(group.kind.degree in self._proven.get(name, ()) for name in group.members)
        return max(least_s, 0.0 if proven else self.first_s, SLOWER_MAX * slowest_s * group.rollouts)
