"""Every second of every slot is in one phase, whatever happens: on faulty runs, and by hand."""

from __future__ import annotations

import copy
import math
import random
import sqlite3
from collections import Counter, defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.simulation.check import CheckedSimulation
from tests.simulation.swarm import draw_trial

from spotlight.cluster.billing import (
    BILL_S_MAX,
    FLUSH_S,
    Billing,
    ClusterAccounts,
    changed_machines,
    slots_of,
)
from spotlight.runtime.observer import Observer
from spotlight.runtime.recorder import RunRecorder
from spotlight.scheduler import effects as ef
from spotlight.scheduler import events as ev
from spotlight.scheduler.records import CommitRejected
from spotlight.scheduler.types import (
    Lease,
    LeaseId,
    MicroBatch,
    Node,
    NodeId,
    NodeKind,
    Phase,
    PolicyVersion,
    Purpose,
    Rollout,
    RolloutId,
    WeightKind,
    WorkerId,
)
from spotlight.store.ledger import ledger_queries as queries
from spotlight.store.ledger.sqlite_ledger import GpuSpend, SqliteLedger
from spotlight_plan.simulation.virtual_workers import Receipt
from spotlight_rewards.base.prompts import PromptId


class Billed(CheckedSimulation):
    """A simulation with faults, billed as the head bills it, and by a simple account of who was there."""

    def __init__(self, seed: int) -> None:
        super().__init__(draw_trial(seed))
        self.dice = random.Random(seed)
        self._open()

    def _open(self) -> None:
        self.billing = Billing()
        self.present: dict[WorkerId, float] = {}
        self.there: Counter[WorkerId] = Counter()
        self.billed: defaultdict[WorkerId, float] = defaultdict(float)
        self.nodes_seen: dict[NodeId, Node] = {}
        self.looked_s = 0.0

    def observe(self, event: ev.Event, effects: list[ef.Effect], receipt: Receipt | None) -> None:
        super().observe(event, effects, receipt)
        for machine, parts in changed_machines(event, effects).items():
            for node_id in self.billing.nodes_on(machine):
                self._leave(node_id)
            for node in parts:
                self._come(node)
        self.billing.observe(event, effects, self.now)
        if self.dice.random() < 0.05:
            self.take(self.billing.take(self.now))
        if self.dice.random() < 0.02:
            self.look()

    def _come(self, node: Node) -> None:
        self.nodes_seen[node.id] = node
        self.present |= dict.fromkeys(slots_of(node), self.now)

    def _leave(self, node: NodeId) -> None:
        if (known := self.nodes_seen.pop(node, None)) is not None:
            for slot in slots_of(known):
                self.there[slot] += self.now - self.present.pop(slot)

    def take(self, spends: list[GpuSpend]) -> None:
        for spent in spends:
            assert spent.seconds > 0
            assert math.isfinite(spent.seconds)
            assert spent.price_usd_h >= 0
            self.billed[spent.worker] += spent.seconds

    def look(self) -> None:
        """At this moment: what was billed, and what would be if all ended now, is all there was."""
        billed = Counter(self.billed)
        for spent in copy.deepcopy(self.billing).finish(self.now):
            billed[spent.worker] += spent.seconds
        there = Counter(self.there)
        for slot, since_s in self.present.items():
            there[slot] += self.now - since_s
        for slot in billed.keys() | there.keys():
            assert billed[slot] == pytest.approx(there[slot], abs=1e-6), slot

    def restart_head(self, down_s: float) -> None:
        self.close()
        super().restart_head(down_s)
        self._open()

    def close(self) -> None:
        self.look()
        self.take(self.billing.finish(self.now))
        assert self.billing.finish(self.now) == []


@pytest.mark.parametrize("seed", range(30))
def test_each_second_once_whatever_happens(seed: int) -> None:
    simulation = Billed(seed)
    simulation.run()
    simulation.close()


# -- by hand -------------------------------------------------------------------------------------------

SPOT = Node(NodeId("s"), NodeKind.SPOT, 2, "H100", 7.2, False, True)
RESERVED = Node(NodeId("r"), NodeKind.RESERVED, 1, "H100", 5.0, True, False)
A, B, R = WorkerId("s/0"), WorkerId("s/1"), WorkerId("r/0")


