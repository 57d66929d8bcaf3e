"""Which samples of a group are trained, and what becomes of the others."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import combinations
from typing import get_args

import pytest
from controller_run import PLAN, Run
from hypothesis import given
from hypothesis import strategies as st
from test_cluster import PLAN as CLUSTERED
from test_cluster import SPOT, Room

from spotlight.config.load import load_config
from spotlight.config.requires import Requires
from spotlight.config.sections.algorithm import DiffusionNFTConfig, SilentGroups, TrainPolicy
from spotlight.config.sections.learner_section import UpdateSplit
from spotlight.config.sections.pipeline import PipelineConfig
from spotlight.scheduler import effects as ef
from spotlight.scheduler import events as ev
from spotlight.scheduler.plan import TRAINS_ALL, Plan, TrainingChoice
from spotlight.scheduler.policies.selection import sample_variance
from spotlight.scheduler.policies.subset.subset import choose_seeds
from spotlight.scheduler.types import Baseline, DropReason, LeaseId, MicroBatch, NodeId, Rollout
from spotlight_rewards.base.errors import ConfigError

REWARDS = st.dictionaries(
    st.integers(0, 2**62),
    st.one_of(st.sampled_from([0.0, 0.5, 1.0]), st.floats(-3, 3)),
    min_size=2,
    max_size=9,
)
POLICIES = st.sampled_from(get_args(TrainPolicy))


# -- the choice --------------------------------------------------------------------------------------------


@given(REWARDS, st.integers(2, 10), POLICIES, st.integers(0, 99), st.data())
def test_so_many_are_chosen_whatever_their_order(
    rewards: dict[int, float], count: int, policy: TrainPolicy, seed: int, data: st.DataObject
) -> None:
    chosen = choose_seeds(rewards, count, policy, seed)
    assert chosen <= set(rewards)
    assert len(chosen) == min(count, len(rewards))
    other = dict(data.draw(st.permutations(list(rewards.items()))))
    assert choose_seeds(other, count, policy, seed) == chosen


@given(REWARDS, st.integers(2, 10))
def test_no_other_subset_has_more_variance(rewards: dict[int, float], count: int) -> None:
    chosen = choose_seeds(rewards, count, "max_variance", 0)
    size = len(chosen)
    best = max(sample_variance(subset) for subset in combinations(rewards.values(), size))
    assert sample_variance([rewards[seed] for seed in chosen]) == pytest.approx(best, rel=1e-6, abs=1e-9)


@given(REWARDS)
def test_of_two_one_is_the_best_and_one_the_worst(rewards: dict[int, float]) -> None:
    """So that diffusion-dpo with ``extremes`` needs no others."""
    low, high = sorted(rewards[seed] for seed in choose_seeds(rewards, 2, "max_variance", 0))
    assert (low, high) == pytest.approx((min(rewards.values()), max(rewards.values())), rel=1e-6, abs=1e-6)


@given(REWARDS, st.integers(2, 10))
def test_the_farthest_lie_on_both_sides_of_the_mean_and_no_nearer_than_the_rest(
    rewards: dict[int, float], count: int
) -> None:
    chosen = choose_seeds(rewards, count, "farthest", 0)
    mean = sum(rewards.values()) / len(rewards)
    above = {seed: reward - mean for seed, reward in rewards.items()}
    least = sorted(abs(above[seed]) for seed in chosen)[1]  # the nearest may be there for its side
    assert all(abs(above[seed]) <= least + 1e-9 for seed in set(rewards) - chosen)
    for sign in (-1, 1):
        there = any(sign * value > 1e-9 for value in above.values())
        assert not there or any(sign * above[seed] > 0 for seed in chosen), "a side of the mean is missing"


@given(REWARDS, st.integers(2, 10), st.sampled_from(sorted({*get_args(TrainPolicy)} - {"random"})))
def test_of_rewards_that_differ_some_are_chosen_that_do(
    rewards: dict[int, float], count: int, policy: TrainPolicy
) -> None:
    chosen = {rewards[seed] for seed in choose_seeds(rewards, count, policy, 0)}
    assert (len(chosen) > 1) == (len({*rewards.values()}) > 1)


def test_the_farthest_of_yes_and_no_are_not_all_no() -> None:
    rewards = {seed: float(seed < 20) for seed in range(32)}
    chosen = choose_seeds(rewards, 8, "farthest", 0)
    assert sorted(rewards[seed] for seed in chosen) == [0.0] * 7 + [1.0]


def test_a_random_choice_ignores_rewards_and_depends_on_its_seed() -> None:
    seeds = range(100, 112)
    flat, steep = dict.fromkeys(seeds, 1.0), {seed: float(seed) for seed in seeds}
    drawn = [choose_seeds(steep, 6, "random", draw) for draw in range(9)]
    assert drawn == [choose_seeds(flat, 6, "random", draw) for draw in range(9)]
    assert len(set(drawn)) > 1
    assert choose_seeds(steep, 5, "top_and_bottom", 0) == {100, 101, 109, 110, 111}


# -- in the controller -------------------------------------------------------------------------------------

CHOOSES = dataclasses.replace(PLAN, group_size=6, choice=TrainingChoice(3), iterations=1, max_drop_share=1.0)


def graded(reward: Callable[[Rollout], float]) -> Callable[[Rollout], ev.Event]:
    return lambda rollout: ev.SamplesRewarded({rollout.id: {"reward": reward(rollout)}}, 0)


def slot_of(rollout: str) -> int:
    return int(rollout.split("-")[1])


STEEP = graded(lambda rollout: float(rollout.member))
FIRST_SILENT = graded(lambda rollout: float(rollout.member) if slot_of(rollout.id) else 1.0)
SILENT = graded(lambda rollout: 1.0)


def batches(run: Run) -> list[MicroBatch]:
    return [effect.micro_batch for effect in run.log if isinstance(effect, ef.TrainMicroBatch)]


def trained(run: Run) -> list[str]:
    return [name for batch in batches(run) for name in batch.rollouts]


def report(run: Run) -> ef.ReportChoice:
    (found,) = (effect for effect in run.log if isinstance(effect, ef.ReportChoice))
    return found


def finished(plan: Plan, answer: Callable[[Rollout], ev.Event]) -> Run:
    run = Run(plan, answer)
    assert run.until(ef.FinishRun) == ef.FinishRun(None)
    return run


@pytest.mark.parametrize("axis", ["none", "prompt", "generation"])
def test_extremes_are_trained_and_the_others_end_with_a_reason(axis: str) -> None:
    pipeline = PipelineConfig.model_validate({"axis": axis, "slice_size": 2, "baseline": "group"})
    run = finished(dataclasses.replace(CHOOSES, pipeline=pipeline, micro_batch_size=3), STEEP)
    assert sorted(name[-3:] for name in trained(run)) == ["000"] * 2 + ["004"] * 2 + ["005"] * 2
    assert {drop.reason for drop in run.drops()} == {DropReason.NOT_CHOSEN}
    assert report(run) == ef.ReportChoice(0, 6, 6, 0)
    ledger = run.controller.ledger
    assert (ledger.trained, ledger.dropped[DropReason.NOT_CHOSEN], ledger.in_flight) == (6, 6, 0)
    discarded = [name for one in run.log if isinstance(one, ef.DiscardSamples) for name in one.rollouts]
    assert sorted(discarded) == sorted(set(discarded))
    assert len([name for name in discarded if name.startswith("t")]) == 12
    assert {batch.update_samples for batch in batches(run)} == {6}


def test_of_fewer_survivors_all_are_trained() -> None:
    def answer(rollout: Rollout) -> ev.Event:
        if rollout.id.startswith("t") and rollout.member > slot_of(rollout.id):
            return ev.RewardFailed(rollout.id, DropReason.REWARD_ERROR, "it raised")
        return STEEP(rollout)

    run = finished(CHOOSES, answer)  # one survivor of the first group, two of the second
    assert sorted(trained(run)) == ["t000000-001-000", "t000000-001-001"]
    assert report(run).not_chosen == 0


def test_ranks_share_what_is_chosen() -> None:
    plan = dataclasses.replace(CHOOSES, ranks=2, micro_batch_size=4, choice=TrainingChoice(5))
    run = finished(plan, STEEP)
    assert [len(batch.rollouts) for batch in batches(run)] == [4, 4, 2]
    assert not any(drop.reason is DropReason.UNEVEN_BATCH for drop in run.drops())


def test_advantages_over_what_was_generated_come_with_the_scores_of_the_others() -> None:
    run = finished(dataclasses.replace(CHOOSES, choice=TrainingChoice(4, over="generated")), STEEP)
    (prepared,) = (effect for effect in run.log if isinstance(effect, ef.PrepareBatch))
    for comparison in prepared.comparisons:
        assert comparison.baseline is Baseline.GROUP
        assert [scores["reward"] for scores in comparison.others] == [2.0, 3.0]


@pytest.mark.parametrize("silent", get_args(SilentGroups))
@pytest.mark.parametrize("axis", ["none", "prompt"])
def test_silent_groups_are_trained_skipped_or_counted_as_zero(silent: SilentGroups, axis: str) -> None:
    pipeline = PipelineConfig.model_validate({"axis": axis})
    choice = TrainingChoice(silent_groups=silent)
    run = finished(
        dataclasses.replace(CHOOSES, choice=choice, pipeline=pipeline, micro_batch_size=3), FIRST_SILENT
    )
    (step,) = (effect for effect in run.log if isinstance(effect, ef.StepOptimizer))
    assert (step.samples, step.zeros) == {"train": (12, 0), "skip": (6, 0), "as_zero": (6, 6)}[silent]
    if axis == "none":
        assert {batch.update_samples for batch in batches(run)} == {step.samples + step.zeros}
    if silent != "train":
        assert report(run) == ef.ReportChoice(0, 6, 0, 6)
        assert {drop.reason for drop in run.drops()} == {DropReason.SILENT_GROUP}


@pytest.mark.parametrize("samples", [None, 3])
def test_where_every_group_is_silent_an_iteration_still_has_its_step(samples: int | None) -> None:
    choice = TrainingChoice(samples, silent_groups="skip")
    run = finished(dataclasses.replace(CHOOSES, choice=choice), SILENT)
    assert run.controller.version == 1
    assert report(run).trained == 2 * choice.of_group(6)
    assert report(run).silent == 0


@pytest.mark.parametrize("axis", ["none", "prompt"])
@pytest.mark.parametrize("silent", get_args(SilentGroups))
@pytest.mark.parametrize("first", [True, False])
def test_a_silent_update_still_has_its_step(silent: SilentGroups, axis: str, first: bool) -> None:
    pipeline = PipelineConfig.model_validate({"axis": axis})
    choice = TrainingChoice(silent_groups=silent)
    plan = dataclasses.replace(
        CHOOSES, choice=choice, pipeline=pipeline, updates_per_batch=2, micro_batch_size=3
    )
    differ = graded(lambda rollout: rollout.member * float((slot_of(rollout.id) > 0) == first))
    run = finished(plan, differ)
    steps = [effect for effect in run.log if isinstance(effect, ef.StepOptimizer)]
    assert [(step.update, step.samples, step.zeros) for step in steps] == [(0, 6, 0), (1, 6, 0)]


@pytest.mark.parametrize("lost", [0, 1])
def test_whole_groups_too_small_for_the_ranks_do_not_take_the_step_with_them(lost: int) -> None:
    plan = dataclasses.replace(CHOOSES, whole_groups=True, ranks=6, micro_batch_size=6)
    plan = dataclasses.replace(plan, choice=TrainingChoice(silent_groups="skip"))

    def answer(rollout: Rollout) -> ev.Event:
        if slot_of(rollout.id) == 1 and rollout.id.startswith("t") and rollout.member < lost:
            return ev.RewardFailed(rollout.id, DropReason.REWARD_ERROR, "it raised")
        return FIRST_SILENT(rollout)

    run = finished(plan, answer)
    assert {slot_of(name) for name in trained(run)} == {1 - lost}
    (step,) = (effect for effect in run.log if isinstance(effect, ef.StepOptimizer))
    assert step.samples == 6


def test_silent_samples_fill_up_ranks_rather_than_others_being_left_out() -> None:
    choice = TrainingChoice(5, silent_groups="as_zero")
    run = finished(dataclasses.replace(CHOOSES, choice=choice, ranks=2, micro_batch_size=4), FIRST_SILENT)
    assert sorted(map(slot_of, trained(run))) == [0, 1, 1, 1, 1, 1]
    assert report(run) == ef.ReportChoice(0, 6, 2, 4)
    (step,) = (effect for effect in run.log if isinstance(effect, ef.StepOptimizer))
    assert (step.samples, step.zeros) == (6, 4)


@pytest.mark.parametrize("split", ["shuffled", "every_group"])
@pytest.mark.parametrize("silent", get_args(SilentGroups))
def test_updates_share_the_samples_of_groups_that_are_compared_whole(
    split: UpdateSplit, silent: SilentGroups
) -> None:
    plan = dataclasses.replace(CHOOSES, choice=TrainingChoice(silent_groups=silent), updates_per_batch=3)
    plan = dataclasses.replace(plan, update_split=split, ranks=2, micro_batch_size=2)
    run = finished(plan, FIRST_SILENT)
    (prepared,) = (effect for effect in run.log if isinstance(effect, ef.PrepareBatch))
    assert [len(group.rollouts) for group in prepared.groups] == [6, 6][: 2 if silent == "train" else 1]
    steps = [effect for effect in run.log if isinstance(effect, ef.StepOptimizer)]
    shares = {"train": (4, 0), "skip": (2, 0), "as_zero": (2, 2)}[silent]
    assert [(step.update, step.samples, step.zeros) for step in steps] == [(n, *shares) for n in range(3)]
    assert sorted(trained(run)) == sorted(name for group in prepared.groups for name in group.rollouts)
    members = {
        n: [int(name[-3:]) for batch in batches(run) if batch.update == n for name in batch.rollouts]
        for n in range(3)
    }
    if split == "every_group":
        assert {n: set(found) for n, found in members.items()} == {0: {0, 1}, 1: {2, 3}, 2: {4, 5}}
    else:
        assert members[0] != [0, 1] * len(prepared.groups)
    assert run.controller.version == 3


def test_samples_that_were_lost_leave_updates_even() -> None:
    def answer(rollout: Rollout) -> ev.Event:
        if rollout.id.startswith("t") and slot_of(rollout.id) == 0 and rollout.member in (1, 2, 4):
            return ev.RewardFailed(rollout.id, DropReason.REWARD_ERROR, "it raised")
        return STEEP(rollout)

    plan = dataclasses.replace(CHOOSES, choice=TRAINS_ALL, updates_per_batch=2, update_split="every_group")
    run = finished(dataclasses.replace(plan, ranks=2, micro_batch_size=4), answer)
    steps = [effect.samples for effect in run.log if isinstance(effect, ef.StepOptimizer)]
    assert steps == [4, 4]  # of nine, one is left out for the ranks' sake
    assert [drop.reason for drop in run.drops()].count(DropReason.UNEVEN_BATCH) == 1


def test_slices_cannot_be_chosen_from_before_their_group_is_whole() -> None:
    pipeline = PipelineConfig(axis="generation", slice_size=3, baseline="slice")
    with pytest.raises(ValueError, match="before their group is whole"):
        Run(dataclasses.replace(CHOOSES, pipeline=pipeline))


# -- in the configuration ----------------------------------------------------------------------------------

SEVERAL = ("rewards=[{name: shapes}, {name: jpeg_size}]", "algorithm.advantage.combine=normalise_each")


@pytest.mark.parametrize(
    ("overrides", "key"),
    [
        (["algorithm.train_samples=17"], "algorithm.train_samples"),
        (["algorithm.train_samples=1"], "algorithm.train_samples"),
        (["algorithm.advantage.over=generated"], "algorithm.advantage.over"),
        (["algorithm.train_samples=8", *SEVERAL], "algorithm.train_policy"),
        (["algorithm.silent_groups=skip", *SEVERAL], "algorithm.silent_groups"),
        (
            [
                "algorithm={name: diffusion-nft, train_samples: 8, advantage: {std: group}}",
                "pipeline={axis: generation, baseline: slice}",
            ],
            "pipeline.baseline",
        ),
        (
            ["algorithm.train_samples=7", "fleet.driver=ray", "fleet.learner_ranks=5"],
            "algorithm.train_samples",
        ),
        (["algorithm.train_samples=7", "learner.micro_batch_size=48"], "learner.micro_batch_size"),
    ],
)
def test_choices_that_cannot_be_made_are_errors(overrides: list[str], key: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(None, overrides)
    assert key in {problem.key for problem in caught.value.problems}


def test_an_algorithm_with_checks_of_its_own_keeps_those_of_all() -> None:
    class OwnConfig(DiffusionNFTConfig):
        own: int = 1
        requires = (Requires("algorithm.own", {}, 2, "Set it."),)

    own = OwnConfig(train_samples=17, train_timesteps=11, noise_levels="steps")
    found = load_config(None, ["rollout.steps=10"]).model_copy(update={"algorithm": own}).every_problem()
    expected = {"algorithm.own", "algorithm.train_samples", "algorithm.train_timesteps"}
    assert expected <= {problem.key for problem in found}


# -- a lost learner ----------------------------------------------------------------------------------------


class Losing(Room):
    """Obeys every effect, but for one, at which the learner is lost; each sample may be scored once.

    Attributes:
        prepared: batches.
        freed: samples.
    """

    def __init__(self, plan: Plan) -> None:
        super().__init__(plan)
        self.prepared: list[ef.PrepareBatch] = []
        self.scored: list[str] = []
        self.freed: list[str] = []
        self._todo = [
            *self.feed(ev.NodeJoined(SPOT)),
            *self.feed(ev.NodeJoined(replace(SPOT, id=NodeId("t")))),
        ]

    def until(self, kind: type[ef.Effect]) -> ef.Effect:
        """Go on until such an effect, which is not obeyed."""
        while True:
            effect = self._todo.pop(0)
            if isinstance(effect, kind):
                return effect
            self._todo += [found for event in self._answers(effect) for found in self.feed(event)]

    def lose(self) -> None:
        self._todo = self.feed(ev.LearnerLost("its node is gone"))

    def _answers(self, effect: ef.Effect) -> Iterator[ev.Event]:
        match effect:
            case ef.StartWorker(worker, _, _, epoch):
                yield ev.WorkerStarted(worker, epoch)
            case ef.PullWeights(worker, epoch, version, lineage):
                yield ev.WeightsPulled(worker, epoch, version, lineage)
            case ef.FormGroup(leader, epoch):
                yield ev.GroupFormed(leader, epoch)
                yield ev.GroupPulled(leader, epoch, 8, LeaseId(0))
            case ef.GrantLease(lease):
                made_by = effect.rollouts[0].version
                yield ev.LeaseCompleted(lease.worker, lease.id, lease.epoch, lease.rollouts, made_by)
                yield ev.GroupPulled(lease.worker, lease.epoch, 8, lease.id)
            case ef.ScoreSamples(rollouts, lineage):
                self.scored += [rollout.id for rollout in rollouts]
                scores = {rollout.id: {"reward": float(rollout.member)} for rollout in rollouts}
                yield ev.SamplesRewarded(scores, lineage)
            case ef.PrepareBatch(iteration):
                self.prepared.append(effect)
                yield ev.BatchPrepared(iteration)
            case ef.TrainMicroBatch(batch, index):
                yield ev.MicroBatchTrained(batch.iteration, batch.update, index)
            case ef.StepOptimizer(iteration, update):
                yield ev.OptimizerStepped(iteration, update, 0.0, 0.0)
            case ef.FinishBatch(iteration):
                yield ev.BatchFinished(iteration)
            case ef.PublishWeights(version):
                yield ev.WeightsPublished(version)
            case ef.RestoreLearner(_, lineage):
                yield ev.LearnerRestored(lineage)
            case ef.CommitCheckpoint(iteration):
                yield ev.CheckpointCommitted(iteration)
            case ef.DiscardSamples(rollouts):
                self.freed += rollouts


@pytest.mark.parametrize(
    "lost_at", [ef.TrainMicroBatch, ef.StepOptimizer, ef.PublishWeights, ef.CommitCheckpoint]
)
def test_a_lost_learner_chooses_again_from_the_same_samples(lost_at: type[ef.Effect]) -> None:
    moves = replace(CLUSTERED.cluster, learner_moves=True)
    plan = replace(CLUSTERED, group_size=4, choice=TrainingChoice(2), cluster=moves)
    run = Losing(plan)
    run.until(lost_at)
    assert not run.freed, "nothing is durable yet"
    run.lose()
    run.until(ef.FinishRun)
    first, again, _ = run.prepared
    assert again == first
    assert sorted(run.scored) == sorted(set(run.scored)), "none was made a second time"
    assert sorted(run.freed) == sorted(run.scored)
    assert run.controller.ledger.trained == 2 * 2 * 2
    assert run.controller.ledger.dropped[DropReason.NOT_CHOSEN] == 2 * 2 * 2
