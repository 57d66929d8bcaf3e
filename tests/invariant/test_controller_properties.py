"""The controller under random schedules, zombies, duplicates, lost workers and failing rewards."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from typing import get_args

import pytest
from controller_world import TEST, TRAIN, World, chance, learning, start, without_cluster
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.simulation.mutations import MUTATIONS, Mutation

from spotlight.config.sections.evaluation import EvaluationConfig
from spotlight.config.sections.exploration import ExplorationConfig, SeedPolicy
from spotlight.config.sections.learner_section import UpdateSplit
from spotlight.config.sections.pipeline import PipelineConfig
from spotlight.scheduler import controller as controller_module
from spotlight.scheduler import training_tasks as training_module
from spotlight.scheduler.controller import Controller
from spotlight.scheduler.effects import Effect, PrepareBatch, WriteRecord
from spotlight.scheduler.ledger import AccountingError
from spotlight.scheduler.plan import ClusterPlan, Plan
from spotlight.scheduler.records import SampleDropped, SampleTrained
from spotlight.scheduler.rollouts import Rollouts
from spotlight.scheduler.types import Baseline, Comparison, DropReason, Group, RolloutId

SETTINGS = settings(max_examples=settings.default.max_examples // 4)
"""A quarter of those elsewhere: every example is a run, and the simulation checks hundreds of faulty ones."""
FAILING = 0.05


@st.composite
def pipelines(draw: st.DrawFn) -> PipelineConfig:
    baseline = draw(st.sampled_from(["group", "slice"]))
    settings = {
        "axis": draw(st.sampled_from(["none", "prompt", "generation"])),
        "slice_size": draw(st.integers(3 if baseline == "slice" else 1, 5)),
        "baseline": baseline,
        "next_share": draw(st.sampled_from([0.0, 0.5, 1.0])),
    }
    return PipelineConfig.model_validate(settings)


def by_exploration(slice_size: int) -> PipelineConfig:
    return PipelineConfig(axis="generation", slice_size=slice_size, baseline="exploration")


@st.composite
def plans(draw: st.DrawFn) -> Plan:
    ranks = draw(st.integers(1, 3))
    return Plan(
        run_seed=draw(st.integers(0, 2**31 - 1)),
        iterations=draw(st.integers(1, 4)),
        prompts_per_iteration=draw(st.integers(1, 4)),
        group_size=draw(st.integers(2, 5)),
        rollout_steps=draw(st.integers(2, 5)),
        evaluation=EvaluationConfig(
            steps=draw(st.integers(1, 5)),
            images_per_prompt=draw(st.integers(1, 2)),
            every=draw(st.integers(1, 3)),
        ),
        updates_per_batch=draw(st.integers(1, 3)),
        update_split=draw(st.sampled_from(get_args(UpdateSplit))),
        micro_batch_size=ranks * draw(st.integers(1, 4)),
        checkpoint_every=draw(st.integers(1, 3)),
        lease_s=20.0,
        cluster=ClusterPlan(start_s=20.0),
        max_drop_share=draw(st.sampled_from([0.2, 0.5, 1.0])),
        ranks=ranks,
    )


@st.composite
def pipelined(draw: st.DrawFn) -> Plan:
    return replace(draw(plans()), pipeline=draw(pipelines()), update_split="groups")


@st.composite
def compared_with_explored(draw: st.DrawFn) -> Plan:
    """Slices that are compared with previews of other seeds, all of which are made before any rollout."""
    plan = draw(plans())
    seeds = plan.group_size + draw(st.integers(2, 4))
    policy = draw(st.sampled_from(get_args(SeedPolicy)))
    return replace(
        plan,
        update_split="groups",
        pipeline=by_exploration(draw(st.integers(1, 4))),
        exploration=ExplorationConfig(seeds_per_prompt=seeds, policy=policy),
    )


SEEDS = st.integers(0, 2**32 - 1)


@SETTINGS
@given(plans() | pipelined() | compared_with_explored(), SEEDS)
def test_every_run_ends_with_every_sample_accounted_for(plan: Plan, seed: int) -> None:
    world = World(start(plan), seed, calm=False, failing=FAILING).run()
    account, ledger = world.account, world.controller.ledger
    if world.succeeded:
        assert ledger.in_flight == 0
        assert set(account.issued) == set(account.ended) == set(account.discarded)
        assert world.controller.iteration == plan.iterations
        assert world.controller.version == len(account.trained_in)
    assert ledger.trained == sum(account.trained_in.values())
    assert ledger.issued.total() == len(account.issued)
    assert set(account.finished) >= set(account.scored)


@SETTINGS
@given(plans(), SEEDS)
def test_what_is_learnt_does_not_depend_on_the_schedule(plan: Plan, seed: int) -> None:
    calm = World(start(plan), 0, calm=True, failing=FAILING).run()
    wild = World(start(plan), seed, calm=False, failing=FAILING).run()
    assert learning(wild.effects) == learning(calm.effects)
    assert wild.succeeded == calm.succeeded


@SETTINGS
@given(pipelined() | compared_with_explored(), SEEDS)
def test_what_samples_are_compared_with_does_not_depend_on_the_schedule(plan: Plan, seed: int) -> None:
    plan = replace(plan, ranks=1, pipeline=plan.pipeline.model_copy(update={"next_share": 0.0}))
    calm = World(start(plan), 0, calm=True, failing=FAILING).run()
    wild = World(start(plan), seed, calm=False, failing=FAILING).run()
    assert wild.succeeded == calm.succeeded
    if calm.succeeded:
        assert compared(wild) == compared(calm)
        trained = [
            {effect.record for effect in world.effects if _is_trained(effect)} for world in (calm, wild)
        ]
        assert trained[0] == trained[1]


def test_slices_are_compared_with_the_previews_of_their_groups_other_seeds() -> None:
    plan = Plan(
        run_seed=0, iterations=2, prompts_per_iteration=2, group_size=4, rollout_steps=3,
        evaluation=EvaluationConfig(steps=3, images_per_prompt=1, every=9),
        updates_per_batch=1, micro_batch_size=2, checkpoint_every=1,
        lease_s=20.0, max_drop_share=None,
        pipeline=by_exploration(2),
        exploration=ExplorationConfig(seeds_per_prompt=9, steps=3),
    )  # fmt: skip
    world = World(start(plan), 0, calm=False).run()
    assert world.succeeded
    found = compared(world)
    assert len(found) == plan.iterations * plan.prompts_per_iteration * plan.group_size
    for members, comparison in found.values():
        assert comparison.baseline is Baseline.EXPLORATION
        assert len(comparison.others) == plan.group_size - len(members)


def compared(world: World) -> dict[RolloutId, tuple[tuple[RolloutId, ...], Comparison]]:
    """Of every sample, the slice that it was trained with and what it was compared with."""
    found: dict[RolloutId, tuple[tuple[RolloutId, ...], Comparison]] = {}
    for effect in world.effects:
        if isinstance(effect, PrepareBatch):
            comparisons = effect.comparisons or [Comparison()] * len(effect.groups)
            for group, comparison in zip(effect.groups, comparisons, strict=True):
                assert found.keys().isdisjoint(group.rollouts), "a sample was prepared twice"
                found |= dict.fromkeys(group.rollouts, (group.rollouts, comparison))
    return found


def _is_trained(effect: Effect) -> bool:
    return isinstance(effect, WriteRecord) and isinstance(effect.record, SampleTrained)


@SETTINGS
@given(plans() | pipelined(), SEEDS)
def test_the_same_events_give_the_same_effects(plan: Plan, seed: int) -> None:
    first, second = (World(start(plan), seed, calm=False, failing=FAILING).run() for _ in range(2))
    assert first.effects == second.effects


@SETTINGS
@given(pipelined(), SEEDS)
def test_a_pipelined_run_goes_on_from_every_checkpoint(plan: Plan, seed: int) -> None:
    # One rank, groups that slices can be compared in, and nothing fails: then no sample is dropped but those
    # of a version that is gone.
    plan = replace(plan, ranks=1, group_size=max(3, plan.group_size))
    wild = World(start(plan), seed, calm=False).run()
    for _, checkpoint in wild.checkpoints:
        controller = Controller.restore(plan, TRAIN, TEST, json.loads(json.dumps(checkpoint.snapshot)))
        resumed = World(controller, seed + 1, calm=False).run()
        assert resumed.succeeded
        ledger = resumed.controller.ledger
        assert (ledger.in_flight, resumed.controller.iteration) == (0, plan.iterations)
        assert ledger.trained == plan.iterations * plan.prompts_per_iteration * plan.group_size


@SETTINGS
@given(plans())
def test_a_resumed_run_continues_with_identical_effects(plan: Plan) -> None:
    straight = World(start(plan), 0, calm=True, failing=FAILING).run()
    for effects_before, checkpoint in straight.checkpoints:
        snapshot = json.loads(json.dumps(checkpoint.snapshot))
        resumed = World(Controller.restore(plan, TRAIN, TEST, snapshot), 0, calm=True, failing=FAILING).run()
        assert without_cluster(resumed.effects) == without_cluster(straight.effects[effects_before:])
        assert not resumed.succeeded or resumed.controller.snapshot() == straight.controller.snapshot()


@SETTINGS
@given(plans(), SEEDS)
def test_a_run_resumed_after_troubles_learns_the_same(plan: Plan, seed: int) -> None:
    wild = World(start(plan), seed, calm=False, failing=FAILING).run()
    for effects_before, checkpoint in wild.checkpoints[:2]:
        controller = Controller.restore(plan, TRAIN, TEST, json.loads(json.dumps(checkpoint.snapshot)))
        resumed = World(controller, seed + 1, calm=False, failing=FAILING).run()
        assert learning(wild.effects[:effects_before] + resumed.effects) == learning(wild.effects)


@SETTINGS
@given(plans())
def test_drops_have_the_reason_that_made_them(plan: Plan) -> None:
    world = World(start(plan), 0, calm=True, failing=FAILING).run()
    records = [effect.record for effect in world.effects if hasattr(effect, "record")]
    for drop in (record for record in records if isinstance(record, SampleDropped)):
        poisoned = chance(drop.rollout, "poison") < FAILING / 4
        assert poisoned == (drop.reason is DropReason.ROLLOUT_FAILED)
        late = chance(drop.rollout, "reward") < FAILING and not poisoned
        assert late == (drop.reason is DropReason.REWARD_TIMEOUT)
        assert (drop.reason is DropReason.UNEVEN_BATCH) <= (plan.ranks > 1)
    assert all(chance(r.rollout, "reward") >= FAILING for r in records if isinstance(r, SampleTrained))


# -- planted bugs ------------------------------------------------------------------------------------------


def _takes_every_score(self: Rollouts, rollout: RolloutId) -> bool:
    return rollout in self.current.rollouts


def _leaves_ranks_uneven(groups: Sequence[Group], ranks: int) -> list[RolloutId]:
    return []


ALSO_IN_SIMULATION = (
    "a second completion counts",
    "the leases of a lost group are not requeued",
    "old epochs and leases are believed",
    "several updates train the same samples",
)
PLANTED = {mutation.bug: mutation for mutation in MUTATIONS if mutation.bug in ALSO_IN_SIMULATION} | {
    mutation.bug: mutation
    for mutation in (
        Mutation(
            "rewards count twice, and before the sample", ((Rollouts, "_awaits_scores", _takes_every_score),)
        ),
        Mutation("ranks train unequally", ((training_module, "even_out", _leaves_ranks_uneven),)),
        Mutation("the version is not counted", ((controller_module, "PolicyVersion", lambda version: 0),)),
    )
}


def test_the_bugs_shared_with_the_simulation_are_there() -> None:
    assert PLANTED.keys() >= set(ALSO_IN_SIMULATION)


def run_some_worlds() -> None:
    plan = Plan(
        run_seed=0, iterations=3, prompts_per_iteration=3, group_size=5, rollout_steps=4,
        evaluation=EvaluationConfig(steps=4, images_per_prompt=2, every=2),
        updates_per_batch=2, micro_batch_size=4, checkpoint_every=1,
        lease_s=20.0, max_drop_share=1.0, ranks=2, cluster=ClusterPlan(start_s=20.0),
    )  # fmt: skip
    for seed in range(20):
        World(start(plan), seed, calm=False, failing=FAILING).run()


def test_without_a_bug_nothing_is_caught() -> None:
    run_some_worlds()


@pytest.mark.parametrize("bug", sorted(PLANTED))
def test_planted_bugs_are_caught(bug: str) -> None:
    with PLANTED[bug].planted(), pytest.raises((AssertionError, AccountingError)):
        run_some_worlds()
