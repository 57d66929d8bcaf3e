"""The synchronous schedule, step by step; random schedules are in tests/invariant."""

from __future__ import annotations

import dataclasses
import json

import pytest
from controller_run import (
    NODE,
    PLAN,
    TEST,
    TRAIN,
    WORKER,
    Run,
    lose_member,
    reward,
)

from spotlight.config.sections.evaluation import EvaluationConfig
from spotlight.runtime.observer import stop_note
from spotlight.scheduler import events as ev
from spotlight.scheduler.controller import Controller
from spotlight.scheduler.effects import (
    AbandonLease,
    CommitCheckpoint,
    DiscardSamples,
    Effect,
    FinishRun,
    GrantLease,
    PrepareBatch,
    ReportEvaluation,
    ScoreSamples,
    StepOptimizer,
    TrainMicroBatch,
    WriteRecord,
)
from spotlight.scheduler.plan import Plan
from spotlight.scheduler.records import CommitRejected
from spotlight.scheduler.stages import Stage
from spotlight.scheduler.types import (
    DropReason,
    Phase,
    PolicyVersion,
    Purpose,
    Rollout,
    RolloutId,
)
from spotlight_rewards.base.prompts import Prompt, PromptId


def test_the_order_of_a_run() -> None:
    run = Run()
    assert run.until(FinishRun) == FinishRun(None)
    batch = ["PrepareBatch", "TrainMicroBatch", "TrainMicroBatch", "StepOptimizer", "FinishBatch"]
    iteration = [*batch, "PublishWeights", "CommitCheckpoint"]
    assert run.kinds() == ["ReportEvaluation", *iteration, *iteration, "ReportEvaluation", "FinishRun"]
    reports = [effect for effect in run.log if isinstance(effect, ReportEvaluation)]
    assert [(report.iteration, report.version) for report in reports] == [(0, 0), (2, 2)]
    assert [len(report.scored) for report in reports] == [2, 2]
    assert [len(report.issued) for report in reports] == [2, 2]
    ledger = run.controller.ledger
    assert (ledger.trained, ledger.evaluated, ledger.in_flight) == (12, 4, 0)


def test_an_iteration_issues_groups_with_seeds_of_their_own() -> None:
    run = Run()
    rollouts = list(run.controller.rollouts.values())
    training = [rollout for rollout in rollouts if rollout.purpose == "train"]
    assert [rollout.member for rollout in training] == [0, 1, 2] * 2
    assert len({rollout.seed for rollout in rollouts}) == len(rollouts) == 8
    assert {rollout.steps for rollout in training} == {4}
    again = Run(dataclasses.replace(PLAN, run_seed=1)).controller.rollouts
    assert all(again[r.id].seed != r.seed for r in training)
    # Evaluation compares weights, so its randomness is the same in every run.
    assert all(again[r.id].seed == r.seed for r in rollouts if r.purpose == "eval")


def test_several_updates_divide_the_batch() -> None:
    run = Run(dataclasses.replace(PLAN, updates_per_batch=2, iterations=1))
    run.until(FinishRun)
    batches = [effect.micro_batch for effect in run.log if isinstance(effect, TrainMicroBatch)]
    assert [(batch.update, len(batch.rollouts), batch.update_samples) for batch in batches] == [
        (0, 3, 3),
        (1, 3, 3),
    ]
    assert len({rollout for batch in batches for rollout in batch.rollouts}) == 6
    assert run.controller.version == 2


def test_without_held_out_prompts_a_run_still_ends() -> None:
    assert Run(test=[]).until(FinishRun) == FinishRun(None)


