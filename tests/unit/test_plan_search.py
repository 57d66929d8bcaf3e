"""Searching for a cluster that meets a deadline or a budget."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cache

import pytest
from test_simulate_plan import NOW, SMALL

from spotlight_plan.candidates import (
    Candidate,
    Machine,
    file_of,
    grid,
    overrides_of,
    prepared_for,
    shape_of,
)
from spotlight_plan.scenarios.scenario_file import ScenarioFile
from spotlight_plan.scenarios.scenario_load import load_scenario
from spotlight_plan.scenarios.strategies import STRATEGIES
from spotlight_plan.scenarios.strategy_scenario import scenario_of
from spotlight_plan.search import Goal, SearchResult, pareto, search
from spotlight_plan.simulation.virtual_driver import simulate
from spotlight_rewards.base.errors import ConfigError

QUICK = (
    *SMALL,
    "trace={kind: generated, mean_uptime_h: 2, mean_downtime_s: 60}",
    "run.until_h=4",
    "run.starts=1",
    "cluster.reserved.usd_gpu_h=6.88",
    "cluster.spot.usd_gpu_h=1.78",
    "iterations_to_target.spotlight={value: 3, source: 'assumed: for a test'}",
    "iterations_to_target.reserved_only.value=4",
    "plan={iterations: 3, strategies: [reserved_only, spotlight], gpu_types: [H100], "
    "reserved_nodes: [1, 2], spot_nodes: [2, 6], parts: []}",
)


def quick(*overrides: str) -> ScenarioFile:
    return load_scenario("paper-512", [*QUICK, *overrides])


def of_types(strategy: str, fixed: str, coming: str, reserved: int, spot: int) -> Candidate:
    """Of the scenario's own nodes: four reserved GPUs each, and two others."""
    return Candidate(strategy, Machine(fixed, 4), Machine(coming, 2), reserved, spot)


@cache
def with_time_enough() -> SearchResult:
    return search(quick(), Goal(deadline_h=1000.0), NOW)


