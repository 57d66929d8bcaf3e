"""The pull queue: which rollout a worker gets, and whether its result still counts.

Invariants
    1. A rollout is in exactly one place: waiting, under one lease, or done.
    2. A commit or completion counts only under the current lease with its epoch: a fenced worker (lease
       expired, node lost) cannot write.
    3. Completion is idempotent; a second one is reported as a duplicate.

Pull order: :class:`WorkClass`, then resumed rollouts, then most steps remaining, then FIFO. Nothing starves:
an iteration ends only when its train and evaluation rollouts are done, the next one's are then promoted, and
previews end with their window.

Every operation costs O(log n) per rollout touched.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import IntEnum, StrEnum

from spotlight.scheduler.cluster.answer_limits import AnswerLimits
from spotlight.scheduler.cluster.commands import Alarms
from spotlight.scheduler.types import Lease, LeaseId, PolicyVersion, Purpose, Rollout, RolloutId, WorkerId


class WorkClass(IntEnum):
    """Priority classes, highest first. An optimizer step waits for the first two."""

    TRAIN = 0
    EVAL = 1
    NEXT = 2
    """Rollouts of the next iteration."""
    EXPLORE = 3


_VALUE = {Purpose.TRAIN: WorkClass.TRAIN, Purpose.EVAL: WorkClass.EVAL, Purpose.EXPLORE: WorkClass.EXPLORE}


class CommitVerdict(StrEnum):
    """Whether a commit counts."""

    ACCEPTED = "accepted"
    DUPLICATE = "duplicate"
    STALE_EPOCH = "stale_epoch"
    UNKNOWN = "unknown"


@dataclass(slots=True)
class _QueuedRollout:
    rollout: Rollout
    value: WorkClass
    order: int
    step: int = 0
    lease: LeaseId | None = None
    failures: int = 0


@dataclass(slots=True)
class _OpenLease:
    """``start``: each rollout's step when granted; ``steps``: taken since then; ``reported_s``: last news."""

    lease: Lease
    open: dict[RolloutId, None]
    start: dict[RolloutId, int]
    reported_s: float
    steps: int = 0