# -- drops -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("at_start", "at_end"), [(True, False), (False, True), (False, False)])
def test_evaluations_at_start_and_end_can_be_left_out(at_start: bool, at_end: bool) -> None:
    evaluation = EvaluationConfig(steps=3, images_per_prompt=2, every=0, at_start=at_start, at_end=at_end)
    plan = dataclasses.replace(PLAN, evaluation=evaluation)
    run = Run(plan)
    assert run.until(FinishRun) == FinishRun(None)
    reported = [effect.iteration for effect in run.log if isinstance(effect, ReportEvaluation)]
    assert reported == [0] * at_start + [PLAN.iterations] * at_end


def test_by_default_a_failing_reward_stops_the_run_with_its_error() -> None:
    finish = Run(answer=lose_member(1)).until(FinishRun)
    assert isinstance(finish, FinishRun)
    assert finish.error is not None
    first, remedy = finish.error.splitlines()
    assert first == "t000000-000-001: reward_error: it raised"
    assert "reward_policy.on_failure=drop" in remedy


def test_dropped_samples_leave_smaller_groups() -> None:
    run = Run(dataclasses.replace(PLAN, max_drop_share=0.5), lose_member(1))
    prepared = run.until(PrepareBatch)
    assert isinstance(prepared, PrepareBatch)
    assert [group.rollouts for group in prepared.groups] == [
        ("t000000-000-000", "t000000-000-002"),
        ("t000000-001-000", "t000000-001-002"),
    ]
    assert set(prepared.scores) == {rollout for group in prepared.groups for rollout in group.rollouts}
    run.feed(*run.answers(prepared))
    assert run.until(FinishRun) == FinishRun(None)


@pytest.mark.parametrize(("share", "stops"), [(0.25, False), (0.2, True)])
def test_the_share_of_drops_is_bounded(share: float, stops: bool) -> None:
    finish = Run(dataclasses.replace(PLAN, max_drop_share=share, iterations=1), lose_member(1)).until(
        FinishRun
    )
    assert isinstance(finish, FinishRun)
    if stops:
        assert finish.error is not None
        assert "2 of 8 samples were dropped, more than reward_policy.max_drop_share = 0.2" in finish.error
        assert "it raised" in finish.error
    else:
        assert finish.error is None  # 2 of 8 is not more than 0.25


def test_a_lone_survivor_is_dropped_with_its_group() -> None:
    def answer(rollout: Rollout) -> ev.Event:
        if rollout.id in ("t000000-000-000", "t000000-000-001"):
            return ev.RewardFailed(rollout.id, DropReason.REWARD_TIMEOUT, "slow")
        return reward(rollout)

    run = Run(dataclasses.replace(PLAN, max_drop_share=0.5), answer)
    prepared = run.until(PrepareBatch)
    assert isinstance(prepared, PrepareBatch)
    assert [group.rollouts[0][:11] for group in prepared.groups] == ["t000000-001"]
    assert [drop.reason for drop in run.drops()] == [
        DropReason.REWARD_TIMEOUT,
        DropReason.REWARD_TIMEOUT,
        DropReason.GROUP_TOO_SMALL,
    ]


def test_ranks_train_equally_many_samples() -> None:
    plan = dataclasses.replace(PLAN, ranks=4, micro_batch_size=4, max_drop_share=0.5)
    run = Run(plan)
    prepared = run.until(PrepareBatch)
    assert isinstance(prepared, PrepareBatch)
    assert [len(group.rollouts) for group in prepared.groups] == [2, 2]
    assert [len(batch.rollouts) for batch in prepared.micro_batches] == [4]
    assert {drop.reason for drop in run.drops()} == {DropReason.UNEVEN_BATCH}
    discarded = {r for effect in run.log if isinstance(effect, DiscardSamples) for r in effect.rollouts}
    assert discarded.isdisjoint(prepared.scores)


