"""Exploration in the loop: what is previewed, chosen, replaced, learnt and reported, on simulated rewards."""

from __future__ import annotations

import dataclasses
import json
import math
import statistics
from collections import Counter
from collections.abc import Mapping
from typing import Any

import pytest
from tests.simulation.constant_costs import ConstantCosts
from tests.simulation.faulty_simulation import FaultySimulation

from spotlight.config.requires import problems_of
from spotlight.config.schema import RunConfig
from spotlight.config.sections.evaluation import EvaluationConfig
from spotlight.config.sections.exploration import ExplorationConfig, PlannerConfig, PreviewCostsConfig
from spotlight.config.sections.fleet import FleetConfig
from spotlight.config.sections.rollout import RolloutConfig
from spotlight.scheduler import effects as ef
from spotlight.scheduler import events as ev
from spotlight.scheduler.events import NodeJoined
from spotlight.scheduler.plan import ClusterPlan, Plan
from spotlight.scheduler.policies.exploration.explorer import Explorer
from spotlight.scheduler.policies.exploration.window import ExploredGroup
from spotlight.scheduler.records import RolloutIssued, SampleDropped, SampleExplored, SampleTrained
from spotlight.scheduler.types import Node, NodeId, NodeKind, PolicyVersion, Purpose, Rollout
from spotlight_plan.simulation.scenario import Scenario
from spotlight_plan.simulation.virtual_rewards import RewardModel
from spotlight_plan.simulation.virtual_workers import Receipt
from spotlight_rewards.base.errors import Problem
from spotlight_rewards.base.prompts import Prompt, PromptId

RESERVED = Node(NodeId("r"), NodeKind.RESERVED, 1, "H100", 10.0, True, False)
SPOT = Node(NodeId("s"), NodeKind.SPOT, 4, "H100", 7.2, False, True)
PLAN = Plan(
    run_seed=0, iterations=6, prompts_per_iteration=4, group_size=6, rollout_steps=10,
    evaluation=EvaluationConfig(steps=10, images_per_prompt=1, every=100),
    updates_per_batch=1, micro_batch_size=4, checkpoint_every=2,
    lease_s=60.0, max_drop_share=None, cluster=ClusterPlan(),
)  # fmt: skip
CRITICAL = ExplorationConfig(seeds_per_prompt=16, steps=5)
PLANNED = {"seeds_per_prompt": None, "steps": None}
"""What a planner decides."""


def revised(section: ExplorationConfig, **changes: object) -> ExplorationConfig:
    return ExplorationConfig.model_validate({**dict(section), **changes})


IDLE = revised(CRITICAL, where="idle", seeds_per_prompt_max=16)
Tree = Mapping[str, Any]


class Watched(FaultySimulation):
    """Keeps what the controller wrote down and asked for, and checks it after each event."""

    def __init__(self, scenario: Scenario) -> None:
        super().__init__(scenario)
        self.seen: list[ef.Effect] = []

    def observe(self, event: ev.Event, effects: list[ef.Effect], receipt: Receipt | None) -> None:
        self.seen += effects
        self.controller.check()

    @property
    def issued(self) -> list[Rollout]:
        records = [one.record for one in self.seen if isinstance(one, ef.WriteRecord)]
        return [record.rollout for record in records if isinstance(record, RolloutIssued)]

    def ended(self, kind: type) -> set[str]:
        records = [one.record for one in self.seen if isinstance(one, ef.WriteRecord)]
        return {record.rollout for record in records if isinstance(record, kind)}

    @property
    def reports(self) -> list[Tree]:
        return [effect.report for effect in self.explorations]


def ran(
    exploration: ExplorationConfig | None,
    rewards: RewardModel | None = None,
    *,
    learns_s: float = 5.0,
    scoring_s: float = 0.5,
    kind: type[Watched] | None = None,
    **changes: object,
) -> Watched:
    """A run to its end; a micro-batch takes ``learns_s``, so that is how long idle exploration lasts."""
    plan = dataclasses.replace(PLAN, exploration=exploration, **changes)  # type: ignore[arg-type]
    simulation = (kind or Watched)(
        Scenario(
            plan,
            ConstantCosts(step_s=0.4, large_s=learns_s, answer_s=scoring_s),
            ((0.0, NodeJoined(RESERVED)), (0.0, NodeJoined(SPOT))),
            train_prompts=24,
            test_prompts=0,
            rewards=rewards or RewardModel(),
        )
    )
    simulation.begin()
    while simulation.step():
        pass
    assert simulation.finish is not None
    assert simulation.finish.error is None
    return simulation


