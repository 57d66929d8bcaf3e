"""A learner that moves: what the controller has done when nodes come, are noticed and go."""

from __future__ import annotations

from dataclasses import replace

from spotlight.cluster.incidents import Drains
from spotlight.scheduler import effects as ef
from spotlight.scheduler import events as ev
from spotlight.scheduler.cluster.cluster import Cluster
from spotlight.scheduler.cluster.queue import PullQueue
from spotlight.scheduler.cluster.recovery import Recovery
from spotlight.scheduler.fleet.fleet_machine import Fleet
from spotlight.scheduler.iteration import Snapshot
from spotlight.scheduler.learner.learner_life import LearnerLife
from spotlight.scheduler.ledger import Ledger
from spotlight.scheduler.plan import ClusterPlan
from spotlight.scheduler.types import Node, NodeId, NodeKind, PolicyVersion

A, B, C = (Node(NodeId(name), NodeKind.SPOT, 1, "H100", 1.0, True, False) for name in "abc")
FAR_S = 1e6
STATE = Snapshot(0, PolicyVersion(0), 0, Ledger().snapshot(), {})


class Moving:
    """The life of a learner on ``a``, with a cluster that does as it is told."""

    def __init__(self, *nodes: Node) -> None:
        plan = ClusterPlan(learner_moves=True, drain_margin_s=5.0)
        self.cluster = Cluster(plan, PullQueue(60.0), 0, PolicyVersion(0))
        self.fleet = Fleet(self.cluster)
        self.life = LearnerLife(1, self.fleet, STATE, 1)
        for node in nodes:
            self.tell(ev.NodeJoined(node))

    def tell(self, event: ev.MachineEvent | ev.LearnerRestored | ev.LearnerPrepared) -> None:
        self.life.observe(event)
        if not isinstance(event, ev.LearnerRestored | ev.LearnerPrepared):
            self.fleet.observe(event)
            self.fleet.place()

    def placed(self, *, idle: bool = False, waits: bool = False) -> list[ef.Effect]:
        return list(self.life.placed(1, idle=idle, waits=waits))


def noticed() -> Moving:
    """``a`` will go, and a second learner is formed on ``b``."""
    it = Moving(A, B)
    it.tell(ev.NodeNoticed(A.id, FAR_S))
    assert it.placed() == [ef.PrepareLearner(1)]
    assert it.placed() == []
    it.tell(ev.LearnerPrepared(1))
    return it


def test_a_learner_that_holds_samples_while_nothing_rolls_out_is_ended() -> None:
    """Its second one took the last nodes: what it waits for is made only once it has moved."""
    it = Moving(A, B)
    assert it.placed() == [ef.PrepareLearner(1)]
    assert it.placed(waits=True) == [], "there is no second one yet"
    it.tell(ev.LearnerPrepared(1))
    assert it.placed() == [], "it trains"
    it.tell(ev.NodeJoined(replace(C, trains=False, rolls_out=True)))
    assert it.placed(waits=True) == [], "another node rolls out"
    it.tell(ev.NodeLost(C.id))
    assert [type(effect) for effect in it.placed(waits=True)] == [ef.EndLearner]


def test_a_learner_whose_node_stops_work_is_ended_and_restored_once_its_loss_is_reported() -> None:
    it = noticed()
    assert it.placed() == [], "there is time for what it does"
    it.tell(ev.NodeNoticed(A.id, 0.0))
    assert [type(effect) for effect in it.placed()] == [ef.EndLearner]
    assert not it.life.works
    assert it.placed() == it.placed(idle=True) == [], "its loss is reported first"
    it.life.lost()
    assert it.placed() == [ef.RestoreLearner(1, 0)]
    assert it.cluster.recoveries[Recovery.LEARNER_EVICTED] == 1


def test_a_learner_that_is_being_saved_is_not_ended_and_moves_when_it_is_saved() -> None:
    it = noticed()
    it.life.saving = STATE
    it.tell(ev.NodeNoticed(A.id, 0.0))
    assert it.placed() == it.placed(idle=True) == []
    it.life.saved()
    assert it.placed(idle=True) == [ef.RestoreLearner(1, 0)]
    assert it.cluster.recoveries[Recovery.LEARNER_MOVED] == 1


def test_a_second_learner_that_does_not_start_is_asked_for_again_when_nodes_change() -> None:
    it = Moving(A, B)
    it.tell(ev.NodeNoticed(A.id, FAR_S))
    it.placed()
    it.tell(ev.LearnerPrepared(1, formed=False))
    assert it.placed(idle=True) == [], "it would fail again"
    it.tell(ev.NodeJoined(C))
    assert it.placed() == [ef.PrepareLearner(2)]
    it.tell(ev.LearnerPrepared(1))
    assert it.placed(idle=True) == [], "the answer is the first one's"
    it.tell(ev.LearnerPrepared(2))
    assert it.placed(idle=True) == [ef.RestoreLearner(1, 0)]


def test_a_noticed_node_is_acknowledged_when_all_its_parts_are_empty() -> None:
    acknowledged: list[NodeId] = []
    drains, machine = Drains(acknowledged.append), replace(A, id=NodeId("n"), gpus=2, rolls_out=True)
    it = Moving(replace(machine, trains=False))
    fleet, (known,) = it.fleet, it.fleet.machines.values()
    fleet.assign(known, 1, ranks_roll_out=False)
    assert [part.id for part in known.parts] == ["n/learner", "n/rollout"]
    it.tell(ev.NodeNoticed(machine.id, 0.0))
    assert drains.finished(fleet, 1.0) == []
    assert acknowledged == [], "its learner works"
    fleet.assign(known, 0, ranks_roll_out=False)
    assert drains.finished(fleet, 2.0) == [("n", 1.0)]
    assert acknowledged == ["n"]
    assert drains.finished(fleet, 3.0) == [], "once"