@pytest.mark.parametrize(
    ("failing", "error"),
    [
        (Purpose.TRAIN, "no group kept two scored samples"),
        (Purpose.EVAL, "not one evaluation sample was scored"),
    ],
)
def test_nothing_left_to_learn_from_or_judge_by_is_an_error(failing: Purpose, error: str) -> None:
    run = Run(
        dataclasses.replace(PLAN, max_drop_share=1.0),
        lambda r: (
            ev.RewardFailed(r.id, DropReason.REWARD_ERROR, "")
            if r.purpose is failing
            else ev.SamplesRewarded({r.id: {"reward": float(r.member)}}, 0)
        ),
    )
    finish = run.until(FinishRun)
    assert isinstance(finish, FinishRun)
    assert finish.error is not None
    assert error in finish.error


@pytest.mark.parametrize("scores", [{"reward": float("nan")}, {"reward": float("inf")}, {"strict": 1.0}])
def test_a_score_that_is_no_number_is_a_drop_and_never_a_zero(scores: dict[str, float]) -> None:
    run = Run(dataclasses.replace(PLAN, max_drop_share=1.0), lambda r: ev.SamplesRewarded({r.id: scores}, 0))
    run.until(FinishRun)
    assert {drop.reason for drop in run.drops()} == {DropReason.REWARD_NOT_FINITE}
    assert run.controller.ledger.trained == 0


def test_a_rollout_that_fails_twice_is_dropped_and_one_that_fails_once_is_not() -> None:
    run = Run(dataclasses.replace(PLAN, max_drop_share=1.0))
    for attempt in (1, 2):
        granted = run.pull(1)[-1]
        assert isinstance(granted, GrantLease)
        run.todo.clear()
        lease, rollout = granted.lease, granted.rollouts[0]
        assert rollout.id == "t000000-000-000"
        effects = run.feed(ev.RolloutFailed(WORKER, lease.id, lease.epoch, rollout.id, "not finite"))
        assert (DiscardSamples((rollout.id,)) in effects) == (attempt == 2)
    assert [(drop.rollout, drop.reason, drop.detail) for drop in run.drops()] == [
        ("t000000-000-000", DropReason.ROLLOUT_FAILED, "not finite")
    ]


# -- late, early and wrong answers -------------------------------------------------------------------------


def rejections(effects: list[Effect]) -> list[str]:
    records = [effect.record for effect in effects if isinstance(effect, WriteRecord)]
    others = [effect for effect in effects if not isinstance(effect, WriteRecord | AbandonLease)]
    assert not others, f"a rejected message had consequences: {effects}"
    return [record.reason for record in records if isinstance(record, CommitRejected)]


def grant(run: Run, now: float = 0.0) -> GrantLease:
    granted = run.pull(1, now)[-1]
    run.todo.clear()
    assert isinstance(granted, GrantLease)
    return granted


def completion(granted: GrantLease, version: int = 0) -> ev.LeaseCompleted:
    lease = granted.lease
    return ev.LeaseCompleted(WORKER, lease.id, lease.epoch, lease.rollouts, PolicyVersion(version))


def test_a_second_completion_is_a_duplicate() -> None:
    run = Run()
    granted = grant(run)
    assert any(isinstance(effect, ScoreSamples) for effect in run.feed(completion(granted)))
    assert rejections(run.feed(completion(granted))) == ["duplicate"]


@pytest.mark.parametrize("loss", [ev.NodeLost(NODE.id), ev.NodeJoined(NODE), ev.TimePassed()])
def test_a_worker_that_was_given_up_cannot_commit(loss: ev.Event) -> None:
    run = Run()
    granted = grant(run)
    run.feed(loss, now=PLAN.lease_s)
    assert rejections(run.feed(completion(granted), PLAN.lease_s)) == ["stale_epoch"]
    progress = ev.LeaseProgressed(WORKER, granted.lease.id, granted.lease.epoch, 1)
    assert rejections(run.feed(progress, PLAN.lease_s)) == ["stale_epoch"]