def of_iteration(rollouts: list[Rollout], purpose: Purpose, iteration: int) -> list[Rollout]:
    return [one for one in rollouts if one.purpose is purpose and one.iteration == iteration]


def test_prompts_are_previewed_one_after_the_other() -> None:
    run = ran(CRITICAL)
    previews = of_iteration(run.issued, Purpose.EXPLORE, 0)
    assert [one.member for one in previews] == [*range(16)] * 4
    assert len({one.prompt_id for one in previews[:16]}) == 1


def test_a_window_cut_off_leaves_some_prompts_whole_instead_of_all_short() -> None:
    run = ran(IDLE, learns_s=0.8)
    report = run.reports[2]
    assert report["window"]["cut_off"]
    used = Counter(
        one.prompt_id
        for one in of_iteration(run.issued, Purpose.EXPLORE, 3)
        if one.id in run.ended(SampleExplored)
    )
    assert 16 in used.values(), "one prompt at least is explored whole"
    assert len(used) < 4, "and one not at all"
    assert run.ended(SampleDropped) >= {
        one.id for one in of_iteration(run.issued, Purpose.EXPLORE, 3) if one.prompt_id not in used
    }


def test_seeds_are_made_again_and_previews_are_never_trained() -> None:
    run = ran(CRITICAL)
    trained = {one.id: one for one in run.issued if one.id in run.ended(SampleTrained)}
    assert {one.purpose for one in trained.values()} == {Purpose.TRAIN}
    for iteration in range(PLAN.iterations):
        previews = {one.seed for one in of_iteration(run.issued, Purpose.EXPLORE, iteration)}
        members = of_iteration(run.issued, Purpose.TRAIN, iteration)
        assert {one.seed for one in members} <= previews
        assert {one.steps for one in members} == {PLAN.rollout_steps}


def contrasts(policy: str, rewards: RewardModel) -> list[Tree]:
    run = ran(revised(CRITICAL, policy=policy), rewards, iterations=40)
    return [report["contrast"] for report in run.reports]


def test_the_gain_is_that_of_choosing() -> None:
    flat_world = RewardModel(variety=0.0)  # every prompt's rewards have variance 0.04
    chosen, random = (contrasts(policy, flat_world) for policy in ("max_variance", "random"))
    assert {one["gain"] for one in random} == {0.0}, "by design"
    by_slope = [one["realised"] - one["random_of_sampled"] for one in random]
    error = statistics.stdev(by_slope) / math.sqrt(len(by_slope))
    assert abs(statistics.mean(by_slope)) < 4 * error
    assert statistics.mean(one["gain"] for one in chosen) > 0.4 * 0.04


@pytest.mark.parametrize("steps", [3, pytest.param(8, marks=pytest.mark.slow)])
def test_fidelity_is_found_as_the_rewards_have_it(steps: int) -> None:
    model = RewardModel()
    run = ran(
        revised(CRITICAL, steps=steps, sampled_prompts=4),
        model,
        iterations=40,
        prompts_per_iteration=4,
    )
    rho = model.correlation(steps, PLAN.rollout_steps, stale=False)
    expected = 2 / math.pi * math.asin(rho)
    reports = [report["fidelity"]["reward"] for report in run.reports]
    assert statistics.mean(one["tau"] for one in reports) == pytest.approx(expected, abs=0.08)
    assert statistics.mean(one["tau_by_slope"] for one in reports) == pytest.approx(expected, abs=0.08)
    assert {report["staleness"] for report in run.reports} == {0}
    assert {report["staleness"] for report in ran(IDLE).reports} == {1}


def test_a_prompt_without_contrast_gives_its_place_to_a_spare_one() -> None:
    rewards = RewardModel(flat_share=0.5)
    without, with_spares = (ran(revised(CRITICAL, spare_prompts=spares), rewards) for spares in (0, 8))
    replaced = with_spares.controller.ledger.replaced_prompts
    assert replaced == sum(report["selection"]["replaced_prompts"] for report in with_spares.reports)
    assert replaced > 5
    assert without.controller.ledger.replaced_prompts == 0
    for iteration in range(PLAN.iterations):
        previewed = {one.prompt_id for one in of_iteration(with_spares.issued, Purpose.EXPLORE, iteration)}
        members = of_iteration(with_spares.issued, Purpose.TRAIN, iteration)
        groups = Counter(one.prompt_id for one in members)
        assert set(groups) <= previewed
        assert set(groups.values()) == {PLAN.group_size}, "no prompt twice"
        planned = {one.prompt_id for one in of_iteration(without.issued, Purpose.TRAIN, iteration)}
        assert with_spares.reports[iteration]["selection"]["replaced_prompts"] == len(set(groups) - planned)
    flat = [report["selection"].get("no_contrast", 0) for report in without.reports]
    assert sum(flat) > 5
    untouched = of_iteration(without.issued, Purpose.TRAIN, flat.index(max(flat)))
    seeds = {one.seed for one in of_iteration(without.issued, Purpose.EXPLORE, untouched[0].iteration)}
    own = [one for one in untouched if one.seed not in seeds]
    assert len(own) == PLAN.group_size * max(flat), "prompts without contrast take unexplored seeds"


