"""Slices, the pace of groups, and a cluster on which more than one iteration is under way."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st
from test_cluster import PLAN, SPOT, V0, Room, of, only
from tests.controller_answers import learner_answer

from spotlight.config.sections.pipeline import PipelineConfig
from spotlight.scheduler import effects as ef
from spotlight.scheduler import events as ev
from spotlight.scheduler.batches import Part
from spotlight.scheduler.cluster.pace import Pace
from spotlight.scheduler.cluster.recovery import Recovery
from spotlight.scheduler.plan import Plan
from spotlight.scheduler.policies.overlap.overlap import slices
from spotlight.scheduler.types import (
    COMPARED_MIN,
    Baseline,
    DropReason,
    Filler,
    GroupKind,
    LeaseId,
    Node,
    NodeId,
    NodeKind,
    PolicyVersion,
    RolloutId,
    WorkerId,
)
from spotlight_rewards.base.prompts import PromptId

PROMPT = PromptId("p")
V1 = PolicyVersion(1)
FAST, SLOW = GroupKind("H100", 1), GroupKind("L40S", 1)


# -- slices ------------------------------------------------------------------------------------------------


@st.composite
def fates(draw: st.DrawFn) -> tuple[PipelineConfig, list[RolloutId], dict[RolloutId, bool], list[RolloutId]]:
    """A pipeline, a group's members, whether each is scored (or dropped), and the order in which it shows."""
    baseline = draw(st.sampled_from(list(Baseline)))
    least = 3 if baseline is Baseline.SLICE else 1
    axis, slice_size = draw(st.sampled_from(("prompt", "generation"))), draw(st.integers(least, 6))
    pipeline = PipelineConfig.model_validate(
        {"axis": axis, "slice_size": slice_size, "baseline": baseline.value}
    )
    members = [RolloutId(f"m{number}") for number in range(draw(st.integers(2, 13)))]
    scored = {member: draw(st.booleans()) for member in members}
    return pipeline, members, scored, draw(st.permutations(members))


@given(fates(), st.integers(0, 3))
def test_slices_depend_on_what_became_of_members_and_not_on_when(
    fate: tuple[PipelineConfig, list[RolloutId], dict[RolloutId, bool], list[RolloutId]], explored: int
) -> None:
    pipeline, members, scored, order = fate
    previews = [{"reward": float(number)} for number in range(explored)]

    def cut(resolved: set[RolloutId]) -> list[Part]:
        scores = {member: {"reward": 1.0} for member in resolved if scored[member]}
        found = slices(pipeline, 0, PROMPT, members, scores, {*members} - resolved, lambda _: previews)
        return list(found)

    final = cut(set(members))
    for count in range(len(order)):
        so_far = cut(set(order[:count]))
        assert so_far == final[: len(so_far)], "a slice changed after it was ready"
    trained = [rollout for part in final for rollout in part.group.rollouts]
    assert len(trained) == len(set(trained))
    assert all(scored[rollout] for rollout in trained)
    for number, part in enumerate(final):
        seen = sum(len(earlier.group.rollouts) for earlier in final[:number])
        match part.comparison.baseline:
            case Baseline.SLICE:
                assert len(part.comparison.others) == seen
                assert seen + len(part.group.rollouts) - 1 >= COMPARED_MIN
            case Baseline.EXPLORATION:
                assert list(part.comparison.others) == previews
                assert explored >= COMPARED_MIN
            case Baseline.GROUP:
                assert len(final) == 1
                assert part.comparison.others == ()
    left = sum(scored.values()) - len(trained)
    least = {Baseline.GROUP: 2, Baseline.SLICE: 3, Baseline.EXPLORATION: 1}
    baselines = {part.comparison.baseline for part in final} or {Baseline.SLICE}
    assert left < max(least[baseline] for baseline in baselines), (
        "samples that could be compared were left out"
    )


# -- pace --------------------------------------------------------------------------------------------------


