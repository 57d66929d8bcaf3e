"""The planner's closed form: its limits, what it is monotonous in, and how near it is to the simulation."""

from __future__ import annotations

import json
import math
from datetime import UTC, datetime
from itertools import pairwise
from pathlib import Path
from statistics import fmean

import pytest

from spotlight_plan.closed_form import ClosedForm
from spotlight_plan.compare import SimulationTask, run_task
from spotlight_plan.iteration_form import IterationPace, chosen_variance
from spotlight_plan.scenarios.prepare import prepare
from spotlight_plan.scenarios.prepared_scenario import Prepared, at_starts
from spotlight_plan.scenarios.scenario_load import load_scenario
from spotlight_plan.scenarios.strategies import strategy_named

NOW = datetime(2026, 11, 21, tzinfo=UTC)
LIMIT_H = 30.0


def prepared(strategy: str, *overrides: str) -> Prepared:
    """Two nodes of four GPUs train, four others only roll out."""
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
        "run.until_h=24",
        "trace={kind: always_on}",
    )
    return prepare(load_scenario("paper-512", [*small, *overrides]), (strategy,), NOW)


def form_of(strategy: str, *overrides: str) -> ClosedForm:
    return ClosedForm(prepared(strategy, *overrides), strategy_named(strategy), LIMIT_H)


def pace(strategy: str, nodes: int, *overrides: str) -> IterationPace:
    return form_of(strategy, *overrides).pace(nodes)


@pytest.mark.parametrize(
    "strategy",
    ["spotlight", "spot_rollout_only", "critical_path", "spotlight+gap+tsp", "spotlight+gap+tag", "all_spot"],
)
def test_more_nodes_never_make_an_iteration_longer(strategy: str) -> None:
    form = form_of(strategy)
    seconds = [form.pace(nodes).seconds for nodes in range(9)]
    assert all(after <= 1.05 * before for before, after in pairwise(seconds))  # the last wave grows


def test_more_idle_nodes_explore_more() -> None:
    form = form_of("spotlight")
    found = [form.pace(nodes) for nodes in range(1, 9)]
    shares = [one.previews for one in found]
    assert shares == sorted(shares)
    contrasts = [one.explored.contrast for one in found if one.explored and one.explored.coverage == 1]
    assert all(after > 0.97 * before for before, after in pairwise(contrasts))  # the last wave leaves idle
    assert contrasts[-1] > contrasts[0] > 1


def test_with_any_number_of_workers_training_remains() -> None:
    many = pace("spot_rollout_only", 10_000).seconds
    scoring_s = 16 * 8 * 0.117 * 4 / 32
    assert form_of("spot_rollout_only")._iteration._training_s < many
    assert many < form_of("spot_rollout_only")._iteration._training_s + scoring_s + 8


def test_overlapping_hides_the_shorter_of_both() -> None:
    plain, overlapped = pace("spot_rollout_only", 4), pace("spot_rollout_only+gap", 4)
    assert overlapped.seconds < plain.seconds
    # At most half is hidden: both take their time on GPUs of their own.
    assert overlapped.seconds > plain.seconds / 2


@pytest.mark.parametrize(
    ("strategy", "nodes"), [("all_spot", 1), ("spot_rollout_only+gap", 0), ("disaggregated", 0)]
)
def test_where_nothing_trains_or_rolls_out_nothing_goes_on(strategy: str, nodes: int) -> None:
    assert math.isinf(pace(strategy, nodes).seconds)


def test_chosen_groups_vary_more_the_more_there_is_to_choose_from() -> None:
    assert chosen_variance(16, 16) == pytest.approx(1)
    found = [chosen_variance(16, pool) for pool in (16, 20, 40, 80, 160)]
    assert found == sorted(found)
    assert found[2] == pytest.approx(2.21, rel=0.05)  # mean of 400 drawn pools


@pytest.mark.parametrize(
    "strategy",
    ["reserved_only", "spotlight", "critical_path", "all_spot", "disaggregated+gap", "disaggregated+gap+tsp"],
)
def test_it_is_near_the_simulation(strategy: str) -> None:
    scenario = prepared(strategy, "cluster.spot.usd_gpu_h_on_demand=6.88")
    exact = run_task(SimulationTask(scenario, strategy)).outcome
    found = ClosedForm(scenario, strategy_named(strategy), LIMIT_H).outcome(scenario, seen=5)
    assert found.iteration_s == pytest.approx(exact.iteration_s, rel=0.1)
    assert found.iteration_usd == pytest.approx(exact.iteration_usd, rel=0.1)
    assert found.first_h == pytest.approx(exact.first_h, rel=0.15)
    if not math.isnan(exact.contrast):
        assert found.contrast == pytest.approx(exact.contrast, rel=0.15)