def test_spares_are_few_when_no_time_or_no_prompt_is_left() -> None:
    run = ran(revised(CRITICAL, spare_prompts=100), RewardModel(flat_share=1.0), iterations=2)
    for iteration in range(2):
        assert len({one.prompt_id for one in of_iteration(run.issued, Purpose.EXPLORE, iteration)}) == 24
    assert run.controller.ledger.replaced_prompts == 0
    assert run.reports[0]["contrast"] == {}


def planned(**changes: object) -> ExplorationConfig:
    # Worker-seconds as ConstantCosts has them: leases of four, a step in 0.4 s.
    costs = PreviewCostsConfig(step_s=0.1, fixed_s=0.125, reward_s=0.5)
    settings: dict[str, Any] = {"alpha": 0.3, "discount": 0.97, "costs": costs}
    planner = PlannerConfig(seed_counts=(8, 24), step_counts=(3, 9), **{**settings, **changes})
    return revised(CRITICAL, planner=planner)


def test_the_planner_finds_the_arm_that_brings_most() -> None:
    run = ran(
        planned(maximises="contrast", costs=PreviewCostsConfig()),
        RewardModel(exponent=0.8, variety=0.2),
        iterations=60,
    )
    chosen = [report["decision"]["chosen"] for report in run.reports]
    assert chosen[30:].count("24x9") > 20, chosen
    arms = run.reports[-1]["decision"]["arms"]
    assert set(arms) == {"8x3", "8x9", "24x3", "24x9"}
    assert arms["24x9"]["mean"] > arms["24x3"]["mean"]
    json.dumps(run.reports, allow_nan=False)


def test_what_training_leaves_no_time_for_is_not_chosen() -> None:
    plan = revised(planned(alpha=0.0), where="idle")
    short, long = (ran(plan, iterations=14, learns_s=learns_s) for learns_s in (1.5, 12.0))
    for run, arm in ((short, "8x3"), (long, "24x9")):
        decisions = [report["decision"] for report in run.reports]
        assert decisions[0]["chosen"] == "8x3"
        assert "timed" in decisions[0]["why"]
        assert decisions[-1]["arms"][arm]["fits"]
    assert not short.reports[-1]["decision"]["arms"]["24x9"]["fits"]
    done = [report["window"]["cut_off"] for report in short.reports[4:]]
    assert done.count(True) <= 2, "what is chosen is mostly finished in time"


class Restarted(Watched):
    """The head dies some time after a checkpoint, and starts again from the last one; three times."""

    def observe(self, event: ev.Event, effects: list[ef.Effect], receipt: Receipt | None) -> None:
        super().observe(event, effects, receipt)
        if any(isinstance(one, ef.CommitCheckpoint) for one in effects) and self.head_life < 3:
            self.after((70.0, 25.0, 110.0)[self.head_life], self.restart_head, 1.0)


@pytest.mark.parametrize("policy", ["max_variance", "random"])
def test_a_restarted_run_decides_and_learns_as_one_that_was_not(policy: str) -> None:
    """Where nothing depends on time: previews are waited for."""
    regardless = planned(maximises="contrast", costs=PreviewCostsConfig())
    plan = revised(regardless, policy=policy, sampled_prompts=2, spare_prompts=2)
    rewards = RewardModel(flat_share=0.2)
    whole, restarted = (ran(plan, rewards, kind=kind, iterations=12) for kind in (Watched, Restarted))
    assert restarted.head_life == 3

    def decisions(run: Watched) -> dict[int, object]:
        return {
            report["iteration"]: (
                report["decision"]["arms"],
                report["decision"]["why"],
                report["selection"],
                report["contrast"],
                report["fidelity"],
            )
            for report in run.reports
        }

    assert len(restarted.reports) > len(whole.reports) == 12, "some iterations were done twice"
    assert decisions(restarted) == decisions(whole)


