"""Strategies from several starts: percentiles, ranges, and what one start alone gives."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from datetime import UTC, datetime
from functools import cache
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spotlight_plan.candidates import Candidate, Machine
from spotlight_plan.compare import SimulationOutcome, SimulationTask, run_task
from spotlight_plan.pages.comparison_summary import between, hours, notes_of, table_of, usd
from spotlight_plan.pages.plan_page import answer_text, lines_of
from spotlight_plan.scenarios.prepare import prepare
from spotlight_plan.scenarios.prepared_scenario import Prepared, at_starts
from spotlight_plan.scenarios.scenario_load import load_scenario
from spotlight_plan.scenarios.scenario_sections import Target
from spotlight_plan.search import EvaluatedCandidate, Goal, SearchResult, pareto, search
from spotlight_plan.strategy_runs import StrategyRuns, grouped, range_of, tasks_from_starts
from spotlight_rewards.base.errors import ConfigError

NOW = datetime(2026, 11, 21, tzinfo=UTC)
SMALL = (
    "cluster.boot_s=0",
    "iterations_to_target.spotlight={value: [71, 109, 160], source: 'derived: for a test'}",
    "workload.prompts=8",
    "workload.group_size=8",
    "workload.evaluation=null",
    "exploration={seeds_per_prompt: 10, steps: 8}",
    "run.iterations=4",
    "run.until_h=2",
    "run.starts=3",
    "trace={kind: generated, mean_uptime_h: 0.03, mean_downtime_s: 30, notice_lead_s: 20}",
)
NAMES = ("reserved_only", "spotlight")
NUMBERS = st.one_of(st.floats(0, 1e9), st.just(math.nan))


def prepared(*overrides: str) -> Prepared:
    return prepare(load_scenario("paper-512", [*SMALL, *overrides]), NAMES, NOW)


@cache
def three_starts() -> tuple[StrategyRuns, ...]:
    outcomes = [run_task(task).outcome for task in tasks_from_starts(prepared(), NAMES)]
    return grouped(outcomes, 3)


@given(values=st.lists(NUMBERS, min_size=1), order=st.randoms())
def test_percentiles_are_ordered_whatever_the_order_of_starts(values: list[float], order: object) -> None:
    found = range_of(values)
    figures = (found.least, found.p50, found.p90, found.most)
    known = [value for value in figures if not math.isnan(value)]
    assert known == sorted(known)
    assert list(figures)[: len(known)] == known  # only the largest are unknown
    order.shuffle(values)  # type: ignore[attr-defined]
    assert repr(range_of(values)) == repr(found)


@given(value=NUMBERS, starts=st.integers(1, 9))
def test_equal_starts_have_no_range(value: float, starts: int) -> None:
    found = range_of([value] * starts)
    assert {repr(one) for one in (found.least, found.p50, found.p90, found.most)} == {repr(value + 0.0)}


@pytest.mark.parametrize(
    ("unknown", "p50_known", "p90_known"), [(0, True, True), (1, True, False), (6, False, False)]
)
def test_a_start_without_a_figure_is_the_largest(unknown: int, p50_known: bool, p90_known: bool) -> None:
    found = range_of([1.0] * (10 - unknown) + [math.nan] * unknown)
    assert (found.p50 == 1, found.p90 == 1) == (p50_known, p90_known)


def test_the_first_start_is_the_scenario_itself() -> None:
    alone = [run_task(task).outcome for task in tasks_from_starts(prepared("run.starts=1"), NAMES)]
    assert repr([one.first for one in three_starts()]) == repr(alone)
    for one in grouped(alone, 1):
        figure = one.target_h
        assert figure.least == figure.p50 == figure.p90 == figure.most == one.first.target_h


def test_starts_differ_and_are_the_same_again_in_any_order() -> None:
    tasks = tasks_from_starts(prepared(), NAMES)
    backwards = [run_task(task).outcome for task in reversed(tasks)]
    again = grouped(backwards[::-1], 3)
    assert repr(again) == repr(three_starts())
    for one in three_starts():
        assert one.target_h.least < one.target_h.p50 <= one.target_h.p90 < one.target_h.most


def test_starts_of_a_trace_file_are_spread_evenly(tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    path.write_text(
        "# spotlight trace horizon_s=9000.0\ntime_s,event,node,gpus\n"
        "0,add,a,2\n3500,add,b,2\n6500,remove,a,2\n"
    )
    file = prepared(f"trace={{kind: file, path: {path}}}", "run.until_h=2")
    first = [start.trace.events[0] for start in at_starts(file)]
    assert [len([e for e in start.trace.events if e.time_s == 0]) for start in at_starts(file)] == [1, 1, 2]
    assert [start.trace.horizon_s for start in at_starts(file)] == [7200] * 3
    assert [start.trace.events[1].time_s for start in at_starts(file)][:2] == [3500, 500]
    assert [start.file.run.seed for start in at_starts(file)] == [0, 1, 2]
    assert len(first) == 3


def test_to_target_the_range_has_the_interval_of_the_iterations() -> None:
    (_, one) = three_starts()
    assert one.first.target is not None
    assert one.iterations_to_target.least, one.iterations_to_target.most == (71, 160)
    least, most = one.ends_h
    assert least == min(outcome.hours_after(71) for outcome in one.outcomes) < one.target_h.least
    assert most == max(outcome.hours_after(160) for outcome in one.outcomes) > one.target_h.most
    for outcome in one.outcomes:
        assert outcome.hours_after(109) == pytest.approx(outcome.target_h)
        assert outcome.usd_after(109) == pytest.approx(outcome.target_usd)


def test_an_interval_out_of_order_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"iterations_to_target\.spotlight\.value.*ascending"):
        prepared("iterations_to_target.spotlight={value: [110, 109, 160], source: 'assumed: for a test'}")


def test_the_table_and_notes_tell_percentiles_and_starts() -> None:
    cells = {line.label: line.cells for line in table_of(three_starts())}
    assert cells["time to target, p50"] == tuple(hours(one.target_h.p50) for one in three_starts())
    assert cells["iterations to target"] == ("200", "109")
    assert "the first of 3 starts" in cells
    text = " ".join(line for note in notes_of(prepared(), three_starts(), NOW) for line in note.lines)
    assert "seeds 0 to 2" in text
    assert "spotlight: 109 (71 to 160), derived" in text


@pytest.mark.parametrize(("value", "warned"), [(200, False), (240, True)])
def test_other_iterations_for_seeds_of_the_same_kind_are_warned_of(value: int, warned: bool) -> None:
    alone, exploring = three_starts()
    target = Target(value=value, source="assumed: for a test")
    named = [replace(one, strategy="spot_rollout_only", target=target) for one in alone.outcomes]
    like = StrategyRuns(tuple(named))
    lines = [line for note in notes_of(prepared(), [alone, exploring, like], NOW) for line in note.lines]
    assert any("(reserved_only 200; spot_rollout_only 240)" in line for line in lines) is warned


def test_what_holds_for_some_starts_is_reported_of_these() -> None:
    (_, one) = three_starts()
    some = StrategyRuns(
        (*one.outcomes[:2], replace(one.first, problem="cut off", target=None, target_h=math.nan))
    )
    lines = [line for note in notes_of(prepared(), [some], NOW) for line in note.lines]
    assert "spotlight from 1 of 3 starts did not come to its end: cut off" in lines
    assert between(hours, *some.ends_h).endswith("or more")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (between(hours, 2.1, 3.9), "2.10-3.90 h"),
        (between(usd, 96, 1410), "$96.00-1,410"),
        (between(usd, 5, 5), "$5.00"),
    ],
)
def test_ranges_name_their_unit_once(text: str, expected: str) -> None:
    assert text == expected


def of(times: Sequence[float], outcome: SimulationOutcome) -> StrategyRuns:
    return StrategyRuns(tuple(replace(outcome, target_h=time, target_usd=10 / time) for time in times))


def test_a_goal_holds_at_p90_and_what_is_open_is_ranked_by_p50() -> None:
    outcome = three_starts()[0].first
    steady, wild = of([2.0] * 5, outcome), of([1.0, 1.0, 1.0, 1.0, 4.0], outcome)
    assert Goal(deadline_h=2.5).met_by(steady)
    assert not Goal(deadline_h=2.5).met_by(wild)
    assert Goal(budget_usd=11).rank(wild) < Goal(budget_usd=11).rank(steady)


def test_candidates_without_a_target_come_last_and_hide_none_behind_them() -> None:
    """Not a number orders nothing: compared as it is, it would be the nearest, or the end of the front."""
    outcome, cluster = three_starts()[0].first, Machine("H100", 4)
    runs = [of([time] * 3, outcome) for time in (math.nan, 5.0, 3.0, 4.0)]
    found = [
        EvaluatedCandidate(Candidate("reserved_only", cluster, cluster, nodes, 0), one)
        for nodes, one in enumerate(runs)
    ]
    goal = Goal(deadline_h=1)
    ranked = sorted(found, key=lambda one: goal.rank(one.runs))
    assert [one.candidate.reserved_nodes for one in ranked] == [2, 3, 1, 0]
    assert [one.candidate.reserved_nodes for one in pareto(found)] == [2, 3, 1]  # dearer if faster
    result = SearchResult(goal, tuple(found), pareto(found), None, (), ())
    assert result.nearest.candidate.reserved_nodes == 2
    # Simulated, the one that seemed nearest is farther than another by the closed form.
    missed = [
        replace(found[nodes], runs=of([time] * 3, outcome), simulated=True)
        for nodes, time in ((3, 9), (2, 8))
    ]
    worse = replace(result, confirmed=tuple(missed))
    assert worse.nearest == found[1]
    assert "5.00 h" in answer_text(worse)
    fewer = replace(worse, evaluated=tuple(found[2:]))
    assert "8.00 h" in answer_text(fewer)
    assert "which simulated misses it" in answer_text(fewer)
    assert [line.cells[1] for line in lines_of(result, every=True)] == [
        hours(time) for time in (3.0, 4.0, 5.0, math.nan)
    ]


def test_a_run_that_is_cut_off_has_no_target_whatever_its_iterations_took(tmp_path: Path) -> None:
    """The only spot node leaves and never comes back: the iterations before do not tell of the others."""
    path = tmp_path / "gone.csv"
    path.write_text("# spotlight trace horizon_s=9000.0\ntime_s,event,node,gpus\n0,add,a,2\n400,remove,a,2\n")
    gone = f"trace={{kind: file, path: {path}}}"
    scenario = prepared(gone, "cluster.reserved.rolls_out=false", "run.iterations=40")
    outcome = run_task(SimulationTask(scenario, "spotlight")).outcome
    assert outcome.problem is not None
    assert outcome.iterations > 1
    assert outcome.iteration_s > 0
    assert outcome.target is None
    assert math.isnan(outcome.target_h)
    assert "did not come to its end" in outcome.no_target


def test_a_trace_without_any_node_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "none.csv"
    path.write_text("# spotlight trace horizon_s=9000.0\ntime_s,event,node,gpus\n8000,add,a,2\n")
    with pytest.raises(ConfigError, match=r"trace.*no spot node in all the time.*rolls out, for spotlight"):
        prepared(f"trace={{kind: file, path: {path}}}", "cluster.reserved.rolls_out=false")


def test_the_answer_is_simulated_from_every_start() -> None:
    wish = (
        "plan={iterations: 3, strategies: [reserved_only, spotlight], gpu_types: [H100], "
        "reserved_nodes: [1], spot_nodes: [2], parts: []}"
    )
    targets = (
        "iterations_to_target.spotlight={value: 3, source: 'assumed: for a test'}",
        "iterations_to_target.reserved_only.value=4",
    )
    calm = "trace={kind: generated, mean_uptime_h: 2, mean_downtime_s: 60}"
    prices = ("cluster.reserved.usd_gpu_h=6.88", "cluster.spot.usd_gpu_h=1.78")
    file = load_scenario("paper-512", [*SMALL, wish, *targets, calm, *prices])
    found = search(file, Goal(deadline_h=1000), NOW)
    assert found.answer is not None
    assert len(found.answer.runs.outcomes) == 3
    assert all(len(one.runs.outcomes) == 3 for one in found.evaluated)
    missed = search(file, Goal(deadline_h=found.answer.runs.target_h.p50), NOW)
    assert missed.answer is None or missed.answer.candidate != found.answer.candidate
