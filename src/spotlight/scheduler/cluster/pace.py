"""Measured durations of rollouts and training, for predictions of the pipeline. Pure.

Invariants: lost work contributes no measurement; a kind of group never seen is expected to be as fast as the
others on average.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from spotlight.scheduler.types import Filler, GroupKind, LeaseId, WorkerId

_NEWS = 0.3
"""Weight of the latest observation in a moving average."""
_TRAINERS_SLOWER_MAX = 1.5
"""Maximum expected slowdown of a GPU that also trains."""


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
    """Measured durations, by kind of group.

    Attributes:
        train_s: seconds the learner takes per sample; 0 until measured.
        filled_s: GPU-seconds by filler since last cleared.
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
        """A group starts a lease of ``steps`` denoising steps, summed over its rollouts.

        Args:
            fills: the group would idle without this work; False where the iteration waits for previews.
        """
        self._running[lease] = _Running(leader, kind, steps, now, filler, fills)

    def end(self, lease: LeaseId, now: float) -> None:
        """A lease is finished: update the pace."""
        running, spent_s = self._stop(lease, now)
        if running is not None and running.filler is not Filler.EXPLORATION and running.steps > 0:
            seen_s = spent_s / running.steps
            trains = running.filler is Filler.TRAINERS
            of, like = (running.kind, trains), (running.kind, not trains)
            known_s = self._step_s.get(of, self._step_s.get(like, seen_s))
            self._step_s[of] = known_s + _NEWS * (seen_s - known_s)

    def cut(self, lease: LeaseId, now: float) -> None:
        """End a lease unfinished: count the time filled, but no pace."""
        self._stop(lease, now)

    def promote(self, now: float) -> None:
        """The next iteration begins: its early rollouts stop counting as filler."""
        working: set[WorkerId] = set()
        for lease, running in self._running.items():
            if running.filler is Filler.NEXT:
                if running.leader not in working:  # else it was prefetched and has not begun
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
        """Count the time a lease filled; returns its duration in seconds."""
        # A prefetched lease begins when the group's previous one ends.
        spent_s = max(0.0, now - max(running.since_s, self._free_s.get(running.leader, 0.0)))
        if running.filler is not None and running.fills:
            self.fill(running.filler, spent_s * running.kind.degree)
        return spent_s

    def fill(self, filler: Filler, gpu_s: float) -> None:
        """Add GPU-seconds to a filler."""
        self.filled_s[filler] = self.filled_s.get(filler, 0.0) + gpu_s

    def forget(self, leader: WorkerId) -> None:
        """Forget a dissolved group and its unfinished leases."""
        self._free_s.pop(leader, None)
        for lease in [lease for lease, running in self._running.items() if running.leader == leader]:
            del self._running[lease]

    def trained(self, samples: int, seconds: float) -> None:
        """The learner trained a micro-batch."""
        seen_s = seconds / samples
        self.train_s += (_NEWS if self.train_s else 1.0) * (seen_s - self.train_s)

    def step_s(self, kind: GroupKind, *, trains: bool = False) -> float | None:
        """Expected seconds of a group per denoising step of one rollout; None before any measurement.

        Args:
            trains: its GPUs also train: leases and batches are smaller there.
        """
        known = self._step_s
        own_s, like_s = known.get((kind, trains)), known.get((kind, not trains))
        if own_s is None:
            return like_s if like_s is not None or not known else sum(known.values()) / len(known)
        # Trainers measured as too slow get no rollouts and so would never be measured again.
        return min(own_s, _TRAINERS_SLOWER_MAX * like_s) if trains and like_s is not None else own_s
