"""GPUs of the learner that roll out while it would wait: how much they take, and for how long it waits."""

from __future__ import annotations

import dataclasses

import pytest
from test_cluster import ANSWER_S, PLAN, SPOT, V0, Room, of, only
from test_pipeline import FAST, SINGLE, TRAINER, finish

from spotlight.config.sections.evaluation import EvaluationConfig
from spotlight.config.sections.pipeline import PipelineConfig
from spotlight.scheduler import effects as ef
from spotlight.scheduler import events as ev
from spotlight.scheduler.cluster.pace import Pace
from spotlight.scheduler.cluster.queue import WorkClass
from spotlight.scheduler.policies.trainers import trainer_budget as takes_module
from spotlight.scheduler.policies.trainers.look_ahead import RolloutBudget, Timeline, find_budget
from spotlight.scheduler.policies.trainers.trainer_budget import Backlog, Remaining, groups_soon
from spotlight.scheduler.types import (
    Filler,
    GroupKind,
    LeaseId,
    Node,
    NodeId,
    NodeKind,
    Purpose,
    RolloutId,
    WorkerId,
)
from spotlight_rewards.base.prompts import Prompt, PromptId


def seen_pace(room: Room, rollout_s: float, train_s: float) -> None:
    pace = room.controller.cluster.pace
    pace.begin(LeaseId(10**6), WorkerId("before"), FAST, 8, None, room.now - rollout_s)
    pace.end(LeaseId(10**6), room.now)
    pace.trained(1, train_s)


def generating(
    prompts: int, held: int, trainers: int, next_share: float = 0.0
) -> tuple[Room, ef.FormGroup, ef.GrantLease, list[ef.FormGroup]]:
    """A spot GPU makes some of a long iteration, whose paces are known, and trainers wait."""
    pipeline = PipelineConfig(axis="prompt", switch_s=0.1, next_share=next_share)
    room = Room(
        dataclasses.replace(
            SINGLE, prompts_per_iteration=prompts, micro_batch_size=2, pipeline=pipeline, bounded=True
        )
    )
    room.now = 100.0
    seen_pace(room, rollout_s=4.0, train_s=0.5)
    (spot,) = room.bring_up(dataclasses.replace(SPOT, gpus=1))
    grant = only(room.pull(spot, capacity=held), ef.GrantLease)
    return room, spot, grant, room.bring_up(dataclasses.replace(TRAINER, gpus=trainers))


def test_trainers_take_what_is_then_done_sooner_and_no_more() -> None:
    plan = dataclasses.replace(
        SINGLE, prompts_per_iteration=8, pipeline=PipelineConfig(axis="prompt", switch_s=1.0), bounded=True
    )
    room = Room(plan)
    room.now = 10.0
    seen_pace(room, rollout_s=4.0, train_s=0.5)
    (spot,) = room.bring_up(dataclasses.replace(SPOT, gpus=1))
    room.pull(spot, capacity=8)
    (trainer,) = room.bring_up(TRAINER)
    taken = only(room.pull(trainer, capacity=8), ef.GrantLease)
    assert 1 <= len(taken.rollouts) <= 8
    # Nearly all is made: what is left is sooner done by the one who makes it already.
    late = Room(dataclasses.replace(plan, prompts_per_iteration=1))
    seen_pace(late, rollout_s=4.0, train_s=0.5)
    late.bring_up(dataclasses.replace(SPOT, gpus=2))
    for name in ("s/0", "s/1"):
        group = late.controller.cluster.groups[WorkerId(name)]
        late.feed(ev.GroupPulled(group.leader, group.epoch, 1, LeaseId(0)))
    (trainer,) = late.bring_up(TRAINER)
    assert not of(late.pull(trainer, capacity=8), ef.GrantLease)