def test_progress_outlives_the_worker() -> None:
    run = Run()
    granted = grant(run)
    lease, rollout = granted.lease, granted.rollouts[0].id
    assert run.feed(ev.LeaseProgressed(WORKER, lease.id, lease.epoch, 2)) == []
    run.feed(ev.NodeLost(NODE.id))
    run.feed(ev.NodeJoined(NODE))
    again = grant(run)
    assert again.resume == {rollout: 2}
    assert again.lease.epoch > lease.epoch


def test_a_sample_of_another_version_is_made_again() -> None:
    run = Run()
    granted = grant(run)
    effects = run.feed(completion(granted, version=1))
    assert not any(isinstance(effect, ScoreSamples) for effect in effects)
    assert grant(run).lease.rollouts == granted.lease.rollouts


def test_scores_count_once_and_only_for_finished_samples() -> None:
    run = Run()
    granted = grant(run)
    early = reward(granted.rollouts[0])
    assert rejections(run.feed(early)) == ["unknown"]
    run.feed(completion(granted))
    run.feed(early)
    assert rejections(run.feed(early)) == ["duplicate"]
    lost = ev.RewardFailed(granted.rollouts[0].id, DropReason.REWARD_TIMEOUT, "late")
    assert rejections(run.feed(lost)) == ["duplicate"]
    assert rejections(run.feed(ev.SamplesRewarded({RolloutId("t000099-000-000"): {"reward": 1.0}}, 0))) == [
        "unknown"
    ]


@pytest.mark.parametrize(
    "event",
    [
        ev.RunStarted(),
        ev.BatchPrepared(0),
        ev.MicroBatchTrained(0, 0, 0),
        ev.OptimizerStepped(0, 0, 0.0, 0.0),
        ev.BatchFinished(0),
        ev.EvaluationReported(0),
        ev.CheckpointCommitted(0),
    ],
)
def test_an_answer_nobody_asked_for_is_a_bug_of_the_driver(event: ev.Event) -> None:
    with pytest.raises(RuntimeError, match="drivers answer effects in order"):
        Run().feed(event)


def test_after_the_end_only_time_is_billed() -> None:
    run = Run(answer=lose_member(0))
    run.until(FinishRun)
    assert run.controller.stage is Stage.OVER
    position = run.controller.ledger.position
    assert run.pull(1) == []
    assert run.feed(reward(next(iter(run.controller.rollouts.values())))) == []
    assert run.feed(ev.RunStarted()) == []
    assert run.feed(ev.GpuTimeSpent(WORKER, Phase.IDLE, 2.0)) == []
    assert run.controller.ledger.billed_s == 2.0
    assert run.controller.ledger.position == position


# -- checkpoints and plans ---------------------------------------------------------------------------------


@pytest.mark.parametrize(("every", "iterations"), [(1, [1, 2, 3, 4, 5]), (2, [2, 4, 5]), (9, [5])])
def test_checkpoints_come_when_due_and_at_the_end(every: int, iterations: list[int]) -> None:
    run = Run(dataclasses.replace(PLAN, iterations=5, checkpoint_every=every))
    run.until(FinishRun)
    assert [e.iteration for e in run.log if isinstance(e, CommitCheckpoint)] == iterations


def test_a_finished_run_can_be_continued() -> None:
    run = Run()
    run.until(FinishRun)
    last = [effect for effect in run.log if isinstance(effect, CommitCheckpoint)][-1]
    longer = dataclasses.replace(PLAN, iterations=3)
    controller = Controller.restore(longer, TRAIN, TEST, json.loads(json.dumps(last.snapshot)))
    assert (controller.iteration, controller.version, controller.ledger.position) == (2, 2, last.position)
    run.start(controller)
    assert run.until(FinishRun) == FinishRun(None)
    assert controller.version == 3


def test_a_snapshot_of_something_else_is_refused() -> None:
    with pytest.raises(ValueError, match=r"controller\.version: Field required"):
        Controller.restore(PLAN, TRAIN, TEST, {"iteration": 1})