def rollout(name: str, purpose: Purpose = Purpose.TRAIN) -> Rollout:
    return Rollout(RolloutId(name), purpose, 0, PromptId("p"), 0, 0, 8, PolicyVersion(0))


def grant(number: int, *rollouts: Rollout, epoch: int = 1) -> ef.GrantLease:
    return ef.GrantLease(
        Lease(LeaseId(number), A, epoch, tuple(each.id for each in rollouts), 99.0), rollouts, {}
    )


class Hand:
    """A billing at work on a group of two, with the time."""

    def __init__(self) -> None:
        self.billing, self.now = Billing(), 0.0
        self.feed(ev.NodeJoined(SPOT))
        self.feed(ev.NodeJoined(RESERVED))
        self.feed(ev.GroupFormed(A, 1), ef.FormGroup(A, 1, (A, B)))
        self.feed(ev.GroupFormed(A, 1))

    def feed(self, event: ev.Event, *effects: ef.Effect, after_s: float = 0.0) -> None:
        self.now += after_s
        self.billing.observe(event, effects, self.now)

    def bill(self) -> dict[tuple[WorkerId, Phase], float]:
        return {(spent.worker, spent.phase): spent.seconds for spent in self.billing.take(self.now)}

    def last_bill(self) -> dict[tuple[WorkerId, Phase], float]:
        spends: Counter[tuple[WorkerId, Phase]] = Counter()
        for spent in self.billing.finish(self.now):
            spends[spent.worker, spent.phase] += spent.seconds
        return dict(spends)

    def slot(self, worker: WorkerId) -> dict[Phase, float]:
        return {phase: seconds for (name, phase), seconds in self.last_bill().items() if name == worker}


def progressed(lease: int, epoch: int = 1, steps: int = 1) -> ev.LeaseProgressed:
    return ev.LeaseProgressed(A, LeaseId(lease), epoch, steps)


def idle_node(name: str, slots: int) -> Node:
    return Node(NodeId(name), NodeKind.SPOT, slots, "cpu", 0.0, False, False)


def opened(ledger: SqliteLedger, clock: Callable[[], float]) -> tuple[ClusterAccounts, RunRecorder]:
    ledger.begin_attempt(pid=1, host="h", workers={}, now_s=0.0)
    parts: Any = (None, {}, None, None, ledger, None, None, {}, None, 1, 16.0, None, 0.0, 0.0)
    return ClusterAccounts(clock, Observer()), RunRecorder(*parts)


@pytest.mark.parametrize(("slots", "bill_s"), [(8, FLUSH_S), (200, 20.0), (1000, BILL_S_MAX)])
def test_a_large_cluster_is_billed_more_rarely_and_its_records_written_as_often(
    tmp_path: Path, slots: int, bill_s: float
) -> None:
    """Every 5 s, bills of 1,000 idle slots were 17 million rows a day."""
    now_s, minutes, nothing = 0.0, 10, RolloutId("left")
    with SqliteLedger(tmp_path / "ledger.sqlite") as ledger:
        accounts, recorder = opened(ledger, lambda: now_s)
        accounts.observe(ev.NodeJoined(idle_node("spot-0", slots)), (), now_s, recorder)
        bills_s, records_s, written = [], [], 0
        while now_s < minutes * 60:
            before = (accounts.written_s, ledger.position())
            recorder.write(written := written + 1, CommitRejected(nothing, "late"))
            next_s = accounts.write_due(recorder)
            bills_s += [now_s] * (accounts.written_s != before[0])
            records_s += [now_s] * (ledger.position() != before[1])
            assert next_s > now_s
            now_s = next_s
        accounts.finish(recorder)
        billed_s = sum(queries.gpu_seconds_by_phase(ledger.connection).values())
    assert bills_s == [n * bill_s for n in range(1, int(minutes * 60 / bill_s))]
    assert records_s == [n * FLUSH_S for n in range(1, int(minutes * 60 / FLUSH_S))]
    assert billed_s == pytest.approx(minutes * 60 * slots)
    rows = sqlite3.connect(tmp_path / "ledger.sqlite").execute("SELECT COUNT(*) FROM gpu_seconds").fetchone()
    assert rows == (minutes * 60 / bill_s * slots,)