def test_all_trainers_get_their_part_of_what_they_take() -> None:
    room, _, _, (one, two) = generating(prompts=16, held=4, trainers=2)
    first = only(room.pull(one, capacity=4), ef.GrantLease)
    room.now += 0.2
    second = only(room.pull(two, capacity=4), ef.GrantLease)
    assert len(first.rollouts) == len(second.rollouts) == 4, "the second does not wait for the first"
    assert room.controller.cluster.serving.trainer_budget > 0, "there is more for both"
    effects = finish(room, one, first)
    assert not of(effects, ef.PrepareBatch), "the second still rolls out"
    assert of(room.pull(one, capacity=4, seen=second.lease.id), ef.GrantLease)


def test_what_trainers_take_evens_out_as_they_pull() -> None:
    """Parts get smaller, and who is done first takes what is left: the last to finish is not far behind."""
    room, _, _, trainers = generating(prompts=16, held=4, trainers=3)
    held = {group.leader: only(room.pull(group, capacity=32), ef.GrantLease) for group in trainers}
    made = {leader: len(grant.rollouts) for leader, grant in held.items()}
    planned = sum(made.values()) + room.controller.cluster.serving.trainer_budget
    while held:
        first = min(held, key=lambda leader: made[leader])
        group = next(group for group in trainers if group.leader == first)
        grant = held.pop(first)
        if not held:
            break  # the last: what the plan was is made
        finish(room, group, grant)
        more = of(room.pull(group, capacity=32, seen=grant.lease.id), ef.GrantLease)
        if more:
            held[first] = more[0]
            made[first] += len(more[0].rollouts)
    assert sum(made.values()) == planned >= 9
    assert max(made.values()) - min(made.values()) <= 1


def test_the_learner_does_not_wait_for_what_is_no_longer_worth_while() -> None:
    """Others took what had been planned for a trainer that did not ask; early work waits, too."""
    room, spot, first, (one, _) = generating(prompts=8, held=2, trainers=2, next_share=0.5)
    mine = only(room.pull(one, capacity=16), ef.GrantLease)
    assert room.controller.cluster.serving.trainer_budget > 0, "as much is left for the other"
    finish(room, spot, first)
    only(room.pull(spot, capacity=16, seen=first.lease.id), ef.GrantLease)
    assert room.controller.queue.waiting == room.controller.queue.waiting_of(WorkClass.NEXT) > 0
    assert of(finish(room, one, mine), ef.PrepareBatch)


def test_a_trainer_that_does_not_ask_is_waited_for_no_longer_than_an_answer() -> None:
    room, _, _, (one, _) = generating(prompts=8, held=2, trainers=2)
    mine = only(room.pull(one, capacity=16), ef.GrantLease)
    assert not of(finish(room, one, mine), ef.PrepareBatch), "the other may ask for its part"
    assert room.controller.wake_s == room.now + ANSWER_S
    assert not of(room.wait(ANSWER_S - 0.1), ef.PrepareBatch)
    assert of(room.wait(0.1), ef.PrepareBatch)


def test_a_new_plan_to_take_nothing_ends_the_one_before() -> None:
    room, _, _, (one, _) = generating(prompts=8, held=2, trainers=2)
    mine = only(room.pull(one, capacity=16), ef.GrantLease)
    assert not of(finish(room, one, mine), ef.PrepareBatch), "the other may ask for its part"
    room.bring_up(Node(NodeId("t"), NodeKind.SPOT, 8, "H100", 6.0, False, True))
    for gpu in range(8):
        room.controller.cluster.pace.trained(1, 60.0)  # by now the learner is what everything waits for
        group = room.controller.cluster.groups[WorkerId(f"t/{gpu}")]
        if gpu < 4:
            room.feed(ev.GroupPulled(group.leader, group.epoch, 1, LeaseId(0)))
    assert room.controller.queue.waiting_of(WorkClass.TRAIN) > 0
    assert of(room.pull(one, capacity=16, seen=mine.lease.id), ef.PrepareBatch)


