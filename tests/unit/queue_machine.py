"""The pull queue beside a model so simple that it is obviously right; hypothesis chooses what happens."""

from __future__ import annotations

from dataclasses import dataclass

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from spotlight.scheduler.cluster.queue import CommitVerdict, PullQueue
from spotlight.scheduler.types import Lease, LeaseId, PolicyVersion, Purpose, Rollout, RolloutId, WorkerId
from spotlight_rewards.base.prompts import PromptId

LEASE_S = 10.0
ATTEMPTS = 2
WORKERS = [WorkerId(name) for name in ("a", "b", "c")]
RANK = {Purpose.TRAIN: 0, Purpose.EVAL: 1, Purpose.EXPLORE: 2}


def make_rollout(number: int, purpose: Purpose = Purpose.TRAIN, steps: int = 4, version: int = 0) -> Rollout:
    return Rollout(
        RolloutId(f"r{number}"), purpose, 0, PromptId("p"), number, number, steps, PolicyVersion(version)
    )


@dataclass
class Modelled:
    """What must be true of one rollout."""

    rollout: Rollout
    order: int
    step: int = 0
    failures: int = 0
    holder: LeaseId | None = None
    ends: int = 0

    def sort_key(self) -> tuple[int, bool, int, int]:
        return RANK[self.rollout.purpose], self.step == 0, self.step - self.rollout.steps, self.order