def test_a_group_that_pulled_ahead_began_when_it_had_finished_the_lease_before() -> None:
    pace = Pace()
    one, two, leader = LeaseId(1), LeaseId(2), WorkerId("w")
    pace.begin(one, leader, FAST, 4, None, 0.0)
    pace.begin(two, leader, FAST, 2, Filler.NEXT, 1.0)
    pace.end(one, 8.0)
    assert pace.step_s(FAST) == pytest.approx(2.0)
    pace.end(two, 12.0)
    assert pace.step_s(FAST) == pytest.approx(2.0)
    assert pace.filled_s == {Filler.NEXT: pytest.approx(4.0)}


def test_early_work_fills_time_until_its_iteration_begins() -> None:
    pace = Pace()
    one, two, leader = LeaseId(1), LeaseId(2), WorkerId("w")
    pace.begin(one, leader, FAST, 4, Filler.NEXT, 0.0)
    pace.begin(two, leader, FAST, 4, Filler.NEXT, 1.0)
    pace.begin(LeaseId(3), WorkerId("v"), FAST, 4, Filler.EXPLORATION, 0.0)
    pace.promote(6.0)
    pace.end(one, 8.0)
    pace.end(two, 20.0)
    assert pace.filled_s == {Filler.NEXT: pytest.approx(6.0)}
    assert pace.step_s(FAST) == pytest.approx(2.0 + 0.3 * (3.0 - 2.0)), "the pace is that of whole leases"


def test_a_lease_of_which_nothing_could_be_made_says_nothing_either() -> None:
    room = Room(pipelined(next_share=1.0))
    one, _ = room.bring_up()
    grant = only(room.pull(one, capacity=1), ef.GrantLease)
    room.now += 3.0
    room.feed(ev.RolloutFailed(one.leader, grant.lease.id, one.epoch, grant.rollouts[0].id, "NaN"))
    pace = room.controller.cluster.pace
    assert not pace._running
    assert pace.step_s(FAST) is None


def test_what_was_lost_says_nothing_of_the_pace() -> None:
    pace = Pace()
    pace.begin(LeaseId(1), WorkerId("w"), FAST, 4, None, 0.0)
    pace.begin(LeaseId(2), WorkerId("v"), FAST, 4, None, 0.0)
    pace.forget(WorkerId("w"))
    pace.cut(LeaseId(2), 50.0)
    pace.end(LeaseId(1), 100.0)
    pace.end(LeaseId(2), 100.0)
    assert pace.step_s(FAST) is None
    pace.begin(LeaseId(3), WorkerId("w"), FAST, 1, None, 200.0)
    pace.end(LeaseId(3), 203.0)
    assert pace.step_s(SLOW) == pytest.approx(3.0), "expected to be like the others until it is seen"


# -- the cluster -------------------------------------------------------------------------------------------

SINGLE = dataclasses.replace(PLAN, cluster=dataclasses.replace(PLAN.cluster, degrees=(1,)))


def pipelined(**changes: object) -> Plan:
    return dataclasses.replace(SINGLE, pipeline=PipelineConfig(**changes))  # type: ignore[arg-type]


def finish(room: Room, group: ef.FormGroup, grant: ef.GrantLease) -> list[ef.Effect]:
    version = grant.rollouts[0].version
    done = ev.LeaseCompleted(group.leader, grant.lease.id, group.epoch, grant.lease.rollouts, version)
    return room.feed(done) + room.feed(
        ev.SamplesRewarded({name: {"reward": float(n)} for n, name in enumerate(grant.lease.rollouts)})
    )


def learn(room: Room, effects: list[ef.Effect]) -> list[ef.Effect]:
    """Let the learner do all it is told; returns every effect that came."""
    came = list(effects)
    todo = list(effects)
    while todo:
        answer = learner_answer(todo.pop(0))
        if answer is None:
            continue
        more = room.feed(answer)
        came += more
        todo += more
    return came