def test_unusable_plans_and_prompts_are_refused() -> None:
    with pytest.raises(ValueError, match="no training prompts"):
        Controller(PLAN, [], TEST)
    with pytest.raises(ValueError, match="do not divide by 3 ranks"):
        Controller(dataclasses.replace(PLAN, ranks=3), TRAIN, TEST)
    with pytest.raises(ValueError, match="two prompts share the id train0"):
        Controller(PLAN, TRAIN, [Prompt(PromptId("train0"), "something else", {})])


# -- a stop on request -------------------------------------------------------------------------------------


def committed_by(run: Run) -> list[CommitCheckpoint]:
    return [effect for effect in run.log if isinstance(effect, CommitCheckpoint)]


def decided(run: Run, since: int = 0) -> list[tuple[int, object]]:
    records = ((each.position, each.record) for each in run.log if isinstance(each, WriteRecord))
    return [numbered for numbered in records if numbered[0] > since]


def stopped_after(plan: Plan, events: int) -> Run | None:
    """A run that is asked to stop after so many answers, at its end; None: it has fewer."""
    run, answered = Run(plan), 0
    while True:
        if not run.todo:
            run.pull(4)
        effect = run.todo.pop(0)
        if isinstance(effect, FinishRun):
            return run if answered > events else None
        for event in run.answers(effect):
            if answered == events:
                run.feed(ev.StopRequested())
            answered += 1
            run.feed(event)
            if isinstance(run.log[-1], FinishRun):
                return run if answered > events else None


@pytest.mark.parametrize("every", [1, 2, 9])
@pytest.mark.parametrize("updates", [1, 2])
def test_a_stop_at_any_moment_is_resumed_exactly(every: int, updates: int) -> None:
    plan = dataclasses.replace(PLAN, iterations=4, checkpoint_every=every, updates_per_batch=updates)
    whole = Run(plan)
    whole.until(FinishRun)
    for events in range(10**6):
        if (run := stopped_after(plan, events)) is None:
            break
        assert run.log[-1] in (FinishRun(None, stopped=True), FinishRun(None))
        trained = run.controller.iteration
        saved = committed_by(run)
        # Nothing of an iteration that was trained to its end is lost.
        assert (saved[-1].iteration if saved else 0) == trained
        if run.log[-1] == FinishRun(None) or not saved:
            continue
        resumed = Run(plan)
        resumed.log.clear()
        resumed.start(Controller.restore(plan, TRAIN, TEST, saved[-1].snapshot))
        resumed.until(FinishRun)
        kept = [numbered for numbered in decided(run) if numbered[0] <= saved[-1].position]
        assert [repr(each) for each in kept + decided(resumed)] == [repr(each) for each in decided(whole)]
    assert events > 20


def test_a_run_without_nodes_stops_at_once() -> None:
    run = Run(dataclasses.replace(PLAN, checkpoint_every=9))
    run.feed(ev.NodeLost(NODE.id))
    assert run.feed(ev.StopRequested())[-1] == FinishRun(None, stopped=True)
    assert stop_note(run.controller) == "a resumed run begins iteration 1 again"


def test_before_the_learner_is_up_a_run_stops_at_once() -> None:
    controller = Controller(PLAN, TRAIN, TEST)
    assert controller.handle(ev.StopRequested(), 0.0) == [FinishRun(None, stopped=True)]


def test_a_lost_learner_ends_a_run_that_is_to_stop() -> None:
    run = Run(dataclasses.replace(PLAN, updates_per_batch=2))
    step = run.until(StepOptimizer)
    assert (
        run.feed(ev.StopRequested()) == []
    )  # the step is under way, and the iteration is trained to its end
    assert stop_note(run.controller).startswith("iteration 1 is trained to its end first")
    for event in run.answers(step):
        run.feed(event)
    assert run.feed(ev.LearnerLost("frozen"))[-1] == FinishRun(None, stopped=True)