def test_the_answer_simulated_again_meets_the_deadline_and_is_the_cheapest() -> None:
    file = quick()
    times = sorted(one.outcome.target_h for one in with_time_enough().evaluated)
    deadline_h = times[len(times) // 2] * 1.02
    found = search(file, Goal(deadline_h=deadline_h), NOW)
    answer = found.answer
    assert answer is not None
    assert answer.simulated
    assert answer.outcome.target is not None
    again = prepared_for(file, answer.candidate, answer.outcome.target.iterations, NOW)
    result = simulate(scenario_of(again, STRATEGIES[answer.candidate.strategy]))
    assert result.finished
    assert result.iterations[-1].end_s <= 1.05 * deadline_h * 3600
    passed = [one for one in found.confirmed if one not in found.rejected]
    assert all(answer.outcome.target_usd <= one.outcome.target_usd for one in passed)


def test_a_budget_buys_the_fastest_that_it_suffices_for() -> None:
    file = quick()
    found = search(file, Goal(budget_usd=1000.0), NOW)
    assert found.answer is not None
    fastest = min(one.outcome.target_h for one in found.evaluated)
    assert found.answer.outcome.target_h <= 1.1 * fastest
    assert found.answer.outcome.target_usd <= 1000
    assert repr(search(file, Goal(budget_usd=1000.0), NOW)) == repr(found)


def test_nothing_may_meet_the_goal() -> None:
    found = search(quick(), Goal(deadline_h=0.001), NOW)
    assert found.answer is None
    assert found.nearest.outcome.target_h == min(one.outcome.target_h for one in found.evaluated)


def test_the_front_is_what_nobody_beats() -> None:
    evaluated = with_time_enough().evaluated
    front = pareto(evaluated)
    for one in evaluated:
        beaten = any(
            other.outcome.target_h <= one.outcome.target_h
            and other.outcome.target_usd <= one.outcome.target_usd
            and other is not one
            for other in evaluated
        )
        assert beaten == (one not in front)


def test_what_cannot_be_simulated_is_left_out_and_reported() -> None:
    file = quick(
        "plan.gpu_types=[H100,H20,L4]", "plan.reserved_nodes=[1,7]", "plan.strategies=[reserved_only]"
    )
    found = search(file, Goal(deadline_h=1000.0), NOW)
    assert {one.candidate.reserved_nodes for one in found.evaluated} == {1}
    reasons = "\n".join(found.left_out)
    assert "no on-demand price of H20" in reasons
    assert "no on-demand price of L4" in reasons
    assert "28 learner GPUs do not divide" in reasons


def test_clusters_that_cannot_explore_are_not_recommended() -> None:
    file = quick("exploration.seeds_per_prompt=64", "exploration.steps=20", "plan.strategies=[spotlight]")
    with pytest.raises(ConfigError, match="less than 80% of the previews"):
        search(file, Goal(deadline_h=1000.0), NOW)


@pytest.mark.parametrize("values", [(None, None), (1.0, 1.0), (0.0, None), (None, -1.0), (math.nan, None)])
def test_a_goal_is_one_positive_number(values: Sequence[float | None]) -> None:
    with pytest.raises(ConfigError, match="exactly one, above 0"):
        Goal(*values)


def test_planning_needs_targets_and_exploration() -> None:
    file = quick()
    bare = file.model_copy(update={"iterations_to_target": {}, "exploration": None})
    with pytest.raises(ConfigError) as raised:
        search(bare, Goal(deadline_h=1.0), NOW)
    assert "iterations_to_target.spotlight" in str(raised.value)
    assert "exploration" in str(raised.value)


@pytest.mark.parametrize("name", ["NO", "1e3", "null", "a: b", "us-east-1"])
def test_a_scenario_is_given_the_names_of_an_answer_as_they_are(name: str) -> None:
    """YAML would read a region ``NO``, Norway, as no."""
    file, machine = quick(), Machine("H100", 8, "runpod", name, name)
    words = overrides_of(file, Candidate("spotlight", machine, machine, 2, 3, next_share=0.25))
    given = quick(*words)
    assert given == file_of(file, Candidate("spotlight", machine, machine, 2, 3, 0.25), file.run.iterations)
    assert (given.cluster.reserved.region, given.cluster.spot.machine) == (name, name)
    assert "cluster.reserved.cloud=runpod" in words


def test_the_grid_surrounds_the_scenario() -> None:
    stated = ("cluster.reserved.usd_gpu_h=6.88", "cluster.spot.usd_gpu_h=1.78")
    candidates, left_out = grid(load_scenario("paper-512", stated), ())
    beside = [one for one in candidates if not one.strategy.startswith("all_spot")]
    assert {one.reserved for one in beside} == {Machine("H100", 4)}
    assert {one.reserved for one in candidates if one.strategy == "all_spot"} == {Machine("H100", 2)}
    assert {shape.split(",")[0] for shape, _ in left_out} == {"H20", "A100-80GB"}
    assert {one.spot_nodes for one in candidates if one.strategy == "reserved_only"} == {0}
    assert {one.spot_nodes for one in candidates if one.strategy == "spotlight"} == {1, 2, 3, 4, 6, 8, 12, 16}
    assert {one.reserved_nodes for one in beside} == {1, 2, 3, 4}
    assert {one.reserved_nodes for one in candidates if one.strategy == "all_spot"} == {1, 2, 3, 4, 6, 8}


MIXED = ("cluster.spot.gpu_type=H20", "cluster.spot.usd_gpu_h=0.4", "cluster.spot.usd_gpu_h_on_demand=1.5")


def test_the_scenarios_own_pair_of_types_is_planned_with() -> None:
    file = quick(
        *MIXED, "plan.reserved_nodes=[1]", "plan.spot_nodes=[4]", "plan.strategies=[spot_rollout_only]"
    )
    found = search(file, Goal(deadline_h=1000.0), NOW)
    own = next(one for one in found.evaluated if one.candidate.spot.gpu_type == "H20")
    assert shape_of(own.candidate) == "4 reserved H100 + 8 spot H20, spot_rollout_only"
    pools = prepared_for(file, own.candidate, 3, NOW).file.cluster
    assert (pools.reserved.gpu_type, pools.spot.gpu_type, pools.spot.usd_gpu_h) == ("H100", "H20", 0.4)


def test_without_spot_nodes_their_type_says_nothing() -> None:
    candidates, _ = grid(quick(*MIXED, "plan.gpu_types=[H20]", "plan.strategies=[reserved_only]"), ())
    assert {(one.reserved, one.spot) for one in candidates} == {(Machine("H100", 4),) * 2}


def test_stated_prices_are_of_their_own_types() -> None:
    file = quick(*MIXED, "prices.whole_machines=false")
    other = of_types("spotlight", "H100", "H100", 1, 4)
    spot = prepared_for(file, other, 3, NOW).file.cluster.spot
    assert (spot.gpu_type, spot.usd_gpu_h, spot.usd_gpu_h_on_demand) == ("H100", None, None)


def test_on_demand_gpus_of_another_type_do_not_train() -> None:
    file = quick(*MIXED, "workload.prompts=11")  # 88 samples: 4 ranks divide them, 12 would leave out 4
    prepared_for(file, of_types("all_on_demand", "H100", "H20", 1, 4), 3, NOW)
    with pytest.raises(ConfigError, match="12 learner GPUs do not divide"):
        prepared_for(quick("workload.prompts=10"), of_types("all_on_demand", "H100", "H100", 1, 4), 3, NOW)
