"""Estimates of large clusters, which are simulated at a fraction of their size."""

from __future__ import annotations

import json
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

import pytest

from spotlight_plan import surrogate
from spotlight_plan.compare import SimulationTask, run_task
from spotlight_plan.scenarios.prepare import Prepared, prepare
from spotlight_plan.scenarios.scenario_load import load_scenario
from spotlight_plan.scenarios.strategies import strategy_named
from spotlight_plan.surrogate import (
    SteadyCurve,
    SteadyPoint,
    counts_wanted,
    divisor_of,
    estimated,
    point_of,
    steady_task,
)

NOW = datetime(2026, 11, 21, tzinfo=UTC)


def prepared(strategy: str, *overrides: str) -> Prepared:
    """Two nodes of four GPUs train, two others only roll out."""
    small = (
        "cluster.reserved={nodes: 2, gpus_per_node: 4}",
        "cluster.spot={nodes: 4, gpus_per_node: 4}",
        "learner.gpus=8",
        "workload.prompts=16",
        "workload.group_size=8",
        "workload.evaluation=null",
        "workload.micro_batch_per_gpu=2",
        "exploration={seeds_per_prompt: 10, steps: 4}",
        "run.iterations=5",
        "run.noise=0",
        "plan.iterations=5",
        "trace={kind: generated, mean_uptime_h: 0.3, mean_downtime_s: 30, notice_lead_s: 30}",
    )
    return prepare(load_scenario("paper-512", [*small, *overrides]), (strategy,), NOW)


def curve_of(scenario: Prepared, strategy: str) -> SteadyCurve:
    points = []
    for nodes in counts_wanted([scenario], strategy):
        task = steady_task(scenario, strategy, nodes)
        points.append(point_of(scenario, strategy, nodes, run_task(task) if task else None))
    return SteadyCurve.of(points)