@dataclass(slots=True)
class PullQueue:
    """Waiting and leased rollouts. Pure: ``now`` is in seconds, any origin, non-decreasing.

    Attributes:
        lease_s: a lease not renewed for this long expires, unless ``limits`` give its worker longer.
        term: incarnation of the controller; epochs of different terms never coincide.
        leases_granted: also the id of the latest lease.
    """

    lease_s: float
    term: int = 0
    leases_granted: int = 0
    limits: AnswerLimits = field(default_factory=AnswerLimits)
    _entries: dict[RolloutId, _QueuedRollout] = field(default_factory=dict)
    _done: set[RolloutId] = field(default_factory=set)
    _heap: list[tuple[int, int, int, int, RolloutId]] = field(default_factory=list)
    _held: dict[LeaseId, _OpenLease] = field(default_factory=dict)
    _by_worker: dict[WorkerId, dict[LeaseId, None]] = field(default_factory=dict)
    _deadlines: Alarms[LeaseId] = field(default_factory=Alarms)
    _outstanding: Counter[WorkClass] = field(default_factory=Counter)
    _waiting: Counter[WorkClass] = field(default_factory=Counter)
    _epochs: dict[WorkerId, int] = field(default_factory=dict)
    _present: set[WorkerId] = field(default_factory=set)
    _issued: int = 0
    _admitted: int = 0

    # -- work in ---------------------------------------------------------------------------------------

    def add(
        self,
        rollouts: Iterable[Rollout],
        steps: Mapping[RolloutId, int] | None = None,
        value: WorkClass | None = None,
    ) -> None:
        """Queue new rollouts, to resume at ``steps`` (default 0), in class ``value`` (default: by purpose).

        Raises:
            ValueError: a rollout id was queued before.
        """
        for rollout in rollouts:
            if rollout.id in self._entries or rollout.id in self._done:
                raise ValueError(f"rollout {rollout.id} was queued before")
            self._issued += 1
            worth = _VALUE[rollout.purpose] if value is None else value
            entry = _QueuedRollout(rollout, worth, self._issued, (steps or {}).get(rollout.id, 0))
            self._entries[rollout.id] = entry
            self._outstanding[worth] += 1
            self._push(entry)

    def promote(self) -> None:
        """Begin the next iteration: class NEXT becomes TRAIN."""
        for entry in self._entries.values():
            if entry.value is WorkClass.NEXT:
                self._outstanding[WorkClass.NEXT] -= 1
                self._outstanding[WorkClass.TRAIN] += 1
                entry.value = WorkClass.TRAIN
                if entry.lease is None:
                    self._waiting[WorkClass.NEXT] -= 1
                    self._push(entry)

    def cancel(self, rollouts: Iterable[RolloutId]) -> list[Lease]:
        """Remove rollouts wherever they are. Returns the leases left empty."""
        emptied: list[Lease] = []
        for rollout in rollouts:
            entry = self._entries.get(rollout)
            if entry is None:
                continue
            self._end(rollout)
            if entry.lease is None:
                self._waiting[entry.value] -= 1
            else:
                lease = self._held[entry.lease].lease
                self._close(lease.id, rollout)
                if lease.id not in self._held:
                    emptied.append(lease)
        return emptied

    def reset(self) -> tuple[list[Lease], dict[RolloutId, tuple[Rollout, int]]]:
        """Remove all work. Returns the revoked leases, and unfinished rollouts with their committed steps.

        Epochs and the lease counter stay, so nothing sent under an older lease counts.
        """
        leases = [held.lease for held in self._held.values()]
        unfinished = {entry.rollout.id: (entry.rollout, entry.step) for entry in self._entries.values()}
        for forgotten in (self._entries, self._done, self._held, self._by_worker, self._heap):
            forgotten.clear()
        self._deadlines.clear()
        self._outstanding.clear()
        self._waiting.clear()
        return leases, unfinished

    # -- workers ---------------------------------------------------------------------------------------

    def admit(self, worker: WorkerId) -> int:
        """Add a worker, voiding its older leases. Returns its new fencing epoch."""
        self.release(worker)
        self._present.add(worker)
        # One counter for all workers: a worker that served in several groups can tell which came later.
        self._admitted += 1
        self._epochs[worker] = first_epoch(self.term) + self._admitted
        return self._epochs[worker]

    def release(self, worker: WorkerId) -> None:
        """Remove a worker, voiding its leases: their rollouts are requeued."""
        self._present.discard(worker)
        self._revoke([self._held[lease] for lease in self._by_worker.get(worker, ())])

    def renounce(self, lease: LeaseId) -> None:
        """Void a lease, if it is unfinished: its rollouts are requeued."""
        self._revoke([self._held[lease]] if lease in self._held else [])

    def expire(self, now: float) -> list[Lease]:
        """Requeue rollouts of leases past their deadline. Returns these leases."""
        expired: list[_OpenLease] = []
        while (lease := self._deadlines.pop(now)) is not None:
            expired.append(self._held[lease])
            self.limits.expired(expired[-1].lease.worker)
        self._revoke(expired)
        return [held.lease for held in expired]

    def pull(
        self, worker: WorkerId, capacity: int, now: float
    ) -> tuple[Lease, tuple[Rollout, ...], dict[RolloutId, int]] | None:
        """Lease up to ``capacity`` rollouts of one class and one policy version, to be batched together.

        Returns:
            The lease, its rollouts and the non-zero steps to resume at; None when nothing waits, or when the
            worker was released and must rejoin.

        Raises:
            ValueError: the worker was never admitted, or ``capacity`` is below 1.
        """
        if worker not in self._epochs:
            raise ValueError(f"worker {worker} pulled without having joined")
        if capacity < 1:
            raise ValueError(f"worker {worker} pulled {capacity} rollouts; expected at least 1")
        if worker not in self._present:
            return None
        taken: list[_QueuedRollout] = []
        while len(taken) < capacity and (entry := self._peek()) is not None:
            if taken and _kind(entry) != _kind(taken[0]):
                break
            heapq.heappop(self._heap)
            self._waiting[entry.value] -= 1
            taken.append(entry)
        if not taken:
            return None
        self.leases_granted += 1
        ids = tuple(entry.rollout.id for entry in taken)
        self.limits.works_on(worker, self.count_held_by(worker) + len(ids))
        deadline_s = now + self.limits.limit_s(worker, self.lease_s)
        lease = Lease(LeaseId(self.leases_granted), worker, self._epochs[worker], ids, deadline_s)
        for entry in taken:
            entry.lease = lease.id
        start = {entry.rollout.id: entry.step for entry in taken}
        self._held[lease.id] = _OpenLease(lease, dict.fromkeys(ids), start, now)
        self._by_worker.setdefault(worker, {})[lease.id] = None
        self._deadlines.set(lease.id, lease.deadline_s)
        return self.granted(lease.id)

    # -- work back -------------------------------------------------------------------------------------

    def advance(self, lease: LeaseId, epoch: int, steps: int, now: float) -> CommitVerdict:
        """Record a lease's open rollouts as durable ``steps`` steps after its start; renew the lease.

        A rollout that would reach its end keeps its step: it is finished, only the completion was lost, and
        no intermediate state was committed.
        """
        held = self._held.get(lease)
        if held is None or held.lease.epoch != epoch:
            return CommitVerdict.STALE_EPOCH
        news = steps > held.steps
        held.steps = max(steps, held.steps)
        for rollout in held.open:
            entry, safe = self._entries[rollout], held.start[rollout] + steps
            # Messages arrive out of order: an older one can still advance a rollout the newer one
            # could not (it would have been past its end).
            if entry.step < safe < entry.rollout.steps:
                entry.step, news = safe, True
        if not news:
            return CommitVerdict.DUPLICATE
        self._extend(held, now, ends=False)
        return CommitVerdict.ACCEPTED

    def complete(self, lease: LeaseId, epoch: int, rollout: RolloutId) -> CommitVerdict:
        """Finish a rollout. Idempotent."""
        verdict = self._check(lease, epoch, rollout)
        if verdict is CommitVerdict.ACCEPTED:
            self._close(lease, rollout)
            self._end(rollout)
        return verdict

    def renew(self, lease: LeaseId, epoch: int, now: float) -> None:
        """Rollouts are finished: extend their lease's deadline, if still held under ``epoch``."""
        if (held := self._held.get(lease)) is not None and held.lease.epoch == epoch:
            self._extend(held, now, ends=True)

    def fail(
        self, lease: LeaseId, epoch: int, rollout: RolloutId, attempts: int
    ) -> tuple[CommitVerdict, bool]:
        """Requeue a failed rollout from step 0, or give it up at the ``attempts``-th failure.

        Returns:
            The verdict, and whether the rollout was given up.
        """
        verdict = self._check(lease, epoch, rollout)
        if verdict is not CommitVerdict.ACCEPTED:
            return verdict, False
        self._close(lease, rollout)
        entry = self._entries[rollout]
        entry.failures += 1
        if entry.failures >= attempts:
            self._end(rollout)
            return verdict, True
        entry.step, entry.lease = 0, None
        self._push(entry)
        return verdict, False

    def forget_done(self) -> None:
        """Drop the ids of finished rollouts; their late duplicates become UNKNOWN."""
        self._done.clear()

    # -- views -----------------------------------------------------------------------------------------

    @property
    def outstanding(self) -> int:
        """Rollouts waiting or leased."""
        return len(self._entries)

    @property
    def waiting(self) -> int:
        """Rollouts not leased."""
        return self._waiting.total()

    def waiting_of(self, *values: WorkClass) -> int:
        """Rollouts of these classes not leased."""
        return sum(self._waiting[value] for value in values)

    def step_of(self, rollout: RolloutId) -> int:
        """Last committed step of an outstanding rollout."""
        return self._entries[rollout].step

    def waits(self, rollout: RolloutId) -> bool:
        """Whether a rollout is queued and not leased."""
        return rollout in self._entries and self._entries[rollout].lease is None

    @property
    def best(self) -> WorkClass | None:
        """Class of the next rollout to be pulled; None when nothing waits."""
        entry = self._peek()
        return None if entry is None else entry.value

    def outstanding_of(self, *values: WorkClass) -> int:
        """Rollouts of these classes, waiting or leased."""
        return sum(self._outstanding[value] for value in values)

    def outstanding_for(self, purpose: Purpose) -> int:
        """Rollouts of one purpose, waiting or leased, without the next iteration's."""
        return self._outstanding[_VALUE[purpose]]

    def held_by(self, worker: WorkerId) -> list[tuple[Lease, int]]:
        """A worker's open leases, each with its maximum of steps remaining."""
        return [
            (self._held[lease].lease, max(self._remaining(rollout) for rollout in self._held[lease].open))
            for lease in self._by_worker.get(worker, ())
        ]

    def holds(self, worker: WorkerId) -> bool:
        """Whether a worker has an open lease."""
        return worker in self._by_worker

    def holds_other_than(self, worker: WorkerId, but: PolicyVersion) -> bool:
        """Whether a worker holds rollouts of another version."""
        leases = (self._held[lease] for lease in self._by_worker.get(worker, ()))
        return any(self._entries[next(iter(held.open))].rollout.version != but for held in leases)

    def is_open(self, lease: LeaseId) -> bool:
        """Whether a lease has unfinished rollouts and was not revoked."""
        return lease in self._held

    @property
    def previews_held(self) -> int:
        """Number of previews under lease."""
        return self._outstanding[WorkClass.EXPLORE] - self._waiting[WorkClass.EXPLORE]

    def previews(self) -> list[Lease]:
        """Open leases of previews, youngest first: revoking these loses least."""
        if not self.previews_held:
            return []
        held = [one.lease for one in self._held.values() if self.purpose_of(one.lease.id) is Purpose.EXPLORE]
        return sorted(held, key=lambda lease: -lease.id)

    def purpose_of(self, lease: LeaseId) -> Purpose:
        """Purpose of an open lease; all its rollouts share it."""
        return self._entries[next(iter(self._held[lease].open))].rollout.purpose

    def count_held_by(self, worker: WorkerId, *, previews: bool = True) -> int:
        """Open rollouts over a worker's leases; ``previews=False`` excludes previews."""
        leases = self._by_worker.get(worker, ())
        counted = [x for x in leases if previews or self.purpose_of(x) is not Purpose.EXPLORE]
        return sum(len(self._held[lease].open) for lease in counted)

    def granted(self, lease: LeaseId) -> tuple[Lease, tuple[Rollout, ...], dict[RolloutId, int]]:
        """An open lease as it is granted, and again if the grant was lost.

        The steps are those of the grant, from which progress is counted, not the latest committed.
        """
        held = self._held[lease]
        rollouts = tuple(self._entries[rollout].rollout for rollout in held.open)
        return held.lease, rollouts, {name: held.start[name] for name in held.open if held.start[name]}

    @property
    def next_deadline_s(self) -> float | None:
        """When the next lease expires; None without leases."""
        return self._deadlines.next_s

    def check(self) -> None:
        """Assert the invariants above, in O(n)."""
        held = [rollout for lease in self._held.values() for rollout in lease.open]
        assert len(held) == len(set(held)), "a rollout is held by two leases"
        waiting = [item[-1] for item in self._heap if self._current(item)]
        assert +self._waiting == Counter(self._entries[name].value for name in waiting), "miscounted"
        assert +self._outstanding == Counter(entry.value for entry in self._entries.values())
        assert {x for leases in self._by_worker.values() for x in leases} == set(self._held)
        assert set(self._held) == set(self._deadlines.pending()), "a lease would never expire"
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

    def _extend(self, held: _OpenLease, now: float, *, ends: bool) -> None:
        worker = held.lease.worker
        self.limits.answered(worker, self.count_held_by(worker), held.reported_s, now, ends=ends)
        held.reported_s = now
        self._deadlines.set(held.lease.id, now + self.limits.limit_s(worker, self.lease_s))

    def _push(self, entry: _QueuedRollout) -> None:
        rollout = entry.rollout
        remaining = rollout.steps - entry.step
        item = (entry.value, 0 if entry.step else 1, -remaining, entry.order, rollout.id)
        heapq.heappush(self._heap, item)
        self._waiting[entry.value] += 1

    def _current(self, item: tuple[int, int, int, int, RolloutId]) -> bool:
        """Whether a heap item was neither cancelled nor promoted since."""
        entry = self._entries.get(item[-1])
        return entry is not None and (entry.value, entry.order) == (item[0], item[3])

    def _peek(self) -> _QueuedRollout | None:
        while self._heap and not self._current(self._heap[0]):
            heapq.heappop(self._heap)
        return self._entries[self._heap[0][-1]] if self._heap else None

    def _end(self, rollout: RolloutId) -> None:
        self._outstanding[self._entries.pop(rollout).value] -= 1
        self._done.add(rollout)

    def _remaining(self, rollout: RolloutId) -> int:
        entry = self._entries[rollout]
        return entry.rollout.steps - entry.step

    def _check(self, lease: LeaseId, epoch: int, rollout: RolloutId) -> CommitVerdict:
        if rollout in self._done:
            return CommitVerdict.DUPLICATE
        entry = self._entries.get(rollout)
        if entry is None:
            return CommitVerdict.UNKNOWN
        held = self._held.get(lease)
        if held is None or entry.lease != lease or held.lease.epoch != epoch:
            return CommitVerdict.STALE_EPOCH
        return CommitVerdict.ACCEPTED

    def _close(self, lease: LeaseId, rollout: RolloutId) -> None:
        held = self._held[lease]
        held.open.pop(rollout, None)
        if not held.open:
            self._forget(held.lease)

    def _forget(self, lease: Lease) -> None:
        del self._held[lease.id]
        self._deadlines.cancel(lease.id)
        leases = self._by_worker[lease.worker]
        del leases[lease.id]
        if not leases:
            del self._by_worker[lease.worker]

    def _revoke(self, leases: list[_OpenLease]) -> None:
        for held in leases:
            self._forget(held.lease)
            for rollout in held.open:
                entry = self._entries[rollout]
                entry.lease = None
                self._push(entry)


def first_epoch(term: int) -> int:
    """Exclusive lower bound of a term's epochs; a term issues far fewer than 2**30."""
    return term << 30


def _kind(entry: _QueuedRollout) -> tuple[WorkClass, int]:
    return entry.value, entry.rollout.version