class QueueMachine(RuleBasedStateMachine):
    """Pulls, commits, completions, failures, duplicates, zombies, expiry, workers that leave and return."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.queue = PullQueue(LEASE_S)
        self.known: dict[RolloutId, Modelled] = {}
        self.epochs: dict[WorkerId, int] = {}
        self.present: set[WorkerId] = set()
        self.leases: list[Lease] = []
        self.deadlines: dict[LeaseId, float] = {}
        self.starts: dict[LeaseId, dict[RolloutId, int]] = {}
        self.made: dict[LeaseId, int] = {}
        self.sent: list[tuple[Lease, RolloutId, int]] = []
        self.forgotten: set[RolloutId] = set()

    # -- what can happen -------------------------------------------------------------------------------

    @rule(purpose=st.sampled_from(list(Purpose)), steps=st.integers(2, 6), version=st.integers(0, 1))
    def add(self, purpose: Purpose, steps: int, version: int) -> None:
        rollout = make_rollout(len(self.known), purpose, steps, version)
        self.queue.add([rollout])
        self.known[rollout.id] = Modelled(rollout, len(self.known))

    @rule(worker=st.sampled_from(WORKERS))
    def join(self, worker: WorkerId) -> None:
        epoch = self.queue.admit(worker)
        assert epoch > self.epochs.get(worker, 0), "an epoch came back"
        self.epochs[worker] = epoch
        self.present.add(worker)
        self._revoke({lease.id for lease in self.leases if lease.worker == worker})

    @rule(worker=st.sampled_from(WORKERS))
    def leave(self, worker: WorkerId) -> None:
        self.queue.release(worker)
        self.present.discard(worker)
        requeued = self._revoke({x.id for x in self.leases if x.worker == worker})
        assert all(map(self.queue.waits, requeued))

    @rule(seconds=st.sampled_from([1.0, 4.0, LEASE_S]))
    def wait(self, seconds: float) -> None:
        self.now += seconds
        late = {i for i, at in self.deadlines.items() if at <= self.now}
        assert {lease.id for lease in self.queue.expire(self.now)} == late
        self._revoke(late)

    @precondition(lambda self: self.epochs)
    @rule(data=st.data(), capacity=st.integers(1, 4))
    def pull(self, data: st.DataObject, capacity: int) -> None:
        worker = data.draw(st.sampled_from(sorted(self.epochs)))
        granted = self.queue.pull(worker, capacity, self.now)
        expected = self._next(capacity) if worker in self.present else []
        if granted is None:
            assert not expected, "work waits but was not granted"
            return
        lease, rollouts, resume = granted
        assert list(rollouts) == [entry.rollout for entry in expected]
        assert resume == {entry.rollout.id: entry.step for entry in expected if entry.step}
        assert lease.epoch == self.epochs[worker]
        assert lease.deadline_s == self.now + LEASE_S
        assert lease.id not in {known.id for known in self.leases}, "a lease number came back"
        self.leases.append(lease)
        self.starts[lease.id] = {entry.rollout.id: entry.step for entry in expected}
        self.deadlines[lease.id] = lease.deadline_s
        for entry in expected:
            entry.holder = lease.id

    @precondition(lambda self: self.leases)
    @rule(data=st.data(), steps=st.integers(0, 7), wrong=st.sampled_from([0, 0, 0, 1]))
    def advance(self, data: st.DataObject, steps: int, wrong: int) -> None:
        """A whole lease is safe ``steps`` steps after it began."""
        lease = data.draw(st.sampled_from(self.leases[-3:]))
        open_now = [entry for entry in self.known.values() if entry.holder == lease.id]
        verdict = self.queue.advance(lease.id, lease.epoch + wrong, steps, self.now)
        if not open_now or wrong:
            assert verdict is CommitVerdict.STALE_EPOCH
        else:
            safe = {entry.rollout.id: self.starts[lease.id][entry.rollout.id] + steps for entry in open_now}
            newer = [e for e in open_now if e.step < safe[e.rollout.id] < e.rollout.steps]
            if steps <= self.made.get(lease.id, 0) and not newer:
                assert verdict is CommitVerdict.DUPLICATE
                return
            assert verdict is CommitVerdict.ACCEPTED
            self.made[lease.id] = max(steps, self.made.get(lease.id, 0))
            self.deadlines[lease.id] = self.now + LEASE_S
            for entry in newer:
                entry.step = safe[entry.rollout.id]

    @precondition(lambda self: self.leases)
    @rule(data=st.data())
    def renounce(self, data: st.DataObject) -> None:
        lease = data.draw(st.sampled_from(self.leases[-3:]))
        self.queue.renounce(lease.id)
        assert all(map(self.queue.waits, self._revoke({lease.id})))

    @precondition(lambda self: self.leases)
    @rule(data=st.data())
    def grant_again(self, data: st.DataObject) -> None:
        lease = data.draw(st.sampled_from(self.leases[-3:]))
        held = {name: entry for name, entry in self.known.items() if entry.holder == lease.id}
        if held:
            again, rollouts, resume = self.queue.granted(lease.id)
            assert again == lease
            assert {rollout.id for rollout in rollouts} == set(held)
            assert resume == {name: step for name in held if (step := self.starts[lease.id][name])}

    @precondition(lambda self: self.known)
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        names = data.draw(st.lists(st.sampled_from(list(self.known)), unique=True, max_size=3))
        holders = {self.known[name].holder for name in names} - {None}
        emptied = self.queue.cancel(names)
        for name in names:
            if not self.known[name].ends:
                self._end(name)
        still = {entry.holder for entry in self.known.values()}
        assert {lease.id for lease in emptied} == {holder for holder in holders if holder not in still}

    @precondition(lambda self: self.leases)
    @rule(data=st.data())
    def complete(self, data: st.DataObject) -> None:
        lease, rollout, epoch = self._message(data)
        verdict = self.queue.complete(lease.id, epoch, rollout)
        assert verdict is self._verdict(lease, rollout, epoch)
        if verdict is CommitVerdict.ACCEPTED:
            self._end(rollout)

    @precondition(lambda self: self.leases)
    @rule(data=st.data())
    def fail(self, data: st.DataObject) -> None:
        lease, rollout, epoch = self._message(data)
        verdict, given_up = self.queue.fail(lease.id, epoch, rollout, ATTEMPTS)
        assert verdict is self._verdict(lease, rollout, epoch)
        entry = self.known[rollout]
        if verdict is not CommitVerdict.ACCEPTED:
            assert not given_up
            return
        entry.failures += 1
        assert given_up == (entry.failures >= ATTEMPTS)
        if given_up:
            self._end(rollout)
        else:
            entry.step, entry.holder = 0, None
            self._forget_empty_leases()

    @precondition(lambda self: sum(entry.ends for entry in self.known.values()) >= 4)
    @rule()
    def forget_done(self) -> None:
        self.queue.forget_done()
        self.forgotten |= {name for name, entry in self.known.items() if entry.ends}

    # -- what must hold --------------------------------------------------------------------------------

    @invariant()
    def agrees(self) -> None:
        self.queue.check()
        assert self.queue.outstanding == sum(not entry.ends for entry in self.known.values())
        waiting = [entry for entry in self.known.values() if not entry.ends and entry.holder is None]
        assert self.queue.waiting == len(waiting)
        for purpose in Purpose:
            outstanding = [e for e in self.known.values() if not e.ends and e.rollout.purpose is purpose]
            assert self.queue.outstanding_for(purpose) == len(outstanding)
        assert self.queue.next_deadline_s == min(self.deadlines.values(), default=None)
        assert self.queue._present == self.present

    def teardown(self) -> None:
        """Nothing is lost: one worker that lives long enough ends everything, in the order of value."""
        self.wait(100 * LEASE_S)
        self.join(WORKERS[0])
        while (granted := self.queue.pull(WORKERS[0], 3, self.now)) is not None:
            lease, rollouts, _ = granted
            assert list(rollouts) == [entry.rollout for entry in self._next(3)]
            for rollout in rollouts:
                assert self.queue.complete(lease.id, lease.epoch, rollout.id) is CommitVerdict.ACCEPTED
                self._end(rollout.id)
        assert all(entry.ends == 1 for entry in self.known.values()), "a rollout was lost or done twice"
        assert self.queue.outstanding == 0

    # -- the model -------------------------------------------------------------------------------------

    def _message(self, data: st.DataObject) -> tuple[Lease, RolloutId, int]:
        """What a worker of any time may send: mostly honest, perhaps late, twice, or to a wrong lease."""
        if self.sent and data.draw(st.integers(0, 3)) == 0:
            return self.sent[-1]
        lease = data.draw(st.sampled_from(self.leases[-2:] * 3 + self.leases))
        rollout = data.draw(st.sampled_from(list(lease.rollouts) * 4 + list(self.known)))
        self.sent.append((lease, rollout, lease.epoch + data.draw(st.sampled_from([0, 0, 0, 0, -1, 1]))))
        return self.sent[-1]

    def _verdict(self, lease: Lease, rollout: RolloutId, epoch: int) -> CommitVerdict:
        entry = self.known[rollout]
        if entry.ends:
            return CommitVerdict.UNKNOWN if rollout in self.forgotten else CommitVerdict.DUPLICATE
        honest = entry.holder == lease.id and epoch == lease.epoch
        return CommitVerdict.ACCEPTED if honest else CommitVerdict.STALE_EPOCH

    def _next(self, capacity: int) -> list[Modelled]:
        waiting = [entry for entry in self.known.values() if not entry.ends and entry.holder is None]
        waiting.sort(key=Modelled.sort_key)
        taken: list[Modelled] = []
        for entry in waiting[:capacity]:
            kind = entry.rollout.purpose, entry.rollout.version
            if taken and kind != (taken[0].rollout.purpose, taken[0].rollout.version):
                break
            taken.append(entry)
        return taken

    def _end(self, rollout: RolloutId) -> None:
        self.known[rollout].ends += 1
        self.known[rollout].holder = None
        self._forget_empty_leases()

    def _revoke(self, leases: set[LeaseId]) -> list[RolloutId]:
        revoked = [entry for entry in self.known.values() if entry.holder in leases]
        for entry in revoked:
            entry.holder = None
        self._forget_empty_leases()
        return sorted(entry.rollout.id for entry in revoked)

    def _forget_empty_leases(self) -> None:
        held = {entry.holder for entry in self.known.values()}
        self.deadlines = {lease: at for lease, at in self.deadlines.items() if lease in held}
