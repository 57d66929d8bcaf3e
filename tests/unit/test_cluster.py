"""The controller on nodes that come and go, step by step; random schedules are in the simulation."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TypeVar

import pytest

from spotlight.config.sections.evaluation import EvaluationConfig
from spotlight.scheduler import effects as ef
from spotlight.scheduler import events as ev
from spotlight.scheduler.cluster.answer_limits import SLOWER_MAX
from spotlight.scheduler.cluster.commands import REPEATS
from spotlight.scheduler.cluster.recovery import Recovery
from spotlight.scheduler.controller import Controller
from spotlight.scheduler.plan import ClusterPlan, Plan
from spotlight.scheduler.types import LeaseId, Node, NodeId, NodeKind, PolicyVersion, WeightKind, WorkerId
from spotlight_rewards.base.prompts import Prompt, PromptId

ANSWER_S, START_S, LEASE_S = 5.0, 60.0, 100.0
PLAN = Plan(
    run_seed=0, iterations=2, prompts_per_iteration=2, group_size=2, rollout_steps=8,
    evaluation=EvaluationConfig(steps=8, images_per_prompt=1, every=9),
    updates_per_batch=1, micro_batch_size=4, checkpoint_every=1,
    lease_s=LEASE_S, max_drop_share=None,
    cluster=ClusterPlan(
        pixels=1280 * 1280, heads=24, degrees=(1, 2, 3, 4),
        answer_s=ANSWER_S, start_s=START_S, drain_margin_s=25.0,
    ),
)  # fmt: skip
SPOT = Node(NodeId("s"), NodeKind.SPOT, 2, "H100", 6.0, False, True)
V0 = PolicyVersion(0)
E = TypeVar("E")


class Room:
    """Events in, effects out, with the time."""

    def __init__(self, plan: Plan = PLAN, test: Sequence[Prompt] = ()) -> None:
        self.controller = Controller(plan, [Prompt(PromptId("p"), "a circle", {})], test)
        self.now = 0.0
        self.feed(ev.RunStarted())

    def feed(self, event: ev.Event) -> list[ef.Effect]:
        effects = self.controller.handle(event, self.now)
        self.controller.check()
        return effects

    def wait(self, seconds: float) -> list[ef.Effect]:
        self.now += seconds
        return self.feed(ev.TimePassed())

    def bring_up(self, node: Node = SPOT) -> list[ef.FormGroup]:
        """A node joins, and all its commands but the last are obeyed."""
        formed: list[ef.FormGroup] = []
        todo = self.feed(ev.NodeJoined(node))
        while todo:
            effect = todo.pop(0)
            match effect:
                case ef.StartWorker(worker, _, _, epoch):
                    todo += self.feed(ev.WorkerStarted(worker, epoch))
                case ef.PullWeights(worker, epoch, version, lineage):
                    todo += self.feed(ev.WeightsPulled(worker, epoch, version, lineage))
                case ef.FormGroup():
                    formed.append(effect)
                    todo += self.feed(ev.GroupFormed(effect.leader, effect.epoch))
        return formed

    def pull(self, group: ef.FormGroup, capacity: int = 1, seen: int = 0) -> list[ef.Effect]:
        return self.feed(ev.GroupPulled(group.leader, group.epoch, capacity, LeaseId(seen)))

    def count(self, recovery: Recovery) -> int:
        return self.controller.cluster.recoveries[recovery]


def only(effects: list[ef.Effect], kind: type[E]) -> E:
    found = [effect for effect in effects if isinstance(effect, kind)]
    assert len(found) == 1, effects
    return found[0]


def of(effects: list[ef.Effect], kind: type[E]) -> list[E]:
    return [effect for effect in effects if isinstance(effect, kind)]


def test_one_worker_fetches_from_the_store_and_its_neighbour_copies() -> None:
    room = Room()
    first, second = of(room.feed(ev.NodeJoined(SPOT)), ef.StartWorker)
    pull = only(room.feed(ev.WorkerStarted(first.worker, first.epoch)), ef.PullWeights)
    assert (pull.kind, pull.peer) == (WeightKind.FULL, None)
    assert not of(room.feed(ev.WorkerStarted(second.worker, second.epoch)), ef.PullWeights), "it waits"
    effects = room.feed(ev.WeightsPulled(first.worker, first.epoch, V0, pull.lineage))
    copy = only(effects, ef.PullWeights)
    assert (copy.worker, copy.kind, copy.peer) == (second.worker, WeightKind.FULL, first.worker)
    assert only(effects, ef.FormGroup).members == (first.worker,), "the first does not wait for the second"


def test_a_pull_is_answered_when_there_is_work() -> None:
    room = Room()
    one, two = room.bring_up()
    grant = only(room.pull(one, capacity=3), ef.GrantLease)
    assert len(grant.rollouts) == 2, "four rollouts are shared by two groups"
    rest = only(room.pull(two, capacity=3), ef.GrantLease)
    assert set(rest.lease.rollouts).isdisjoint(grant.lease.rollouts)


def test_groups_that_get_ready_one_after_another_share_the_work_equally() -> None:
    # Four rollouts, four groups: who is ready first must not take what the others will ask for.
    room = Room(dataclasses.replace(PLAN, cluster=dataclasses.replace(PLAN.cluster, degrees=(1,))))
    forming: list[ef.FormGroup] = []
    todo = room.feed(ev.NodeJoined(dataclasses.replace(SPOT, gpus=4)))
    while todo:
        match todo.pop(0):
            case ef.StartWorker(worker, _, _, epoch):
                todo += room.feed(ev.WorkerStarted(worker, epoch))
            case ef.PullWeights(worker, epoch, version, lineage):
                todo += room.feed(ev.WeightsPulled(worker, epoch, version, lineage))
            case ef.FormGroup() as form:
                forming.append(form)
    assert len(forming) == 4
    granted = []
    for form in forming[:-1]:
        room.feed(ev.GroupFormed(form.leader, form.epoch))
        granted.append(only(room.pull(form, capacity=4), ef.GrantLease))
    assert [len(grant.rollouts) for grant in granted] == [1, 1, 1]
    # The last never answers: its share goes to who is done first.
    done, grant = forming[0], granted[0]
    room.feed(ev.LeaseCompleted(done.leader, grant.lease.id, done.epoch, grant.lease.rollouts, V0))
    rest = only(room.pull(done, capacity=4, seen=grant.lease.id), ef.GrantLease)
    assert len(rest.rollouts) == 1
    assert room.controller.queue.waiting == 0


def test_busy_learner_nodes_and_groups_that_part_have_no_share() -> None:
    room = Room(dataclasses.replace(PLAN, cluster=dataclasses.replace(PLAN.cluster, degrees=(1,))))
    room.bring_up(Node(NodeId("r"), NodeKind.RESERVED, 2, "H100", 8.0, True, True))
    one, two = room.bring_up()
    cluster, dispatcher = room.controller.cluster, room.controller.dispatcher
    room.feed(ev.WorkerCrashed(two.leader, cluster.workers[two.leader].epoch))
    dispatcher.set_trainer_budget(0, explore=False)
    dispatcher.pulled(ev.GroupPulled(one.leader, one.epoch, 4, LeaseId(0)))
    dispatcher.serve()
    assert len(only(cluster.effects, ef.GrantLease).rollouts) == 4, "nobody else could take any"


def test_a_lost_grant_is_sent_again_and_an_unfinished_lease_given_up() -> None:
    room = Room()
    one, _ = room.bring_up()
    grant = only(room.pull(one), ef.GrantLease)
    again = only(room.pull(one), ef.GrantLease)
    assert again == grant
    other = only(room.pull(one, seen=grant.lease.id), ef.GrantLease)
    assert other.lease.id > grant.lease.id
    assert room.count(Recovery.LEASE_RENOUNCED) == room.count(Recovery.GRANT_RESENT) == 1


def test_a_repeated_grant_does_not_move_the_start_from_which_progress_counts() -> None:
    room = Room()
    one, _ = room.bring_up()
    grant = only(room.pull(one), ef.GrantLease)
    progress = ev.LeaseProgressed(one.leader, grant.lease.id, one.epoch, 3)
    room.feed(progress)
    assert only(room.pull(one), ef.GrantLease).resume == {}
    room.feed(dataclasses.replace(progress, steps=5))
    room.feed(ev.NodeLost(SPOT.id))
    room.bring_up(dataclasses.replace(SPOT, id=NodeId("t"), gpus=1))
    leader = WorkerId("t/0")
    epoch = room.controller.cluster.groups[leader].epoch
    resumed = only(room.feed(ev.GroupPulled(leader, epoch, 1, LeaseId(0))), ef.GrantLease)
    assert resumed.resume == {grant.rollouts[0].id: 5}


def test_survivors_commit_before_they_are_regrouped() -> None:
    plan = dataclasses.replace(PLAN, cluster=dataclasses.replace(PLAN.cluster, degrees=(2, 3, 4)))
    room = Room(plan)
    (group,) = room.bring_up()
    assert group.members == ("s/0", "s/1")
    grant = only(room.pull(group), ef.GrantLease)
    epoch = room.controller.cluster.workers[WorkerId("s/0")].epoch
    effects = room.feed(ev.WorkerCrashed(WorkerId("s/0"), epoch))
    assert only(effects, ef.StopGroup).members == ("s/1",)
    assert only(effects, ef.StartWorker).worker == "s/0"
    room.feed(ev.LeaseProgressed(group.leader, grant.lease.id, group.epoch, 4))
    assert not of(room.feed(ev.GroupStopped(group.leader, group.epoch)), ef.FormGroup), "one is too few"
    late = room.feed(ev.LeaseProgressed(group.leader, grant.lease.id, group.epoch, 5))
    assert only(late, ef.AbandonLease).lease == grant.lease.id
    assert room.controller.queue.waiting == 4


@pytest.mark.parametrize("lead_s", [0.0, 20.0, 120.0])
def test_a_noticed_node_works_until_it_has_to_drain(lead_s: float) -> None:
    room = Room()
    one, two = room.bring_up()
    room.pull(one)
    stopped = of(room.feed(ev.NodeNoticed(SPOT.id, lead_s)), ef.StopGroup)
    if lead_s > 25.0:
        assert not stopped
        assert not of(room.wait(lead_s - 26.0), ef.StopGroup)
        stopped = of(room.wait(1.0), ef.StopGroup)
    assert {stop.leader for stop in stopped} == {one.leader, two.leader}
    for stop in stopped:
        assert not of(room.feed(ev.GroupStopped(stop.leader, stop.epoch)), ef.FormGroup)
    assert len(of(room.feed(ev.NoticeCancelled(SPOT.id)), ef.FormGroup)) == 2


def test_who_does_not_answer_is_asked_again_and_then_restarted() -> None:
    room = Room()
    one, _ = room.bring_up()
    room.feed(ev.NodeNoticed(SPOT.id, 0.0))
    for _ in range(REPEATS):
        assert {stop.leader for stop in of(room.wait(ANSWER_S), ef.StopGroup)} == {"s/0", "s/1"}
    restarted = of(room.wait(ANSWER_S), ef.StartWorker)
    assert {start.worker for start in restarted} == {"s/0", "s/1"}
    stale = room.count(Recovery.ANSWER_STALE)
    room.feed(ev.GroupStopped(one.leader, one.epoch))
    assert room.count(Recovery.ANSWER_STALE) == stale + 1


def test_a_lease_not_renewed_expires_and_its_group_is_suspected() -> None:
    room = Room()
    one, _ = room.bring_up()
    grant = only(room.pull(one), ef.GrantLease)
    assert one.leader in {stop.leader for stop in of(room.wait(LEASE_S), ef.StopGroup)}
    late = ev.LeaseCompleted(one.leader, grant.lease.id, one.epoch, grant.lease.rollouts, V0)
    assert not of(room.feed(late), ef.ScoreSamples)
    assert room.controller.ledger.rejected == {"stale_epoch": 1}


def warmed_up(step_s: float, lease_s: float) -> tuple[Room, ef.FormGroup, LeaseId]:
    """A group that made three rollouts, in ``step_s`` each, and has the lease of a fourth."""
    room = Room(dataclasses.replace(PLAN, prompts_per_iteration=8, lease_s=lease_s))
    one, _ = room.bring_up()
    lease = only(room.pull(one), ef.GrantLease).lease
    for _ in range(3):
        assert not of(room.wait(step_s), ef.StopGroup)
        done = ev.LeaseCompleted(one.leader, lease.id, one.epoch, lease.rollouts, V0)
        assert of(room.feed(done), ef.ScoreSamples)
        lease = only(room.pull(one, seen=lease.id), ef.GrantLease).lease
    return room, one, lease.id


def restarted_after(room: Room, leader: WorkerId) -> float:
    """Seconds until a worker that never answers is restarted."""
    began_s = room.now
    while not any(start.worker == leader for start in of(room.wait(1.0), ef.StartWorker)):
        assert room.now - began_s < 100 * START_S, "it is never restarted"
    return room.now - began_s


def test_a_command_waits_for_a_step_that_takes_as_long_as_those_before() -> None:
    room, one, _ = warmed_up(START_S - 1.0, lease_s=1.0)
    room.wait(30.0)
    room.feed(ev.NodeNoticed(SPOT.id, 0.0))
    # Its lease expires so long after the last news; it was asked for longer than three times by then.
    limit_s = SLOWER_MAX * (START_S - 1.0) - 30.0
    assert limit_s <= restarted_after(room, one.leader) <= limit_s + ANSWER_S


def test_a_group_that_hangs_is_restarted_soon_after_its_lease_expired() -> None:
    room, one, _ = warmed_up(1.0, LEASE_S)
    assert restarted_after(room, one.leader) == LEASE_S + (1 + REPEATS) * ANSWER_S
    first = Room(dataclasses.replace(PLAN, lease_s=1.0))
    one, _ = first.bring_up()
    first.pull(one)
    assert restarted_after(first, one.leader) == START_S + (1 + REPEATS) * ANSWER_S, "it may compile"


@pytest.mark.parametrize("pause_s", [1.0, ANSWER_S - 1.0, ANSWER_S + 1.0])
def test_a_worker_that_hangs_while_versions_follow_each_other_is_restarted(pause_s: float) -> None:
    room = Room()
    one, other = room.bring_up()
    cluster = room.controller.cluster
    restarted: list[WorkerId] = []
    for version in range(1, 3 + int(3 * ANSWER_S / pause_s)):
        cluster.publish(PolicyVersion(version))
        effects = room.feed(ev.TimePassed())
        pulled = {pull.worker: pull for pull in of(effects, ef.PullWeights)}
        for _ in range(int(pause_s)):
            restarted += [start.worker for start in of(room.wait(1.0), ef.StartWorker)]
        pull = pulled[other.leader]  # the neighbour answers late, when there is a newer version
        room.feed(ev.WeightsPulled(pull.worker, pull.epoch, PolicyVersion(version - 1), pull.lineage))
    assert restarted == [one.leader]


def test_a_group_without_work_is_asked_three_times() -> None:
    room, one, lease = warmed_up(50.0, LEASE_S)
    rollouts = room.controller.queue.granted(lease)[0].rollouts
    room.feed(ev.LeaseCompleted(one.leader, lease, one.epoch, rollouts, V0))
    room.feed(ev.NodeNoticed(SPOT.id, 0.0))
    assert restarted_after(room, one.leader) == (1 + REPEATS) * ANSWER_S


def test_the_tail_of_a_batch_is_shared_by_the_node() -> None:
    room = Room(dataclasses.replace(PLAN, prompts_per_iteration=1, group_size=2))
    node = dataclasses.replace(SPOT, gpus=4)
    groups = room.bring_up(node)
    assert [len(group.members) for group in groups][-1] <= 2
    for group in groups:
        for stop in of(room.pull(group), ef.StopGroup):
            room.feed(ev.GroupStopped(stop.leader, stop.epoch))
    degree = max(len(group.members) for group in room.controller.cluster.groups.values())
    assert degree == 2, "two rollouts, four GPUs"


def test_a_lost_learner_returns_to_the_checkpoint_and_keeps_what_is_safe() -> None:
    trainer = Node(NodeId("r"), NodeKind.RESERVED, 1, "H100", 8.0, True, False)
    room = Room()
    room.feed(ev.NodeJoined(trainer))
    one, _ = room.bring_up()
    grant = only(room.pull(one), ef.GrantLease)
    done = ev.LeaseCompleted(one.leader, grant.lease.id, one.epoch, grant.lease.rollouts, V0)
    scored = only(room.feed(done), ef.ScoreSamples)
    reward = ev.SamplesRewarded({grant.rollouts[0].id: {"reward": 1.0}}, scored.lineage)
    room.feed(reward)
    effects = room.feed(ev.LearnerLost("a rank died"))
    assert isinstance(effects[0], ef.RollBack)
    assert effects[0].position == 0
    restore = only(effects, ef.RestoreLearner)
    assert (restore.iteration, restore.lineage) == (0, 1)
    assert room.count(Recovery.SAMPLE_KEPT) == 1
    assert grant.rollouts[0].id in room.controller.work.current.scores
    rejected = room.controller.ledger.rejected.total()
    room.feed(reward)
    assert room.controller.ledger.rejected.total() == rejected + 1, "a score of the lineage before"


def test_a_learner_is_restored_once_its_nodes_are_back() -> None:
    trainer = Node(NodeId("r"), NodeKind.RESERVED, 1, "H100", 8.0, True, False)
    room = Room()
    room.feed(ev.NodeJoined(trainer))
    room.feed(ev.NodeLost(trainer.id))
    assert not of(room.feed(ev.LearnerLost("its node is gone")), ef.RestoreLearner)
    assert of(room.feed(ev.NodeJoined(trainer)), ef.RestoreLearner)


def test_gpus_that_train_give_nothing_to_workers_meanwhile() -> None:
    room = Room(dataclasses.replace(PLAN, iterations=1))
    node = Node(NodeId("r"), NodeKind.RESERVED, 1, "H100", 8.0, True, True)
    (group,) = room.bring_up(node)
    grant = only(room.pull(group, capacity=4), ef.GrantLease)
    done = ev.LeaseCompleted(group.leader, grant.lease.id, group.epoch, grant.lease.rollouts, V0)
    room.feed(done)
    effects = room.feed(ev.SamplesRewarded({name: {"reward": 1.0} for name in grant.lease.rollouts}))
    only(effects, ef.PrepareBatch)
    assert room.controller.cluster.serving.trainer_budget == 0


def test_a_later_incarnation_believes_no_earlier_one() -> None:
    rooms = [Controller(PLAN, [Prompt(PromptId("p"), "a circle", {})], [], term) for term in (0, 1)]
    epochs = []
    for controller in rooms:
        effects = controller.handle(ev.NodeJoined(SPOT), 0.0)
        epochs.append({start.epoch for start in of(effects, ef.StartWorker)})
    assert max(epochs[0]) < min(epochs[1])


def test_weights_pulled_under_an_abandoned_lineage_do_not_count() -> None:
    room = Room()
    start = of(room.feed(ev.NodeJoined(SPOT)), ef.StartWorker)[0]
    pull = only(room.feed(ev.WorkerStarted(start.worker, start.epoch)), ef.PullWeights)
    again = only(room.feed(ev.LearnerLost("a rank died")), ef.PullWeights)
    assert again.lineage == pull.lineage + 1
    assert not room.feed(ev.WeightsPulled(start.worker, start.epoch, V0, pull.lineage))
    assert room.count(Recovery.PULL_STALE_LINEAGE) == 1
    assert of(room.feed(ev.WeightsPulled(start.worker, start.epoch, V0, again.lineage)), ef.FormGroup)
