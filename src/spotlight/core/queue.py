"""The pull queue: which rollout a pulling worker gets, and whether what it sends back still counts.

Invariants
    1. A rollout is in exactly one place: waiting, held by one lease, or done.
    2. A commit or completion counts only under the lease that holds the rollout NOW, with the epoch that
       lease was granted under: a worker that was given up (lease expired, node lost) cannot write.
    3. Completing twice changes nothing (the second is reported as a duplicate).

Order of pulls: by purpose (train, evaluation, exploration), then resumed rollouts, then the longest
remaining, then first come. Ready work is one heap, so pulls and completions are O(log n).
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import StrEnum

from spotlight.core.types import Lease, LeaseId, Purpose, Rollout, RolloutId, WorkerId

_VALUE = {Purpose.TRAIN: 0, Purpose.EVAL: 1, Purpose.EXPLORE: 2}


class Verdict(StrEnum):
    """Whether a commit counts."""

    ACCEPTED = "accepted"
    DUPLICATE = "duplicate"
    STALE_EPOCH = "stale_epoch"
    UNKNOWN = "unknown"


@dataclass(slots=True)
class _Entry:
    rollout: Rollout
    order: int
    step: int = 0
    lease: LeaseId | None = None
    failures: int = 0


@dataclass(slots=True)
class _Held:
    lease: Lease
    open: set[RolloutId]
    deadline_s: float


@dataclass(slots=True)
class PullQueue:
    """Rollouts waiting and held. Pure: time comes in as ``now`` (seconds, any origin, never backwards).

    Attributes:
        lease_s: a lease not renewed by a commit for this long expires.
        leases_granted: so far; the next lease's number is one more.
    """

    lease_s: float
    leases_granted: int = 0
    _entries: dict[RolloutId, _Entry] = field(default_factory=dict)
    _done: set[RolloutId] = field(default_factory=set)
    _heap: list[tuple[int, int, int, int, RolloutId]] = field(default_factory=list)
    _held: dict[LeaseId, _Held] = field(default_factory=dict)
    _epochs: dict[WorkerId, int] = field(default_factory=dict)
    _present: set[WorkerId] = field(default_factory=set)
    _issued: int = 0

    # -- work in ---------------------------------------------------------------------------------------

    def add(self, rollouts: Iterable[Rollout]) -> None:
        """Queue new rollouts. Raises ValueError for an id that was queued before."""
        for rollout in rollouts:
            if rollout.id in self._entries or rollout.id in self._done:
                raise ValueError(f"rollout {rollout.id} was queued before")
            self._issued += 1
            entry = self._entries[rollout.id] = _Entry(rollout, self._issued)
            self._push(entry)

    # -- workers ---------------------------------------------------------------------------------------

    def admit(self, worker: WorkerId) -> int:
        """A worker joins (again): its older leases are void. Returns its new fencing epoch."""
        self.release(worker)
        self._present.add(worker)
        self._epochs[worker] = self._epochs.get(worker, 0) + 1
        return self._epochs[worker]

    def release(self, worker: WorkerId) -> list[RolloutId]:
        """A worker is gone: requeue what it held (the result); nothing it still sends counts."""
        self._present.discard(worker)
        return self._revoke([held for held in self._held.values() if held.lease.worker == worker])

    def expire(self, now: float) -> list[RolloutId]:
        """Requeue rollouts of leases past their deadline. Returns what was requeued."""
        return self._revoke([held for held in self._held.values() if held.deadline_s <= now])

    def pull(
        self, worker: WorkerId, capacity: int, now: float
    ) -> tuple[Lease, tuple[Rollout, ...], dict[RolloutId, int]] | None:
        """Lease up to ``capacity`` rollouts of one purpose to a worker.

        A lease holds one purpose and one policy version, so that its rollouts can share forwards.

        Returns:
            The lease, its rollouts and the steps to resume at; None when nothing waits, or when the worker
            was given up meanwhile (it must join again).

        Raises:
            ValueError: the worker was never admitted, or asks for less than one rollout.
        """
        if worker not in self._epochs:
            raise ValueError(f"worker {worker} pulled without having joined")
        if capacity < 1:
            raise ValueError(f"worker {worker} pulled {capacity} rollouts; expected at least 1")
        if worker not in self._present:
            return None
        taken: list[_Entry] = []
        while len(taken) < capacity and (entry := self._peek()) is not None:
            if taken and _kind(entry.rollout) != _kind(taken[0].rollout):
                break
            heapq.heappop(self._heap)
            taken.append(entry)
        if not taken:
            return None
        self.leases_granted += 1
        rollouts = tuple(entry.rollout for entry in taken)
        ids = tuple(rollout.id for rollout in rollouts)
        lease = Lease(LeaseId(self.leases_granted), worker, self._epochs[worker], ids, now + self.lease_s)
        for entry in taken:
            entry.lease = lease.id
        self._held[lease.id] = _Held(lease, set(ids), lease.deadline_s)
        return lease, rollouts, {entry.rollout.id: entry.step for entry in taken if entry.step}

    # -- work back -------------------------------------------------------------------------------------

    def commit(self, lease: LeaseId, epoch: int, rollout: RolloutId, step: int, now: float) -> Verdict:
        """Progress up to ``step`` is safe. Renews the lease; a step committed before is a duplicate."""
        verdict = self._check(lease, epoch, rollout)
        if verdict is not Verdict.ACCEPTED:
            return verdict
        entry = self._entries[rollout]
        if not entry.step < step < entry.rollout.steps:
            return Verdict.DUPLICATE if step <= entry.step else Verdict.UNKNOWN
        entry.step = step
        self._held[lease].deadline_s = now + self.lease_s
        return Verdict.ACCEPTED

    def complete(self, lease: LeaseId, epoch: int, rollout: RolloutId) -> Verdict:
        """A rollout is finished; counts once."""
        verdict = self._check(lease, epoch, rollout)
        if verdict is Verdict.ACCEPTED:
            self._close(lease, rollout)
            del self._entries[rollout]
            self._done.add(rollout)
        return verdict

    def fail(self, lease: LeaseId, epoch: int, rollout: RolloutId, attempts: int) -> tuple[Verdict, bool]:
        """A rollout could not be finished: requeue it from its start, or give it up after ``attempts``.

        Returns:
            The verdict, and whether the rollout was given up.
        """
        verdict = self._check(lease, epoch, rollout)
        if verdict is not Verdict.ACCEPTED:
            return verdict, False
        self._close(lease, rollout)
        entry = self._entries[rollout]
        entry.failures += 1
        if entry.failures >= attempts:
            del self._entries[rollout]
            self._done.add(rollout)
            return verdict, True
        entry.step, entry.lease = 0, None
        self._push(entry)
        return verdict, False

    def forget_done(self) -> None:
        """Drop the memory of finished rollouts (their late duplicates then count as unknown)."""
        self._done.clear()

    # -- views -----------------------------------------------------------------------------------------

    @property
    def outstanding(self) -> int:
        """Rollouts waiting or held."""
        return len(self._entries)

    def outstanding_for(self, purpose: Purpose) -> int:
        """Rollouts of one purpose that wait or are held."""
        return sum(entry.rollout.purpose is purpose for entry in self._entries.values())

    @property
    def workers(self) -> frozenset[WorkerId]:
        """Workers that joined and were not given up."""
        return frozenset(self._present)

    @property
    def next_deadline_s(self) -> float | None:
        """When the next lease expires."""
        return min((held.deadline_s for held in self._held.values()), default=None)

    def check(self) -> None:
        """Assert the invariants of the module's docstring (O(n))."""
        held = [rollout for lease in self._held.values() for rollout in lease.open]
        assert len(held) == len(set(held)), "a rollout is held by two leases"
        waiting = [item[-1] for item in self._heap]
        assert len(waiting) == len(set(waiting)), "a rollout waits twice"
        assert set(held).isdisjoint(waiting), "a rollout both waits and is held"
        assert set(held) | set(waiting) == set(self._entries), "a rollout is neither waiting nor held"
        assert self._done.isdisjoint(self._entries), "a finished rollout is still queued"
        for entry in self._entries.values():
            assert 0 <= entry.step < entry.rollout.steps, "a committed step outside the rollout"
            assert entry.lease is None or entry.lease in self._held, (
                "a rollout is held by a lease that is gone"
            )
        for lease in self._held.values():
            assert lease.lease.worker in self._present, "a worker that is gone holds a lease"
            assert lease.open, "an empty lease was kept"
            assert all(self._entries[rollout].lease == lease.lease.id for rollout in lease.open)
            assert self._epochs[lease.lease.worker] == lease.lease.epoch, "a lease outlived its epoch"

    # -- inside ----------------------------------------------------------------------------------------

    def _push(self, entry: _Entry) -> None:
        rollout = entry.rollout
        remaining = rollout.steps - entry.step
        item = (_VALUE[rollout.purpose], 0 if entry.step else 1, -remaining, entry.order, rollout.id)
        heapq.heappush(self._heap, item)

    def _peek(self) -> _Entry | None:
        return self._entries[self._heap[0][-1]] if self._heap else None

    def _check(self, lease: LeaseId, epoch: int, rollout: RolloutId) -> Verdict:
        if rollout in self._done:
            return Verdict.DUPLICATE
        entry = self._entries.get(rollout)
        if entry is None:
            return Verdict.UNKNOWN
        held = self._held.get(lease)
        if held is None or entry.lease != lease or held.lease.epoch != epoch:
            return Verdict.STALE_EPOCH
        return Verdict.ACCEPTED

    def _close(self, lease: LeaseId, rollout: RolloutId) -> None:
        held = self._held[lease]
        held.open.discard(rollout)
        if not held.open:
            del self._held[lease]

    def _revoke(self, leases: list[_Held]) -> list[RolloutId]:
        requeued: list[RolloutId] = []
        for held in leases:
            del self._held[held.lease.id]
            for rollout in held.lease.rollouts:
                if rollout in held.open:
                    entry = self._entries[rollout]
                    entry.lease = None
                    self._push(entry)
                    requeued.append(rollout)
        return requeued


def _kind(rollout: Rollout) -> tuple[Purpose, int]:
    return rollout.purpose, rollout.version