def test_rollouts_are_counted_by_their_steps_and_made_ones_without_evaluation() -> None:
    """Evaluation of four times the steps: of what waits it is most of the work, and few rollouts of it."""
    plan = dataclasses.replace(
        SINGLE, evaluation=EvaluationConfig(every=1, images_per_prompt=16, steps=32), rollout_steps=8,
        pipeline=PipelineConfig(axis="prompt", switch_s=0.1), bounded=True, micro_batch_size=2,
    )  # fmt: skip
    room = Room(plan, [Prompt(PromptId("t"), "a square", {})])
    room.now = 100.0
    seen_pace(room, rollout_s=4.0, train_s=0.5)
    (spot,) = room.bring_up(dataclasses.replace(SPOT, gpus=1))
    held = only(room.pull(spot, capacity=2), ef.GrantLease)
    queue, training = room.controller.queue, room.controller.training
    backlog = Backlog(8, 32, 0, 0, 0.5, whole=False, switch_s=0.1, generating=False)
    todo = Remaining(queue, backlog)
    assert (todo.waiting, todo.held) == (2 + 16 * 4, 2)
    assert todo.trained_share == 4 / (4 + 64)
    assert [todo.rollouts(counted) for counted in (1, 2, 3, 6, 7, 66)] == [1, 2, 3, 3, 4, 18]
    room.feed(ev.LeaseCompleted(spot.leader, held.lease.id, spot.epoch, held.lease.rollouts, V0))
    assert training.untrained == 2, "made, and not scored"


