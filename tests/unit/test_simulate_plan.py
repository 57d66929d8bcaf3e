"""Strategies compared and clusters recommended: figures add up, equal questions have equal answers."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Sequence
from dataclasses import replace
from datetime import UTC, datetime
from functools import cache
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.executed_lines import executed_lines

from spotlight.scheduler.events import NodeJoined, NodeLost, NodeNoticed
from spotlight.scheduler.types import NodeId, NodeKind, Phase
from spotlight_fleet.traces.trace import PricePoint
from spotlight_fleet.traces.trace_files import parse_trace
from spotlight_plan.compare import SimulationOutcome, SimulationTask, lasting, outcome_of, run_task, run_tasks
from spotlight_plan.pages.comparison_summary import notes_of
from spotlight_plan.pages.timeline_chart import CELLS_MAX, ROWS_MAX, timeline_chart
from spotlight_plan.scenarios.fleet_events import SpotOffer, spot_events
from spotlight_plan.scenarios.prepare import prepare
from spotlight_plan.scenarios.prepared_scenario import Prepared
from spotlight_plan.scenarios.scenario_file import ScenarioFile
from spotlight_plan.scenarios.scenario_load import load_scenario
from spotlight_plan.scenarios.strategies import STRATEGIES
from spotlight_plan.scenarios.strategy_scenario import scenario_of
from spotlight_plan.simulation.scenario import (
    GpuTimeline,
    IterationTime,
    NodeEvent,
    PriceChanged,
    Segment,
    SimulationResult,
)
from spotlight_plan.simulation.virtual_driver import simulate
from spotlight_plan.strategy_runs import StrategyRuns
from spotlight_plan.traces.generator import TraceSpec, generate

NOW = datetime(2026, 11, 21, tzinfo=UTC)
SMALL = (
    "cluster.boot_s=0",
    "workload.prompts=8",
    "workload.group_size=8",
    "workload.evaluation=null",
    "exploration.seeds_per_prompt=10",
    "exploration.steps=8",
    "run.iterations=6",
    "run.until_h=2",
    "trace={kind: generated, mean_uptime_h: 0.03, mean_downtime_s: 30, notice_lead_s: 20}",
)
"""An eighth of the work, on nodes that stay two minutes: a simulation takes hundredths of a second."""
CONTROLLED = tuple(name for name, strategy in STRATEGIES.items() if strategy.baseline is None)


def small(*overrides: str) -> ScenarioFile:
    return load_scenario("paper-512", [*SMALL, *overrides])


def prepared(*overrides: str) -> Prepared:
    return prepare(small(*overrides), tuple(STRATEGIES), NOW)


def ran(
    prep: Prepared, strategy: str, *, timelines: bool = False
) -> tuple[SimulationResult, SimulationOutcome]:
    scenario = scenario_of(prep, STRATEGIES[strategy], timelines=timelines)
    result = simulate(scenario)
    stated, random_seeds = prep.file.stated_target(STRATEGIES[strategy]), prep.file.random_target
    return result, outcome_of(strategy, scenario, result, stated, random_seeds)


@cache
def ran_small(strategy: str) -> tuple[SimulationResult, SimulationOutcome]:
    return ran(prepared(), strategy, timelines=True)


# -- one strategy ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("strategy", CONTROLLED)
def test_cost_is_gpu_seconds_times_price(strategy: str) -> None:
    result, outcome = ran_small(strategy)
    prices = {NodeKind.RESERVED: 6.88, NodeKind.SPOT: 1.78, NodeKind.ON_DEMAND: 6.88}
    expected = sum(seconds / 3600 * prices[kind] for (kind, _), seconds in result.phase_s.items())
    head_usd = 0.4 * result.end_s / 3600 if STRATEGIES[strategy].learner_moves else 0.0
    assert outcome.simulated_usd == pytest.approx(expected + head_usd)
    assert sum(one.cost_usd for one in result.iterations) <= outcome.simulated_usd
    assert outcome.total_s / 3600 == pytest.approx(result.gpu_hours)


@pytest.mark.parametrize("strategy", CONTROLLED)
def test_phases_add_up_to_the_presence_of_every_gpu(strategy: str) -> None:
    result, outcome = ran_small(strategy)
    present = sum(stay.segments[-1].end_s - stay.segments[0].start_s for stay in result.gpus if stay.segments)
    assert outcome.total_s == pytest.approx(present)
    for phase in Phase:
        drawn = sum(
            part.end_s - part.start_s for stay in result.gpus for part in stay.segments if part.phase is phase
        )
        assert outcome.seconds([phase]) == pytest.approx(drawn), phase


@pytest.mark.parametrize("strategy", CONTROLLED)
def test_the_target_is_the_first_iteration_and_so_many_more(strategy: str) -> None:
    result, outcome = ran_small(strategy)
    assert outcome.problem is None
    assert outcome.iterations == 6
    first = result.iterations[0]
    if outcome.target is None:  # a learner that moves leaves two-minute nodes too little idle time
        assert STRATEGIES[strategy].learner_moves
        assert outcome.preview_share < 0.8
        return
    further = outcome.target.iterations - 1
    assert outcome.target_h * 3600 == pytest.approx(first.end_s + further * outcome.iteration_s)
    assert outcome.target_usd == pytest.approx(first.cost_usd + further * outcome.iteration_usd)


def test_an_iteration_that_was_repeated_counts_once_with_what_was_undone() -> None:
    def times(*numbers: int) -> list[IterationTime]:
        return [IterationTime(n, 10.0 * at, 10.0 * at + 10, 1.0, 4) for at, n in enumerate(numbers)]

    found = [
        (one.iteration, one.start_s, one.end_s, one.cost_usd) for one in lasting(times(0, 1, 2, 1, 2, 2))
    ]
    assert found == [(0, 0, 10, 1), (1, 10, 40, 3), (2, 40, 60, 2)]
    assert lasting(times(0, 1, 2)) == times(0, 1, 2)


def test_simulated_whole_nothing_is_extrapolated() -> None:
    prep = prepared("iterations_to_target.spotlight={value: 6, source: 'assumed: for a test'}")
    result, outcome = ran(prep, "spotlight")
    assert outcome.target_h * 3600 == pytest.approx(result.iterations[-1].end_s)


@settings(max_examples=4)
@given(seed=st.integers(0, 1000), strategy=st.sampled_from(sorted(CONTROLLED)))
def test_the_same_seed_gives_the_same_run_and_another_one_another(seed: int, strategy: str) -> None:
    runs = [ran(prepared(f"run.seed={n}", "run.iterations=2"), strategy)[0] for n in (seed, seed, seed + 1)]
    assert runs[0] == runs[1]
    assert runs[0] != runs[2]


def test_strategies_share_the_trace() -> None:
    prep = prepared()
    spots = [
        tuple((at_s, event) for at_s, event in scenario_of(prep, strategy).nodes if at_s > 0)
        for strategy in STRATEGIES.values()
        if strategy.places == "spot" and not strategy.is_all_spot
    ]
    assert len(spots) == 3
    assert len(spots[0]) > 20
    assert spots[0] == spots[1] == spots[2]
    wide = scenario_of(prep, STRATEGIES["all_spot"]).nodes
    ours = [item for item in wide if item[0] > 0 and not _is_of_slot(item[1], ("node4", "node5"))]
    assert tuple(ours) == spots[0], "two more nodes change nothing of the others"


def _is_of_slot(event: NodeEvent, slots: tuple[str, ...]) -> bool:
    name = event.node.id if isinstance(event, NodeJoined) else event.node
    return name.removeprefix("spot:").split(".")[0] in slots


def test_idle_gpus_explore_without_costing_time() -> None:
    (_, idle), (_, waiting), (_, critical) = map(
        ran_small, ("spotlight", "spot_rollout_only", "critical_path")
    )
    assert idle.spot_idle_share < waiting.spot_idle_share - 0.1
    assert idle.seconds([Phase.EXPLORATION]) > 0
    assert critical.iteration_s > 1.1 * idle.iteration_s
    assert critical.preview_share == 1.0
    assert waiting.preview_share != waiting.preview_share
    assert idle.preemptions > 0


def test_a_run_that_is_cut_off_says_so() -> None:
    _, outcome = ran(prepared("run.until_h=0.02"), "reserved_only")
    assert outcome.problem is not None
    assert "run.until_h" in outcome.problem


@pytest.mark.parametrize(
    ("strategy", "uptime_h", "warned"),
    [
        ("spotlight", 50, True),
        pytest.param("spotlight", 0.03, False, marks=pytest.mark.slow),
        ("reserved_only", 50, False),
    ],
)
def test_too_short_a_span_for_preemptions_is_warned_of(strategy: str, uptime_h: float, warned: bool) -> None:
    prep = prepared(f"trace.mean_uptime_h={uptime_h}", "trace.bursts_per_h=0", "run.until_h=300")
    _, outcome = ran(prep, strategy)
    warnings = [
        line
        for note in notes_of(prep, [StrategyRuns((outcome,))], NOW)
        for line in note.lines
        if "hardly show" in line
    ]
    assert len(warnings) == warned
    if warned:
        assert re.search(r"hardly show: set run\.iterations=1\d\d to simulate to the target\.$", warnings[0])


def test_uneven_ranks_are_reported() -> None:
    _, outcome = ran_small("all_on_demand")
    assert outcome.dropped_share == pytest.approx(64 % 12 / 64)


def test_results_do_not_depend_on_processes() -> None:
    prep = prepared("run.iterations=2")
    tasks = [SimulationTask(prep, name) for name in ("reserved_only", "spotlight")]
    # Each process imports Spotlight again: the slowest test of this file, and the only one with processes.
    done: list[str] = []
    together = run_tasks(tasks, 2, lambda task: done.append(task.strategy))
    assert repr(together) == repr(tuple(map(run_task, tasks)))  # by repr, because NaN is not NaN
    assert done == ["reserved_only", "spotlight"]


# -- traces ------------------------------------------------------------------------------------------------


@given(
    seed=st.integers(0, 100),
    nodes=st.integers(1, 5),
    lead_s=st.sampled_from([0.0, 30.0, 120.0]),
    uptime_s=st.sampled_from([60.0, 1000.0]),
)
def test_every_event_of_a_trace_happens_once(seed: int, nodes: int, lead_s: float, uptime_s: float) -> None:
    spec = TraceSpec(seed, 7200.0, nodes, 2, mean_uptime_s=uptime_s, notice_lead_s=lead_s)
    trace = generate(spec)
    events = spot_events(trace, SpotOffer("H100", 2, 3.5))
    assert [(at_s, type(event)) for at_s, event in events] == [
        (event.time_s, {"add": NodeJoined, "notice": NodeNoticed, "remove": NodeLost}[event.kind])
        for event in trace.events
    ]
    present: dict[NodeId, float | None] = {}
    for at_s, event in events:
        if isinstance(event, NodeJoined):
            node = event.node
            assert (node.kind, node.gpus, node.price_usd_h, node.trains) == (NodeKind.SPOT, 2, 3.5, False)
            present[node.id] = None
        elif isinstance(event, NodeNoticed):
            assert event.deadline_s <= at_s + lead_s + 1e-6
            present[event.node] = event.deadline_s
        elif isinstance(event, NodeLost):
            deadline_s = present.pop(event.node)
            assert deadline_s == (at_s if lead_s else None)


def test_prices_of_a_trace_are_followed() -> None:
    trace = parse_trace("0,add,a\n1000,add,b\n9000,remove,a\n20000,add,c\n", "t")
    trace = replace(trace, prices=(PricePoint(0.5, 2.0), PricePoint(5.0, 3.0)))
    events = spot_events(trace, SpotOffer("H100", 1, None))
    joined = {event.node.id: event.node.price_usd_h for _, event in events if isinstance(event, NodeJoined)}
    assert joined == {"spot:a": 2.0, "spot:b": 2.0, "spot:c": 3.0}
    changes = [(at_s, event) for at_s, event in events if isinstance(event, PriceChanged)]
    named = [(5.0, "a", 3.0), (5.0, "b", 3.0)]  # the first price holds from the start
    assert changes == [(at_s, PriceChanged(NodeId(f"spot:{name}"), usd)) for at_s, name, usd in named]
    assert [at_s for at_s, _ in events] == sorted(at_s for at_s, _ in events)


@given(
    seed=st.integers(0, 100),
    points=st.lists(st.tuples(st.integers(0, 7200), st.sampled_from([1.0, 2.0, 3.0])), min_size=1),
)
def test_every_node_always_has_the_price_in_force(seed: int, points: list[tuple[int, float]]) -> None:
    spec = TraceSpec(seed, 7200.0, 3, 1, mean_uptime_s=1000.0, notice_lead_s=0.0)
    prices = tuple(PricePoint(float(at_s), usd) for at_s, usd in sorted(points))
    events = spot_events(replace(generate(spec), prices=prices), SpotOffer("H100", 1, None))
    assert [at_s for at_s, _ in events] == sorted(at_s for at_s, _ in events)
    moments = sorted({at_s for at_s, _ in events} | {point.time_s for point in prices})
    present: dict[NodeId, float | None] = {}
    left = list(events)
    for moment_s in moments:
        while left and left[0][0] <= moment_s:
            _, event = left.pop(0)
            if isinstance(event, NodeJoined):
                present[event.node.id] = event.node.price_usd_h
            elif isinstance(event, NodeLost):
                del present[event.node]
            elif isinstance(event, PriceChanged):
                assert present[event.node] != event.price_usd_h
                present[event.node] = event.price_usd_h
        known = [point.usd_h for point in prices if point.time_s <= moment_s]
        in_force = known[-1] if known else prices[0].usd_h
        assert set(present.values()) <= {in_force}


def test_the_work_for_prices_by_the_minute_grows_with_their_number(tmp_path: Path) -> None:
    """A sweep over the trace for each of its prices once took minutes for a week of them."""

    def traced(hours: int) -> ScenarioFile:
        draw = random.Random(0)
        trace = {
            "metadata": {"gap_seconds": 60},
            "data": [int(draw.random() < 0.9) * 4 for _ in range(hours * 60)],
            "prices": [round(5 + draw.random(), 2) for _ in range(hours * 60)],
        }
        path = tmp_path / f"{hours}.json"
        path.write_text(json.dumps(trace))
        return small("trace.kind=file", f"trace.path={path}", "trace.use_prices=true", f"run.until_h={hours}")

    def events_of(file: ScenarioFile) -> Sequence[tuple[float, NodeEvent]]:
        return scenario_of(prepare(file, tuple(STRATEGIES), NOW), STRATEGIES["spotlight"]).nodes

    quarter, day = traced(6), traced(24)
    prices = sum(isinstance(event, PriceChanged) for _, event in events_of(day))
    assert prices > 0.7 * 24 * 60
    assert executed_lines(lambda: events_of(day)) < 3 * executed_lines(lambda: events_of(quarter))  # 1.9


def test_a_notice_without_a_removal_ends_with_the_trace(tmp_path: Path) -> None:
    text = "# spotlight trace horizon_s=100.0\ntime_s,event,node,gpus\n0,add,a,1\n50,notice,a,1\n"
    events = spot_events(parse_trace(text, "t"), SpotOffer("H100", 1, 1.0))
    assert events[-1] == (50.0, NodeNoticed(NodeId("spot:a"), 100.0))


# -- pictures ----------------------------------------------------------------------------------------------


def timelines(gpus: int, stays: int) -> list[GpuTimeline]:
    draw = random.Random(gpus)
    made = []
    for gpu in range(gpus):
        at_s = draw.random()
        for stay in range(stays):
            parts = []
            for phase in (Phase.SETUP, Phase.ROLLOUT, Phase.IDLE):
                until_s = at_s + 5 * draw.random()
                parts.append(Segment(at_s, until_s, phase))
                at_s = until_s
            kind = NodeKind.SPOT if gpu % 3 else NodeKind.RESERVED
            made.append(GpuTimeline(NodeId(f"n{gpu}.{stay}"), 0, kind, tuple(parts)))
            at_s += draw.random()
    return made


@pytest.mark.parametrize(("gpus", "stays"), [(1, 1), (12, 6), (1000, 2)])
def test_every_gpu_is_in_the_picture(gpus: int, stays: int) -> None:
    content = timeline_chart(timelines(gpus, stays), 0.0, 60.0)
    assert sum(row.gpus for row in content.rows) <= gpus
    assert len(content.rows) <= ROWS_MAX + 2
    assert [row.kind for row in content.rows] == sorted(
        (row.kind for row in content.rows), key=list(NodeKind).index
    )
    ends: dict[int, float] = {}
    for part in content.stretches:
        assert ends.get(part.row, 0.0) <= part.start_s + 1e-9 < part.end_s
        ends[part.row] = part.end_s


def test_a_cell_shows_what_took_most_of_it() -> None:
    stay = GpuTimeline(
        NodeId("n"), 0, NodeKind.SPOT,
        (Segment(0, 40, Phase.ROLLOUT), Segment(40, 40.4, Phase.LOST), Segment(40.4, 100, Phase.IDLE)),
    )  # fmt: skip
    content = timeline_chart([stay], 0.0, 400.0)
    assert content.cell_s == 400 / CELLS_MAX
    assert [(part.phase, part.start_s, part.end_s) for part in content.stretches] == [
        (Phase.ROLLOUT, 0.0, 40.0),
        (Phase.IDLE, 40.0, 100.0),
    ]
    with pytest.raises(ValueError, match="expected a stretch"):
        timeline_chart([stay], 5.0, 5.0)