def test_who_holds_early_work_finishes_it_before_it_gets_new_weights() -> None:
    room = Room(pipelined(next_share=1.0))
    one, two = room.bring_up()
    first, second = (only(room.pull(group, capacity=2), ef.GrantLease) for group in (one, two))
    finish(room, one, first)
    early = only(room.pull(one, capacity=2, seen=first.lease.id), ef.GrantLease)
    assert {rollout.iteration for rollout in early.rollouts} == {1}
    assert {rollout.version for rollout in early.rollouts} == {V0}
    effects = learn(room, finish(room, two, second))
    assert [pull.worker for pull in of(effects, ef.PullWeights)] == [two.leader]
    assert room.controller.iteration == 1
    pull = only(finish(room, one, early), ef.PullWeights)
    assert (pull.worker, pull.version) == (one.leader, V1)
    rollouts = room.controller.rollouts.values()
    assert sorted(rollout.version for rollout in rollouts) == [V0, V0, V1, V1], "not begun early: new weights"
    assert not room.pull(one, capacity=2, seen=early.lease.id), "no work before it has them"


@pytest.mark.parametrize("beside_next", [False, True])
def test_training_overlaps_only_with_rollouts_of_its_iteration(beside_next: bool) -> None:
    room = Room(dataclasses.replace(pipelined(axis="prompt", next_share=1.0), micro_batch_size=2))
    one, two = room.bring_up()
    first, second = (only(room.pull(group, capacity=2), ef.GrantLease) for group in (one, two))
    if beside_next:  # the second group is made, not scored, and its worker makes some of the next iteration
        room.feed(ev.LeaseCompleted(two.leader, second.lease.id, two.epoch, second.lease.rollouts, V0))
        early = only(room.pull(two, capacity=2, seen=second.lease.id), ef.GrantLease)
        assert {rollout.iteration for rollout in early.rollouts} == {1}
    prepare = only(finish(room, one, first), ef.PrepareBatch)
    batch = only(room.feed(ev.BatchPrepared(prepare.iteration)), ef.TrainMicroBatch)
    room.now += 3.0
    room.feed(ev.MicroBatchTrained(prepare.iteration, 0, batch.index))
    filled = room.controller.cluster.pace.filled_s
    assert filled == ({} if beside_next else {Filler.TRAINING: pytest.approx(3.0)})


def test_early_work_is_counted_as_such_until_its_iteration_begins() -> None:
    room, early, learn_all = begun_early()
    room.now += 7.0
    learn_all()
    assert room.controller.iteration == 1
    assert room.controller.cluster.pace.filled_s[Filler.NEXT] == pytest.approx(7.0)
    room.now += 50.0
    holder = WorkerId("t/0")
    epoch = room.controller.cluster.groups[holder].epoch
    room.feed(ev.LeaseCompleted(holder, early.lease.id, epoch, early.lease.rollouts, V0))
    assert room.controller.cluster.pace.filled_s[Filler.NEXT] == pytest.approx(7.0)


def begun_early() -> tuple[Room, ef.GrantLease, Callable[[], None]]:
    """Two groups hold an iteration, a third on node t is at step 3 of the next; and what learns from it."""
    room = Room(pipelined(next_share=1.0))
    one, two = room.bring_up()
    (other,) = room.bring_up(Node(NodeId("t"), NodeKind.SPOT, 1, "H100", 6.0, False, True))
    grants = [only(room.pull(group, capacity=2), ef.GrantLease) for group in (one, two)]
    early = only(room.pull(other, capacity=2), ef.GrantLease)
    room.feed(ev.LeaseProgressed(other.leader, early.lease.id, other.epoch, 3))

    def learn_all() -> None:
        finish(room, one, grants[0])
        learn(room, finish(room, two, grants[1]))

    return room, early, learn_all


def test_early_work_whose_holder_is_lost_starts_over_with_the_new_weights() -> None:
    room, early, learn_all = begun_early()
    assert {rollout.iteration for rollout in early.rollouts} == {1}
    learn_all()
    ledger = room.controller.ledger
    assert ledger.issued.total() == 8
    room.feed(ev.NodeLost(NodeId("t")))
    assert ledger.dropped == {DropReason.STALE: 2}
    assert room.count(Recovery.ROLLOUT_RENEWED) == 2
    assert ledger.issued.total() == 10
    assert {rollout.version for rollout in room.controller.rollouts.values()} == {V1}
    assert room.controller.queue.waiting == 4


