"""How long work takes, as seen lately: what predictions of the pipeline are made of. Pure.

Invariants: nothing that was lost counts; a kind of group never seen is expected to be as fast as the others.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import StrEnum

from spotlight.core.types import GroupKind, LeaseId, WorkerId

_NEWS = 0.3
"""Weight of the latest observation in a moving average."""


class Filler(StrEnum):
    """What fills time in which a GPU would otherwise wait."""

    TRAINERS = "trainers"
    """GPUs of the learner roll out."""
    NEXT = "next"
    """Rollouts of the next iteration, before this one is trained."""
    EXPLORATION = "exploration"
    """Previews."""


@dataclass(frozen=True, slots=True)
class _Running:
    leader: WorkerId
    kind: GroupKind
    share: float
    since_s: float
    filler: Filler | None


@dataclass(slots=True)
class Pace:
    """Seconds by kind of group.

    Attributes:
        train_s: the learner takes for one sample; 0 until it trained some.
        filled_s: GPU seconds by what filled them, since they were last taken.
    """

    train_s: float = 0.0
    filled_s: dict[Filler, float] = field(default_factory=dict)
    _rollout_s: dict[GroupKind, float] = field(default_factory=dict)
    _running: dict[LeaseId, _Running] = field(default_factory=dict)
    _free_s: dict[WorkerId, float] = field(default_factory=dict)

    def begin(
        self,
        lease: LeaseId,
        leader: WorkerId,
        kind: GroupKind,
        share: float,
        filler: Filler | None,
        now: float,
    ) -> None:
        """A group got work worth ``share`` whole rollouts."""
        self._running[lease] = _Running(leader, kind, share, now, filler)

    def end(self, lease: LeaseId, now: float) -> None:
        """All of a lease is finished."""
        running = self._running.pop(lease, None)
        if running is None:
            return
        # A group that pulled ahead began this lease when it had finished the one before.
        began_s = max(running.since_s, self._free_s.get(running.leader, 0.0))
        self._free_s[running.leader] = now
        if running.filler is not None:
            spent_s = (now - began_s) * running.kind.degree
            self.filled_s[running.filler] = self.filled_s.get(running.filler, 0.0) + spent_s
        if running.filler is not Filler.EXPLORATION and running.share > 0:
            seen_s = (now - began_s) / running.share
            known_s = self._rollout_s.get(running.kind, seen_s)
            self._rollout_s[running.kind] = known_s + _NEWS * (seen_s - known_s)

    def drop(self, lease: LeaseId) -> None:
        """A lease ends without having been finished."""
        self._running.pop(lease, None)

    def forget(self, leader: WorkerId) -> None:
        """A group is no more: its leases end without having been finished."""
        self._free_s.pop(leader, None)
        for lease in [lease for lease, running in self._running.items() if running.leader == leader]:
            del self._running[lease]

    def trained(self, samples: int, seconds: float) -> None:
        """The learner trained a micro-batch."""
        seen_s = seconds / samples
        self.train_s += (_NEWS if self.train_s else 1.0) * (seen_s - self.train_s)

    def rollout_s(self, kind: GroupKind) -> float | None:
        """Seconds that a group of a kind takes for one whole rollout; None before any was seen."""
        known = self._rollout_s
        if kind in known:
            return known[kind]
        return sum(known.values()) / len(known) if known else None

    def left_s(self, leases: Iterable[LeaseId], now: float) -> float:
        """Seconds until a group has finished what it holds; 0 for what is overdue."""
        left_s = 0.0
        for lease in leases:
            running = self._running.get(lease)
            each_s = self.rollout_s(running.kind) if running else None
            if running is None or each_s is None:
                continue
            began_s = max(running.since_s, self._free_s.get(running.leader, 0.0))
            # What waits behind another lease has not begun.
            spent_s = now - began_s if left_s == 0.0 else 0.0
            left_s += max(0.0, running.share * each_s - spent_s)
        return left_s