def test_a_node_that_is_lost_is_billed_alone(tmp_path: Path) -> None:
    now_s = 0.0
    with SqliteLedger(tmp_path / "ledger.sqlite") as ledger:
        accounts, recorder = opened(ledger, lambda: now_s)
        for name in ("spot-0", "spot-1"):
            accounts.observe(ev.NodeJoined(idle_node(name, 2)), (), now_s, recorder)
        now_s = 3.0
        accounts.observe(ev.NodeLost(NodeId("spot-0")), (), now_s, recorder)
        billed = "SELECT worker, seconds FROM gpu_seconds ORDER BY id"
        reader = sqlite3.connect(tmp_path / "ledger.sqlite")
        assert reader.execute(billed).fetchall() == [("spot-0/0", 3.0), ("spot-0/1", 3.0)]
        now_s = 5.0
        accounts.write_due(recorder)
        assert reader.execute(billed).fetchall()[2:] == [("spot-1/0", 5.0), ("spot-1/1", 5.0)]
        assert accounts.take_seconds() == {Phase.IDLE: 16.0}
        assert recorder.wall_s == 5.0
        reader.close()


def test_prices_are_those_of_a_slot() -> None:
    hand = Hand()
    hand.now = 3600.0
    assert {spent.worker: spent.price_usd_h for spent in hand.billing.finish(hand.now)} == {
        A: 3.6,
        B: 3.6,
        R: 5.0,
    }


def test_denoising_is_reported_once_it_is_accepted() -> None:
    hand = Hand()
    hand.feed(ev.TimePassed(), grant(1, rollout("x")))
    hand.now += 5
    assert A not in {slot for slot, _ in hand.bill()}, "it may still be lost"
    hand.feed(progressed(1), after_s=1)
    assert hand.bill()[A, Phase.ROLLOUT] == 6
    assert hand.slot(B) == {}


def test_what_follows_the_last_accepted_step_is_lost_with_the_node() -> None:
    hand = Hand()
    hand.feed(ev.TimePassed(), grant(1, rollout("x")))
    hand.feed(progressed(1), after_s=4)
    hand.feed(ev.NodeLost(SPOT.id), after_s=3)
    assert hand.slot(A) == {Phase.ROLLOUT: 4, Phase.LOST: 3}


def test_refused_progress_saves_nothing() -> None:
    hand = Hand()
    hand.feed(ev.TimePassed(), grant(1, rollout("x")))
    hand.feed(progressed(1), ef.AbandonLease(A, 1, LeaseId(1)), after_s=4)
    hand.feed(ev.TimePassed(), after_s=2)
    assert hand.slot(B) == {Phase.LOST: 4, Phase.IDLE: 2}


@pytest.mark.parametrize("stale", [progressed(1, epoch=2), progressed(9)])
def test_what_is_not_of_the_group_s_lease_saves_nothing(stale: ev.LeaseProgressed) -> None:
    hand = Hand()
    hand.feed(ev.TimePassed(), grant(1, rollout("x")))
    hand.feed(stale, after_s=4)
    assert hand.slot(A) == {Phase.LOST: 4}


def test_a_crashed_member_loses_its_own_seconds_only() -> None:
    hand = Hand()
    hand.feed(ev.TimePassed(), grant(1, rollout("x")))
    hand.feed(ev.WorkerCrashed(B, 1), ef.StopGroup(A, 1, (A,)), after_s=4)
    hand.feed(progressed(1), after_s=1)
    hand.feed(ev.GroupStopped(A, 1), after_s=1)
    hand.feed(ev.TimePassed(), after_s=2)
    bill = hand.last_bill()
    assert {phase: s for (slot, phase), s in bill.items() if slot == A} == {
        Phase.ROLLOUT: 5, Phase.LOST: 1, Phase.IDLE: 2
    }  # fmt: skip
    assert {phase: s for (slot, phase), s in bill.items() if slot == B} == {Phase.LOST: 4, Phase.SETUP: 4}


def test_a_group_is_in_the_phase_of_its_oldest_lease() -> None:
    hand = Hand()
    hand.feed(ev.TimePassed(), grant(1, rollout("x")))
    hand.feed(ev.TimePassed(), grant(2, rollout("y", Purpose.EVAL)), after_s=2)
    hand.feed(ev.LeaseCompleted(A, LeaseId(1), 1, (RolloutId("x"),), PolicyVersion(0)), after_s=3)
    hand.feed(ev.LeaseCompleted(A, LeaseId(2), 1, (RolloutId("y"),), PolicyVersion(0)), after_s=4)
    hand.feed(ev.TimePassed(), after_s=1)
    assert hand.slot(A) == {Phase.ROLLOUT: 5, Phase.EVALUATION: 4, Phase.IDLE: 1}