def test_what_older_weights_began_is_begun_again_by_the_new() -> None:
    room, early, learn_all = begun_early()
    room.feed(ev.NodeLost(NodeId("t")))
    queue, begun = room.controller.queue, {rollout.id for rollout in early.rollouts}
    assert {queue.step_of(name) for name in begun} == {3}
    learn_all()
    again = {rollout.id: rollout.version for rollout in room.controller.rollouts.values()}
    assert {again[name] for name in begun} == {V1}
    assert {queue.step_of(name) for name in begun} == {0}


def test_a_slow_gpu_s_share_is_smaller() -> None:
    room = Room(dataclasses.replace(SINGLE, prompts_per_iteration=10, iterations=1))
    (fast,) = room.bring_up(dataclasses.replace(SPOT, gpus=1))
    (slow,) = room.bring_up(Node(NodeId("t"), NodeKind.SPOT, 1, "L40S", 1.0, False, True))
    grants = [only(room.pull(group), ef.GrantLease) for group in (fast, slow)]
    room.now = 1.0
    finish(room, fast, grants[0])
    room.now = 4.0
    finish(room, slow, grants[1])
    share = only(room.pull(fast, capacity=20, seen=grants[0].lease.id), ef.GrantLease)
    assert len(share.rollouts) == 15, "18 are left for one GPU and one of a fourth of its speed"
    share = only(room.pull(slow, capacity=20, seen=grants[1].lease.id), ef.GrantLease)
    assert len(share.rollouts) == 3, "a fourth would be done after all the others"


TRAINER = Node(NodeId("r"), NodeKind.RESERVED, 1, "H100", 8.0, True, True)


def test_a_sample_two_versions_old_is_never_given_to_the_learner() -> None:
    """The last guard: no schedule makes such a sample, so the controller's memory is broken on purpose."""
    room = Room(pipelined(next_share=0.5))
    one, two = room.bring_up()
    first, second = (only(room.pull(group, capacity=2), ef.GrantLease) for group in (one, two))
    finish(room, one, first)
    room.controller.work._oldest = V1
    with pytest.raises(RuntimeError, match="of version 0 is too old to train on; expected 1"):
        finish(room, two, second)


def seen_paces(room: Room) -> None:
    """The fast GPU makes four rollouts while the slow one makes one."""
    pace = room.controller.cluster.pace
    for number, (kind, rollout_s) in enumerate(((FAST, 1.0), (SLOW, 4.0))):
        pace.begin(LeaseId(10**6 + number), WorkerId("before"), kind, 8, None, 100.0 * number)
        pace.end(LeaseId(10**6 + number), 100.0 * number + rollout_s)
    room.now = 200.0


def test_the_last_rollout_goes_to_a_slow_gpu_if_the_fast_one_cannot_take_it() -> None:
    room = Room(dataclasses.replace(SINGLE, prompts_per_iteration=1, iterations=1))
    seen_paces(room)
    (fast,) = room.bring_up(dataclasses.replace(SPOT, gpus=1))
    (slow,) = room.bring_up(Node(NodeId("t"), NodeKind.SPOT, 1, "L40S", 1.0, False, True))
    first = only(room.pull(fast), ef.GrantLease)
    assert not of(room.pull(slow), ef.GrantLease), "the fast one works, and has the second done sooner"
    grants = of(room.feed(ev.NodeLost(SPOT.id)), ef.GrantLease)
    assert [grant.lease.worker for grant in grants] == [slow.leader]
    assert first.lease.worker == fast.leader


def test_the_last_rollout_is_left_to_a_fast_gpu_that_trains_too_if_that_rolls_out_at_will() -> None:
    room = Room(dataclasses.replace(SINGLE, prompts_per_iteration=1, iterations=1))
    seen_paces(room)
    (fast,) = room.bring_up(TRAINER)
    (slow,) = room.bring_up(Node(NodeId("t"), NodeKind.SPOT, 1, "L40S", 1.0, False, True))
    only(room.pull(fast), ef.GrantLease)
    assert not of(room.pull(slow), ef.GrantLease)