def test_a_restarted_run_makes_the_groups_that_idle_time_had_chosen() -> None:
    """Those chosen while the iteration before was trained are in its checkpoint; windows are long enough."""
    plan = revised(IDLE, sampled_prompts=2, spare_prompts=2)
    rewards = RewardModel(flat_share=0.2)
    whole, restarted = (ran(plan, rewards, kind=kind, iterations=12) for kind in (Watched, Restarted))
    assert restarted.head_life >= 3

    def made(run: Watched) -> dict[str, tuple[str, int]]:
        """The last time."""
        return {one.id: (one.prompt_id, one.seed) for one in run.issued if one.purpose is Purpose.TRAIN}

    assert len([one for one in restarted.issued if one.purpose is Purpose.TRAIN]) > len(made(whole))
    assert made(restarted) == made(whole)


def test_the_state_is_json_between_two_iterations() -> None:
    plan = dataclasses.replace(PLAN, exploration=planned(), iterations=12)
    run = ran(revised(planned(), where="idle"), iterations=12)
    commits = [one for one in run.seen if isinstance(one, ef.CommitCheckpoint)]
    assert len(commits) == 6
    for commit in commits:
        assert plan.exploration is not None
        state = json.loads(json.dumps(commit.snapshot["policies"]["exploration"]))
        again = Explorer(plan, run.train)
        again.load(state)
        assert json.loads(json.dumps(again.snapshot())) == state


@pytest.mark.parametrize("chosen_by_chance", [False, True])
def test_slices_of_a_group_chosen_for_its_contrast_balance(chosen_by_chance: bool) -> None:
    explorer = Explorer(dataclasses.replace(PLAN, exploration=CRITICAL), [Prompt(PromptId("a"), "a", {})])
    good, bad = {"reward": 1.0}, {"reward": 0.0}
    scores = [bad] * 4 + [good] * 12
    explorer.groups[0] = ExploredGroup(
        PromptId("a"),
        tuple(range(16)),
        tuple(scores),
        16 if chosen_by_chance else 0,
        32,
        {},
        (good,) * 16,
    )
    total = 0.0
    for low in range(0, 16, 4):
        own = range(low, low + 4)
        beside = explorer.explored_beside(0, set(own))
        assert len(beside) == (28 if chosen_by_chance else 12)
        mean = math.fsum(one["reward"] for one in beside) / len(beside)
        total += math.fsum(scores[seed]["reward"] - mean for seed in own)
    assert total == pytest.approx(-16 / 7 if chosen_by_chance else 0.0)


def test_a_restored_explorer_leaves_seeds_that_no_longer_fit() -> None:
    explorer = Explorer(dataclasses.replace(PLAN, exploration=CRITICAL), [Prompt(PromptId("a"), "a", {})])
    group = ExploredGroup(PromptId("b"), (1, 2), ({"reward": 0.0}, {"reward": 1.0}), 0, 4, {"reward": 1.0})
    state = {**explorer.snapshot(), "groups": {"0": dataclasses.asdict(group)}}
    explorer.load(json.loads(json.dumps(state)))  # the run goes on with other prompts
    assert not explorer.groups
    explorer.load({})
    assert explorer.open(0, PolicyVersion(0), [], 0, 1, 0.0).arm is not None


@pytest.mark.parametrize(
    ("changes", "key"),
    [
        ({"steps": 11}, "steps"),
        ({**PLANNED, "planner": PlannerConfig(seed_counts=(8,), step_counts=(2, 11))}, "planner.step_counts"),
        ({"drawn_seeds": 7, "sampled_prompts": 1}, "drawn_seeds"),
        ({"sampled_prompts": 1, "drawn_seeds": 1}, "sampled_prompts"),
        ({"where": "idle", "seeds_per_prompt_max": 15}, "seeds_per_prompt_max"),
        ({"seeds_per_prompt_max": 64}, "seeds_per_prompt_max"),
    ],
)
def test_settings_that_contradict_each_other_are_named(changes: dict[str, Any], key: str) -> None:
    def problems(exploration: ExplorationConfig) -> list[Problem]:
        run = RunConfig(
            exploration=exploration, rollout=RolloutConfig(group_size=6), fleet=FleetConfig(driver="ray")
        )
        return list(problems_of(exploration.requirements(), run))

    (problem,) = problems(revised(CRITICAL, **changes))
    assert problem.key == f"exploration.{key}"
    assert not problems(CRITICAL)