def test_dollars_are_of_the_nodes_that_are_there(tmp_path: Path) -> None:
    """A price over time costs as much as the same price stated, and more from when it rises."""
    path = tmp_path / "priced.jsonl"

    def usd(prices: dict[int, float], *, used: bool) -> float:
        head = {"format": "spotlight-trace", "version": 1, "horizon_s": 90000}
        nodes = [{"time_s": 0, "event": "add", "node": name, "gpus": 4} for name in "abcd"]
        points = [{"time_s": time_s, "spot_usd_h": usd_h} for time_s, usd_h in prices.items()]
        path.write_text("".join(json.dumps(line) + "\n" for line in (head, *nodes, *points)))
        trace = f"trace={{kind: file, path: {path}, use_prices: {str(used).lower()}}}"
        target = "iterations_to_target.spotlight={value: 40, source: 'assumed: for a test'}"
        scenario = prepared("spotlight", trace, "cluster.spot.usd_gpu_h=1", target)
        return ClosedForm(scenario, strategy_named("spotlight"), LIMIT_H).outcome(scenario).target_usd

    flat = usd({0: 4.0}, used=True)
    assert flat == pytest.approx(usd({0: 4.0}, used=False))
    dear = usd({0: 12.0}, used=True)
    assert flat < usd({0: 4.0, 200: 12.0}, used=True) < dear


def gap_trace(path: Path) -> str:
    """Of six nodes five leave for an hour."""
    events = [f"0,add,{name},4" for name in "abcdef"]
    events += [f"{240 + n},remove,{name},4" for n, name in enumerate("bcdef")]
    events += [f"{3840 + n},add,{name}2,4" for n, name in enumerate("bcdef")]
    path.write_text(
        "\n".join(["# spotlight trace horizon_s=90000.0", "time_s,event,node,gpus", *events]) + "\n",
        encoding="utf-8",
    )
    return f"trace={{kind: file, path: {path}}}"


def test_a_learner_that_takes_a_node_on_demand_works_and_pays_meanwhile(tmp_path: Path) -> None:
    name = "all_spot_then_on_demand"
    wish = (
        gap_trace(tmp_path / "gap.csv"),
        "run.iterations=60",
        "iterations_to_target.reserved_only.value=60",
        f"iterations_to_target.{name}={{value: 60, source: 'assumed: for a test'}}",
        "learner.on_demand={after_s: 60, back_after_s: 60}",
    )
    helped, waits = (
        ClosedForm(scenario, strategy_named(strategy), LIMIT_H).outcome(scenario, seen=60)
        for strategy in (name, "all_spot")
        if (scenario := prepared(strategy, *wish))
    )
    assert helped.simulated_h < waits.simulated_h
    exact = run_task(SimulationTask(prepared(name, *wish), name)).outcome
    assert exact.on_demand == 1
    assert helped.simulated_h == pytest.approx(exact.simulated_h, rel=0.15)
    assert helped.simulated_usd == pytest.approx(exact.simulated_usd, rel=0.15)


def test_a_run_that_outlasts_the_trace_goes_on_at_its_mean() -> None:
    short = prepared("spot_rollout_only", "run.until_h=1")
    form = ClosedForm(short, strategy_named("spot_rollout_only"), LIMIT_H)
    few = form.outcome(short, seen=10)
    many = form.outcome(short, seen=10_000_000)
    assert few.problem is None
    assert many.problem is not None
    assert math.isnan(many.target_h)


def test_slower_scorers_bound_an_iteration() -> None:
    fast, slow = (pace("spot_rollout_only", 4, f"rewards.scorers={n}").seconds for n in (64, 1))
    assert slow > fast + 40  # 128 samples of .47 s


def test_where_nodes_come_later_a_run_takes_longer() -> None:
    calm = prepared("spotlight")
    gone = prepared(
        "spotlight", "trace={kind: generated, mean_uptime_h: 0.2, mean_downtime_s: 600, notice_lead_s: 30}"
    )
    slow, fast = (
        ClosedForm(one, strategy_named("spotlight"), LIMIT_H).outcome(one, seen=50) for one in (gone, calm)
    )
    assert slow.simulated_h > fast.simulated_h


LOST = "trace={kind: generated, mean_uptime_h: 0.7, mean_downtime_s: 60, notice_lead_s: 0}"
LONG = ("workload.trained_timesteps=200", "run.iterations=5", "run.starts=4")
"""Training takes most of an iteration: 740 s, or 370 of a subset."""


@pytest.mark.parametrize(
    "strategy",
    [
        "all_spot+subset",
        *(pytest.param(name, marks=pytest.mark.slow) for name in ("all_spot", "all_spot+gap")),
    ],
)
def test_a_learner_that_loses_its_nodes_trains_again_as_in_the_simulation(strategy: str) -> None:
    named = strategy_named(strategy)
    starts = at_starts(prepared(strategy, LOST, *LONG))
    form = ClosedForm(starts[0], named, LIMIT_H, starts)
    found = fmean(form.outcome(start, seen=5).simulated_h for start in starts)
    calm = ClosedForm(stays := prepared(strategy, *LONG), named, LIMIT_H).outcome(stays, seen=5).simulated_h
    exact = fmean(run_task(SimulationTask(start, strategy)).outcome.simulated_h for start in starts)
    assert exact > 1.15 * calm
    assert found == pytest.approx(exact, rel=0.08)


def test_the_longer_training_lasts_the_more_a_loss_costs_and_a_notice_helps() -> None:
    def added(timesteps: int, notice_s: int = 0) -> float:
        trained, trace = f"workload.trained_timesteps={timesteps}", f"{LOST[:-2]}{notice_s}}}"
        return pace("all_spot", 6, trace, trained).seconds - pace("all_spot", 6, trained).seconds

    assert 0 < 2 * added(100) < added(200)
    assert 0 < added(200, 60) < added(200)
    assert 3600 * LIMIT_H < added(5000) < math.inf