@pytest.mark.parametrize("strategy", ["spotlight", "all_spot", "disaggregated"])
def test_half_of_a_cluster_tells_what_all_of_it_does(strategy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The learner is halved too, wherever it is: all of it would be faster with half of the work."""
    scenario, named = prepared(strategy, "trace.kind=always_on"), strategy_named(strategy)
    assert divisor_of(scenario.file, named) == 1
    whole = estimated(scenario, strategy, curve_of(scenario, strategy))
    monkeypatch.setattr(surrogate, "GPUS_MAX", 12)
    assert divisor_of(scenario.file, named) == 2
    half = estimated(scenario, strategy, curve_of(scenario, strategy))
    exact = run_task(SimulationTask(scenario, strategy)).outcome
    assert half.iteration_s == pytest.approx(whole.iteration_s, rel=0.05)
    assert half.iteration_s == pytest.approx(exact.iteration_s, rel=0.05)
    assert half.iteration_usd == pytest.approx(exact.iteration_usd, rel=0.05)


@pytest.mark.parametrize("strategy", ["spotlight", "all_spot"])
def test_points_of_a_smaller_cluster_are_at_the_nodes_of_the_whole(
    strategy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(surrogate, "GPUS_MAX", 12)
    scenario = prepared(strategy)
    most = scenario.file.spot_nodes(strategy_named(strategy))
    assert curve_of(scenario, strategy).most.nodes == most


def test_fewer_nodes_explore_less() -> None:
    """What explored groups gain follows the nodes that are there, not the most that there ever are."""
    scenario = prepared("spotlight", "trace={kind: generated, mean_uptime_h: 0.05, mean_downtime_s: 300}")
    outcome = run_task(SimulationTask(prepared("spotlight", "trace.kind=always_on"), "spotlight")).outcome

    def point(nodes: int, coverage: float, contrast: float) -> SteadyPoint:
        made = replace(outcome, preview_share=1.0, coverage=coverage, contrast=contrast)
        return SteadyPoint(float(nodes), 60.0, 60.0, made)

    rich = estimated(scenario, "spotlight", SteadyCurve.of([point(0, 0.5, 1.2), point(4, 1.0, 2.0)]))
    poor = estimated(scenario, "spotlight", SteadyCurve.of([point(0, 0.5, 1.2), point(4, 0.5, 1.2)]))
    assert poor.coverage == pytest.approx(0.5)
    assert poor.contrast == pytest.approx(1.2)
    assert 0.5 < rich.coverage < 1.0
    assert 1.2 < rich.contrast < 2.0
    assert rich.iterations < poor.iterations


def test_a_learner_that_takes_a_node_on_demand_works_and_pays_meanwhile(tmp_path: Path) -> None:
    """Of four spot nodes three leave for an hour: the learner's two have no room, and it goes on alone."""
    events = [f"0,add,{name},4" for name in "abcdef"]
    events += [f"{240 + n},remove,{name},4" for n, name in enumerate("bcdef")]
    events += [f"{3840 + n},add,{name}2,4" for n, name in enumerate("bcdef")]
    path = tmp_path / "gap.csv"
    path.write_text(
        "\n".join(["# spotlight trace horizon_s=90000.0", "time_s,event,node,gpus", *events]) + "\n"
    )
    name = "all_spot_then_on_demand"
    wish = (
        f"trace={{kind: file, path: {path}}}",
        "run.iterations=150",
        "iterations_to_target.reserved_only.value=150",
        f"iterations_to_target.{name}={{value: 150, source: 'assumed: for a test'}}",
        "learner.on_demand={after_s: 60, back_after_s: 60}",
    )
    scenario = prepared(name, *wish)
    guess = estimated(scenario, name, curve_of(scenario, name))
    exact = run_task(SimulationTask(scenario, name)).outcome
    assert exact.on_demand == 1
    assert guess.target_h == pytest.approx(exact.target_h, rel=0.1)
    assert guess.target_usd == pytest.approx(exact.target_usd, rel=0.1)
    waits = prepared("all_spot", *wish)
    assert estimated(waits, "all_spot", curve_of(waits, "all_spot")).simulated_h > guess.simulated_h + 0.5


def test_a_price_over_time_is_what_nodes_cost(tmp_path: Path) -> None:
    """As much as the same price stated, and more from when it rises."""
    path = tmp_path / "priced.jsonl"

    def usd(prices: dict[int, float], *, used: bool) -> float:
        head = {"format": "spotlight-trace", "version": 1, "horizon_s": 90000}
        nodes = [{"time_s": 0, "event": "add", "node": name, "gpus": 4} for name in "abcd"]
        points = [{"time_s": time_s, "spot_usd_h": usd_h} for time_s, usd_h in prices.items()]
        path.write_text("".join(json.dumps(line) + "\n" for line in (head, *nodes, *points)))
        stated = "cluster.spot.usd_gpu_h=1"
        trace = f"trace={{kind: file, path: {path}, use_prices: {str(used).lower()}}}"
        target = "iterations_to_target.spotlight={value: 40, source: 'assumed: for a test'}"
        scenario = prepared("spotlight", trace, stated, target)
        assert (scenario.pricing.spot is None) is used
        return estimated(scenario, "spotlight", curve_of(scenario, "spotlight")).target_usd

    flat = usd({0: 4.0}, used=True)
    assert flat == pytest.approx(usd({0: 4.0}, used=False))
    dear = usd({0: 12.0}, used=True)
    assert flat < usd({0: 4.0, 400: 12.0}, used=True) < dear


def test_evaluations_of_a_smaller_cluster_are_as_much_smaller(monkeypatch: pytest.MonkeyPatch) -> None:
    often = "workload.evaluation={every: 2, prompts: 64, steps: 40}"
    scenario = prepared("spotlight", "trace.kind=always_on", often)
    whole = estimated(scenario, "spotlight", curve_of(scenario, "spotlight"))
    monkeypatch.setattr(surrogate, "GPUS_MAX", 12)
    half = estimated(scenario, "spotlight", curve_of(scenario, "spotlight"))
    assert half.iteration_s == pytest.approx(whole.iteration_s, rel=0.05)


@pytest.mark.parametrize(("first_s", "least"), [(0, 4), (60, 0)])
def test_a_trace_that_begins_without_nodes_has_a_point_without_any(
    first_s: int, least: int, tmp_path: Path
) -> None:
    path = tmp_path / "late.csv"
    events = [f"{first_s},add,{name},4" for name in "abcd"]
    path.write_text(
        "\n".join(["# spotlight trace horizon_s=90000", "time_s,event,node,gpus", *events]) + "\n"
    )
    scenario = prepared("spotlight", f"trace={{kind: file, path: {path}}}", "run.until_h=4")
    assert min(counts_wanted([scenario], "spotlight")) == least