def test_a_grant_sent_again_and_a_completion_in_parts() -> None:
    hand = Hand()
    both = (rollout("x"), rollout("y"))
    hand.feed(ev.TimePassed(), grant(1, *both))
    hand.feed(ev.LeaseCompleted(A, LeaseId(1), 1, (RolloutId("x"),), PolicyVersion(0)), after_s=3)
    hand.feed(ev.TimePassed(), grant(1, both[1]), after_s=1)
    hand.feed(ev.LeaseCompleted(A, LeaseId(1), 1, (RolloutId("y"),), PolicyVersion(0)), after_s=1)
    hand.feed(ev.TimePassed(), after_s=1)
    assert hand.slot(A) == {Phase.ROLLOUT: 5, Phase.IDLE: 1}


def test_parts_of_a_batch_leave_the_learner_idle_between_them() -> None:
    hand = Hand()
    hand.feed(ev.RunStarted(), after_s=4)
    hand.bill()
    part = ef.PrepareBatch(0, (), {}, (), partial=True)
    micro_batch = ef.TrainMicroBatch(MicroBatch(0, 0, (), 4), 0)
    for _ in range(2):
        hand.feed(ev.TimePassed(), part, after_s=3)
        hand.feed(ev.BatchPrepared(0), micro_batch, after_s=1)
        hand.feed(ev.MicroBatchTrained(0, 0, 0), after_s=2)
    hand.feed(ev.TimePassed(), ef.StepOptimizer(0, 0, 4), after_s=3)
    hand.feed(ev.OptimizerStepped(0, 0, 0.0, 1.0), after_s=1)
    assert {k: v for k, v in hand.bill().items() if k[0] == R} == {(R, Phase.IDLE): 9}
    hand.feed(ev.LearnerLost("killed"))
    assert {k: v for k, v in hand.bill().items() if k[0] == R} == {(R, Phase.LOST): 7}


def test_training_counts_once_a_checkpoint_is_ordered_that_holds_it() -> None:
    hand = Hand()
    hand.feed(ev.RunStarted())
    train = ef.TrainMicroBatch(MicroBatch(0, 0, (), 0), 0)
    hand.feed(ev.BatchPrepared(0), train)
    hand.feed(ev.MicroBatchTrained(0, 0, 0), ef.StepOptimizer(0, 0, 0), after_s=5)
    hand.feed(ev.OptimizerStepped(0, 0, 0.0, 0.0), ef.PublishWeights(PolicyVersion(1)), after_s=1)
    hand.feed(ev.WeightsPublished(PolicyVersion(1)), ef.CommitCheckpoint(0, 0, {}), after_s=2)
    assert {k: v for k, v in hand.bill().items() if k[0] == R} == {
        (R, Phase.WEIGHT_SYNC): 2, (R, Phase.TRAINING): 6
    }  # fmt: skip
    committed, lost = copy.deepcopy(hand), hand
    committed.feed(ev.CheckpointCommitted(0), after_s=3)
    lost.feed(ev.LearnerLost("gone"), after_s=3)
    lost.feed(ev.LearnerRestored(1), after_s=7)
    assert committed.slot(R) == {Phase.CHECKPOINT: 3}
    assert lost.slot(R) == {Phase.CHECKPOINT: 3, Phase.SETUP: 7}  # the ledger takes the training back


def test_loading_all_weights_is_setup_and_an_adapter_is_not() -> None:
    hand = Hand()
    one = ef.PullWeights(A, 1, PolicyVersion(0), 0, WeightKind.FULL, None)
    hand.feed(ev.WorkerStarted(A, 1), one)
    hand.feed(ev.WeightsPulled(A, 1, PolicyVersion(0), 0), after_s=4)
    two = ef.PullWeights(A, 1, PolicyVersion(1), 0, WeightKind.ADAPTER, None)
    hand.feed(ev.TimePassed(), two)
    hand.feed(ev.PullFailed(A, 1, PolicyVersion(1), 0), after_s=2)
    hand.feed(ev.TimePassed(), after_s=1)
    assert hand.slot(A) == {Phase.SETUP: 4, Phase.WEIGHT_SYNC: 2, Phase.IDLE: 1}