def test_a_plan_trains_all_that_is_left_also_where_nobody_else_works(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    planned: list[Timeline] = []

    def noted(timeline: Timeline, *, gain_min_s: float) -> RolloutBudget:
        planned.append(timeline)
        return find_budget(timeline, gain_min_s=gain_min_s)

    monkeypatch.setattr(takes_module, "find_budget", noted)
    room, spot, first, (trainer,) = generating(prompts=8, held=2, trainers=1)
    room.feed(ev.LeaseCompleted(spot.leader, first.lease.id, spot.epoch, first.lease.rollouts, V0))
    room.pull(trainer, capacity=16)
    (timeline,) = planned
    assert timeline.waiting == 14
    assert timeline.ready + len(timeline.coming) == 2, "two wait for scores"


def test_evaluation_is_not_expected_to_be_trained() -> None:
    """Training lasts long: where all that waits were trained, making it sooner would hardly show."""
    plan = dataclasses.replace(
        SINGLE,
        evaluation=EvaluationConfig(every=1, images_per_prompt=16, steps=SINGLE.evaluation.steps),
        pipeline=PipelineConfig(switch_s=0.1),
        bounded=True,
    )
    room = Room(plan, [Prompt(PromptId("t"), "a square", {})])
    room.now = 100.0
    seen_pace(room, rollout_s=4.0, train_s=75.0)
    (spot,) = room.bring_up(dataclasses.replace(SPOT, gpus=1))
    assert {rollout.purpose for rollout in only(room.pull(spot, capacity=4), ef.GrantLease).rollouts} == {
        Purpose.TRAIN
    }
    (trainer,) = room.bring_up(TRAINER)
    taken = only(room.pull(trainer, capacity=16), ef.GrantLease)
    assert {rollout.purpose for rollout in taken.rollouts} == {Purpose.EVAL}
    assert 4 <= len(taken.rollouts) <= 12, "about half of it"


def test_the_learner_is_given_nothing_while_its_gpus_roll_out() -> None:
    plan = dataclasses.replace(SINGLE, pipeline=PipelineConfig(axis="prompt"), micro_batch_size=2)
    room = Room(plan)
    (spot,) = room.bring_up(dataclasses.replace(SPOT, gpus=1))
    (trainer,) = room.bring_up(TRAINER)
    held = only(room.pull(trainer, capacity=2), ef.GrantLease)
    first = only(room.pull(spot, capacity=2), ef.GrantLease)
    assert not of(finish(room, spot, first), ef.PrepareBatch), "a group is there, and no GPU to train it"
    assert of(finish(room, trainer, held), ef.PrepareBatch)
    assert room.controller.cluster.serving.trainer_budget == 0


def test_groups_of_a_tail_count_as_what_they_part_into() -> None:
    """When an iteration begins, the paces of the tail's few large groups say nothing of what will be made."""
    room = Room(dataclasses.replace(PLAN, prompts_per_iteration=1, group_size=2))
    todo: list[ef.Effect] = []
    for group in room.bring_up(dataclasses.replace(SPOT, gpus=4)):
        todo += of(room.pull(group), ef.StopGroup)
    while todo:
        match todo.pop():
            case ef.StopGroup(leader, epoch):
                todo += room.feed(ev.GroupStopped(leader, epoch))
            case ef.FormGroup(leader, epoch):
                todo += room.feed(ev.GroupFormed(leader, epoch))
    cluster = room.controller.cluster
    assert {len(group.members) for group in cluster.groups.values()} == {2}, "two rollouts, four GPUs"
    soon = {degree: list(groups_soon(cluster, degree, trains=False)) for degree in (1, 2)}
    assert soon == {degree: [GroupKind("H100", degree)] * (4 // degree) for degree in (1, 2)}
    assert not list(groups_soon(cluster, 1, trains=True))
    room.feed(ev.NodeNoticed(SPOT.id, room.now + 1.0))
    assert not list(groups_soon(cluster, 1, trains=False)), "it drains"


def test_each_gpu_of_the_learner_turns_once_and_what_turning_takes_is_no_pace() -> None:
    trainers = dataclasses.replace(TRAINER, gpus=2)
    changes = {"pipeline": PipelineConfig(switch_s=17.5), "bounded": True, "ranks": 2}
    room = Room(dataclasses.replace(SINGLE, prompts_per_iteration=8, **changes))  # type: ignore[arg-type]
    serving = room.controller.cluster.serving
    room.now = 10.0
    seen_pace(room, rollout_s=8.0, train_s=0.5)
    one, two = room.bring_up(trainers)
    grants = [only(room.pull(group), ef.GrantLease) for group in (one, two)]
    assert serving.turned == {one.leader, two.leader}
    room.now += 17.5 + 8.0
    for group, grant in zip((one, two), grants, strict=True):
        finish(room, group, grant)
    pace = room.controller.cluster.pace
    assert pace.step_s(FAST, trains=True) == pytest.approx(1.0), "8 s for the 8 steps of each"
    assert serving.learner_turns() == 17.5
    assert serving.learner_turns() == 0.0, "its GPUs have turned"


def test_a_trainer_that_was_slow_once_is_not_given_up() -> None:
    pace = Pace()
    for lease, (filler, seconds) in enumerate(
        ((None, 8.0), (Filler.TRAINERS, 80.0), (Filler.TRAINERS, 80.0))
    ):
        pace.begin(LeaseId(lease), WorkerId(f"w{lease}"), FAST, 8, filler, 0.0)
        pace.end(LeaseId(lease), seconds)
    assert pace.step_s(FAST) == pytest.approx(1.0), "each is on its own"
    assert pace.step_s(FAST, trains=True) == pytest.approx(1.5)


def test_what_is_not_trained_yet_is_known_without_a_look_at_the_samples() -> None:
    """It is asked at every event, of which each of a thousand samples makes several."""

    class Unread(set[RolloutId]):
        def __sub__(self, other: object) -> set[RolloutId]:
            raise AssertionError("all samples are looked at")

    room, spot, grant, _ = generating(prompts=8, held=4, trainers=2)
    current, training = room.controller.work.current, room.controller.training
    for _ in range(2):
        made = sum(map(len, current.groups.values())) - len(current.unmade)
        trained = sum(map(len, training.trained_in.values()))
        unscored, current.unscored = current.unscored, Unread(current.unscored)
        assert training.untrained == made - trained
        current.unscored = unscored
        finish(room, spot, grant)
    assert made > 0
