"""How long work takes, as seen lately: what predictions of the pipeline are made of. Pure.

Invariants: what was lost says nothing of the pace; a kind of group never seen is expected to be as fast as
the others.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from spotlight.scheduler.types import Filler, GroupKind, LeaseId, WorkerId

_NEWS = 0.3
"""Weight of the latest observation in a moving average."""
_TRAINERS_SLOWER_MAX = 1.5
"""A GPU that trains, too, is expected to take at most so many times as long as one that does not."""


@dataclass(frozen=True, slots=True)
class _Running:
    leader: WorkerId
    kind: GroupKind
    steps: int
    since_s: float
    filler: Filler | None
    fills: bool


@dataclass(slots=True)
class Pace:
    """Seconds by kind of group.

    Attributes:
        train_s: the learner takes for one sample; 0 until it trained some.
        filled_s: GPU seconds by what filled them, since they were last taken.
    """

    train_s: float = 0.0
    filled_s: dict[Filler, float] = field(default_factory=dict)
    _step_s: dict[tuple[GroupKind, bool], float] = field(default_factory=dict)
    _running: dict[LeaseId, _Running] = field(default_factory=dict)
    _free_s: dict[WorkerId, float] = field(default_factory=dict)

    def begin(
        self,
        lease: LeaseId,
        leader: WorkerId,
        kind: GroupKind,
        steps: int,
        filler: Filler | None,
        now: float,
        *,
        fills: bool = True,
    ) -> None:
        """A group got work of so many steps, over all its rollouts.

        Args:
            fills: the group would wait without this work; not so where the iteration waits for previews.
        """
        self._running[lease] = _Running(leader, kind, steps, now, filler, fills)

    def end(self, lease: LeaseId, now: float) -> None:
        """All of a lease is finished."""
        running, spent_s = self._stop(lease, now)
        if running is not None and running.filler is not Filler.EXPLORATION and running.steps > 0:
            seen_s = spent_s / running.steps
            trains = running.filler is Filler.TRAINERS
            of, like = (running.kind, trains), (running.kind, not trains)
            known_s = self._step_s.get(of, self._step_s.get(like, seen_s))
            self._step_s[of] = known_s + _NEWS * (seen_s - known_s)

    def cut(self, lease: LeaseId, now: float) -> None:
        """A lease ends unfinished, while its group goes on: time was filled, but nothing is learnt of it."""
        self._stop(lease, now)

    def promote(self, now: float) -> None:
        """The next iteration begins: until now its rollouts filled time, from now on they are its work."""
        working: set[WorkerId] = set()
        for lease, running in self._running.items():
            if running.filler is Filler.NEXT:
                if running.leader not in working:  # else it was pulled ahead
                    self._fill(running, now)
                self._running[lease] = replace(running, filler=None)
            working.add(running.leader)

    def _stop(self, lease: LeaseId, now: float) -> tuple[_Running | None, float]:
        running = self._running.pop(lease, None)
        if running is None:
            return None, 0.0
        spent_s = self._fill(running, now)
        self._free_s[running.leader] = now
        return running, spent_s

    def _fill(self, running: _Running, now: float) -> float:
        """Count what a lease filled so far; returns how long it ran."""
        # A group that pulled ahead began this lease when it had finished the one before.
        spent_s = max(0.0, now - max(running.since_s, self._free_s.get(running.leader, 0.0)))
        if running.filler is not None and running.fills:
            self.fill(running.filler, spent_s * running.kind.degree)
        return spent_s

    def fill(self, filler: Filler, gpu_s: float) -> None:
        """So many GPU seconds were filled."""
        self.filled_s[filler] = self.filled_s.get(filler, 0.0) + gpu_s

    def forget(self, leader: WorkerId) -> None:
        """A group was dissolved: its leases end unfinished."""
        self._free_s.pop(leader, None)
        for lease in [lease for lease, running in self._running.items() if running.leader == leader]:
            del self._running[lease]

    def trained(self, samples: int, seconds: float) -> None:
        """The learner trained a micro-batch."""
        seen_s = seconds / samples
        self.train_s += (_NEWS if self.train_s else 1.0) * (seen_s - self.train_s)

    def step_s(self, kind: GroupKind, *, trains: bool = False) -> float | None:
        """Seconds that a group takes for a step of one rollout; None before any was seen.

        Args:
            trains: its GPUs train, too: leases are smaller there, and so are batches.
        """
        known = self._step_s
        own_s, like_s = known.get((kind, trains)), known.get((kind, not trains))
        if own_s is None:
            return like_s if like_s is not None or not known else sum(known.values()) / len(known)
        # Trainers that look too slow are given no work, and would look so for ever.
        return min(own_s, _TRAINERS_SLOWER_MAX * like_s) if trains and like_s is not None else own_s