def test_a_node_that_returns_before_its_loss_was_reported_loses_what_was_at_risk() -> None:
    hand = Hand()
    hand.feed(ev.TimePassed(), grant(1, rollout("x")))
    hand.feed(ev.NodeJoined(SPOT), after_s=4)
    hand.feed(progressed(1), after_s=1)
    assert hand.slot(A) == {Phase.LOST: 4, Phase.SETUP: 1}


# -- a GPU that trains and rolls out -----------------------------------------------------------------------

SHARED = Node(NodeId("b"), NodeKind.RESERVED, 1, "H100", 5.0, True, True)
T = WorkerId("b/0")


class SharedHand(Hand):
    """A billing at work on one GPU that holds a learner rank and a worker, both up."""

    def __init__(self) -> None:
        self.billing, self.now = Billing(), 0.0
        self.feed(ev.NodeJoined(SHARED))
        self.feed(ev.RunStarted())
        self.feed(ev.TimePassed(), ef.FormGroup(T, 1, (T,)))
        self.feed(ev.GroupFormed(T, 1))

    def rolls_out(self, lease: int, seconds: float) -> None:
        granted = Lease(LeaseId(lease), T, 1, (RolloutId("x"),), 99.0)
        self.feed(ev.TimePassed(), ef.GrantLease(granted, (rollout("x"),), {}))
        self.feed(
            ev.LeaseCompleted(T, LeaseId(lease), 1, (RolloutId("x"),), PolicyVersion(0)), after_s=seconds
        )

    def trains(self, seconds: float) -> None:
        self.feed(ev.TimePassed(), ef.TrainMicroBatch(MicroBatch(0, 0, (), 0), 0))
        self.feed(ev.MicroBatchTrained(0, 0, 0), after_s=seconds)


def test_each_second_of_a_shared_gpu_is_one_process_s() -> None:
    hand = SharedHand()
    hand.rolls_out(1, 3)
    hand.trains(4)
    hand.rolls_out(2, 5)
    hand.trains(6)
    hand.feed(ev.TimePassed(), after_s=1)
    hand.feed(ev.TimePassed(), ef.CommitCheckpoint(0, 0, {}))
    hand.feed(ev.CheckpointCommitted(0), after_s=2)
    assert hand.slot(T) == {
        Phase.ROLLOUT: 8, Phase.TRAINING: 10, Phase.IDLE: 1, Phase.CHECKPOINT: 2
    }  # fmt: skip


def test_what_one_process_of_a_shared_gpu_loses_is_not_the_other_s() -> None:
    hand = SharedHand()
    hand.trains(4)
    hand.feed(ev.WorkerCrashed(T, 1), after_s=1)  # idle for a second, then started again
    hand.feed(ev.WorkerStarted(T, 2), after_s=2)
    hand.feed(ev.WeightsPulled(T, 2, PolicyVersion(0), 0), after_s=1)
    hand.feed(ev.TimePassed(), ef.FormGroup(T, 1, (T,)))
    hand.feed(ev.GroupFormed(T, 1))
    hand.rolls_out(1, 3)
    hand.feed(ev.LearnerLost("gone"))
    hand.feed(ev.LearnerRestored(1), after_s=7)
    assert hand.slot(T) == {Phase.LOST: 4, Phase.ROLLOUT: 3, Phase.IDLE: 1, Phase.SETUP: 10}


def test_who_works_on_a_shared_gpu_has_it() -> None:
    """A commit of the learner's, or its restart, while the worker denoises costs nothing besides."""
    hand = SharedHand()
    granted = Lease(LeaseId(1), T, 1, (RolloutId("x"),), 99.0)
    hand.feed(ev.TimePassed(), ef.GrantLease(granted, (rollout("x"),), {}), ef.CommitCheckpoint(0, 0, {}))
    hand.feed(ev.CheckpointCommitted(0), after_s=2)
    hand.feed(ev.LeaseCompleted(T, LeaseId(1), 1, (RolloutId("x"),), PolicyVersion(0)), after_s=1)
    hand.feed(ev.TimePassed(), ef.PublishWeights(PolicyVersion(1)))
    hand.feed(ev.WeightsPublished(PolicyVersion(1)), after_s=4)
    assert hand.slot(T) == {Phase.ROLLOUT: 3, Phase.WEIGHT_SYNC: 4}
