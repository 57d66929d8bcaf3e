"""What is made of traces: notices, parts, repetitions, fewer nodes, synthetic ones, statistics."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spotlight_fleet.traces.trace import PricePoint, Trace, TraceError, TraceEvent, TraceEventKind
from spotlight_fleet.traces.transforms import cut, limit, repeat, with_notices
from spotlight_plan.traces.generator import TraceSpec, generate
from spotlight_plan.traces.picture import html, sparkline
from spotlight_plan.traces.trace_statistics import availability, statistics

ADD, NOTICE, REMOVE = TraceEventKind.ADD, TraceEventKind.NOTICE, TraceEventKind.REMOVE

specs = st.builds(
    TraceSpec,
    seed=st.integers(0, 1000),
    horizon_s=st.floats(600, 10_000),
    nodes=st.integers(1, 6),
    gpus_per_node=st.integers(1, 8),
    mean_uptime_s=st.floats(120, 5000),
    mean_downtime_s=st.floats(0, 2000),
    bursts_per_h=st.sampled_from([0.0, 2.0]),
    notice_lead_s=st.sampled_from([0.0, 30.0, 5000.0]),
)


def present_at(trace: Trace, time_s: float) -> int:
    return next(part.nodes for part in availability(trace) if part.start_s <= time_s < part.end_s)


def events(*rows: tuple[float, TraceEventKind, str]) -> tuple[TraceEvent, ...]:
    return tuple(TraceEvent(time_s, kind, node, 2) for time_s, kind, node in rows)


@given(specs)
def test_generated_traces_are_possible_and_the_same_again(spec: TraceSpec) -> None:
    trace = generate(spec)  # a Trace checks itself
    assert generate(spec) == trace
    assert statistics(trace).nodes_max <= spec.nodes
    noticed = sum(event.kind is NOTICE for event in trace.events)
    assert noticed == (statistics(trace).preemptions if spec.notice_lead_s else 0)


def test_another_seed_is_another_trace_and_more_places_keep_the_first() -> None:
    spec = TraceSpec(seed=1, horizon_s=50_000, nodes=3, bursts_per_h=1)
    assert generate(spec).events != generate(replace(spec, seed=2)).events
    few, many = generate(spec), generate(replace(spec, nodes=5))
    places = {"node0", "node1", "node2"}
    assert tuple(event for event in many.events if event.node.split(".")[0] in places) == few.events


def test_a_generated_trace_has_the_rates_it_was_asked_for() -> None:
    spec = TraceSpec(seed=0, horizon_s=400 * 3600, nodes=20, mean_uptime_s=7200, mean_downtime_s=1800)
    numbers = statistics(generate(spec))
    assert numbers.nodes_mean == pytest.approx(16, rel=0.03)
    assert numbers.preemptions_per_node_h == pytest.approx(0.5, rel=0.05)
    assert numbers.uptime_mean_s == pytest.approx(7200, rel=0.05)
    bursty = statistics(generate(replace(spec, bursts_per_h=0.5, burst_fraction=0.8)))
    assert bursty.burst_largest > 10 > numbers.burst_largest
    assert bursty.burst_share > numbers.burst_share + 0.15
    assert numbers.burst_share == pytest.approx(numbers.burst_share_by_chance, rel=0.05)


def test_bursts_on_a_dense_trace_do_not_chain_into_one() -> None:
    spec = TraceSpec(seed=0, horizon_s=24 * 3600, nodes=400, mean_uptime_s=7200, mean_downtime_s=600)
    alone = statistics(generate(spec))
    assert alone.preemptions > 4000, "one in 20 s: chained, all would be one burst"
    assert alone.burst_largest < 30
    assert alone.bursts > 300
    assert alone.burst_share == pytest.approx(alone.burst_share_by_chance, abs=0.02)
    bursty = statistics(generate(replace(spec, mean_uptime_s=72000, bursts_per_h=1.0)))
    assert 150 < bursty.burst_largest <= 400


def test_a_burst_takes_nodes_of_one_zone_within_three_minutes() -> None:
    spec = TraceSpec(
        seed=3,
        horizon_s=200 * 3600,
        nodes=12,
        mean_uptime_s=1e9,
        zones=3,
        bursts_per_h=0.1,
        burst_fraction=1.0,
    )
    gone = [event for event in generate(spec).events if event.kind is REMOVE]
    zones = {event.node.split("-")[0] if "-" in event.node else "zone0" for event in gone}
    assert zones == {"zone0", "zone1", "zone2"}
    together: dict[str, list[list[float]]] = {}
    for event in gone:
        zone = event.node.split("-")[0] if "-" in event.node else "zone0"
        groups = together.setdefault(zone, [[]])
        if groups[-1] and event.time_s - groups[-1][0] > 180:
            groups.append([])
        groups[-1].append(event.time_s)
    sizes = [len(group) for groups in together.values() for group in groups]
    assert sum(sizes) / len(sizes) > 3.5, "four nodes a zone, lost together unless one was not back yet"


@pytest.mark.parametrize(
    "change",
    [
        {"nodes": 0},
        {"horizon_s": 0.0},
        {"mean_uptime_s": math.nan},
        {"bursts_per_h": -1.0},
        {"burst_fraction": 1.5},
        {"notice_lead_s": -1.0},
    ],
)
def test_an_impossible_specification_names_the_field(change: dict[str, float]) -> None:
    with pytest.raises(TraceError, match=next(iter(change))):
        replace(TraceSpec(seed=0, horizon_s=3600, nodes=2), **change)  # type: ignore[arg-type]


def test_traces_that_would_fill_the_memory_are_refused() -> None:
    spec = TraceSpec(seed=0, horizon_s=3600, nodes=2)
    for change in ({"horizon_s": 1e15}, {"nodes": 10**9}, {"bursts_per_h": 1e9}, {"mean_uptime_s": 1e-9}):
        with pytest.raises(TraceError, match="events; expected at most 10,000,000"):
            replace(spec, **change, mean_downtime_s=0.0)  # type: ignore[arg-type]
    for hours in (1e12, 1e300):
        with pytest.raises(TraceError, match="events; expected at most 10,000,000"):
            repeat(Trace((), 10.0, "made"), hours * 3600)


@given(specs, st.floats(1, 300))
def test_notices_come_a_lead_before_and_never_before_the_node(spec: TraceSpec, lead_s: float) -> None:
    plain = generate(replace(spec, notice_lead_s=0.0))
    trace = with_notices(plain, lead_s)
    came: dict[str, float] = {}
    warned: dict[str, float] = {}
    for event in trace.events:
        if event.kind is ADD:
            came[event.node] = event.time_s
        elif event.kind is NOTICE:
            warned[event.node] = event.time_s
        else:
            assert warned.pop(event.node) == max(event.time_s - lead_s, came[event.node])
    assert with_notices(trace, 0).events == plain.events
    assert with_notices(trace, lead_s).events == trace.events


@given(specs, st.floats(0, 0.9), st.floats(0.05, 1))
def test_a_cut_shows_the_same_nodes_at_the_same_times(spec: TraceSpec, start: float, length: float) -> None:
    trace = generate(spec)
    start_s = start * trace.horizon_s
    end_s = min(start_s + length * trace.horizon_s, trace.horizon_s)
    part = cut(trace, start_s, end_s)
    assert part.horizon_s == end_s - start_s
    for share in (0.001, 0.3, 0.77):
        at_s = share * part.horizon_s
        assert present_at(part, at_s) == present_at(trace, start_s + at_s)


def test_a_cut_keeps_pending_notices_and_prices_and_refuses_what_is_not_there() -> None:
    trace = Trace(
        events((0, ADD, "a"), (10, NOTICE, "a"), (40, REMOVE, "a")),
        100.0,
        "made",
        (PricePoint(0, 1.0), PricePoint(30, 2.0)),
    )
    part = cut(trace, 20, 100)
    assert part.events == events((0, ADD, "a"), (0, NOTICE, "a"), (20, REMOVE, "a"))
    assert part.prices == (PricePoint(0, 1.0), PricePoint(10, 2.0))
    for start_s, end_s in ((-1, 5), (5, 5), (0, 101)):
        with pytest.raises(TraceError, match="expected a part"):
            cut(trace, start_s, end_s)


@given(specs, st.floats(0.1, 4))
def test_a_repeated_trace_repeats_the_number_of_nodes(spec: TraceSpec, times: float) -> None:
    trace = generate(spec)
    long = repeat(trace, times * trace.horizon_s)
    assert long.horizon_s == times * trace.horizon_s
    for share in (0.01, 0.41, 0.98):
        at_s = share * long.horizon_s
        assert present_at(long, at_s) == present_at(trace, math.fmod(at_s, trace.horizon_s))


@given(st.integers(600_000, 5_000_000))
def test_a_trace_whose_last_event_is_its_end_can_be_repeated(horizon_ms: int) -> None:
    """Multiples of such a time are above the sum that they should equal, or below it."""
    end_s = horizon_ms / 1000
    prices = (PricePoint(0, 1.0), PricePoint(end_s, 2.0))
    trace = Trace(events((0, ADD, "a"), (end_s, REMOVE, "a")), end_s, "made", prices)
    assert repeat(trace, 24 * end_s).horizon_s == 24 * end_s


def test_at_a_seam_survivors_go_on_and_the_surplus_leaves() -> None:
    trace = Trace(events((0, ADD, "a"), (5, ADD, "b"), (6, REMOVE, "a"), (8, ADD, "c")), 10.0, "made")
    twice = repeat(trace, 20)
    # b goes on as a did, c is surplus; the second round's a is b.
    assert twice.events[4:] == events(
        (10, REMOVE, "c"), (15, ADD, "b@2"), (16, REMOVE, "b"), (18, ADD, "c@2")
    )
    again = repeat(twice, 40)  # names of an earlier repetition do not clash
    assert statistics(again).nodes_max == 2


@given(specs, st.integers(1, 6))
def test_a_limited_trace_holds_what_there_is_up_to_the_limit(spec: TraceSpec, nodes: int) -> None:
    trace = generate(replace(spec, notice_lead_s=0.0))
    few = limit(trace, nodes)
    for share in (0.0, 0.13, 0.35, 0.58, 0.99):
        at_s = share * trace.horizon_s
        assert present_at(few, at_s) == min(present_at(trace, at_s), nodes)


def test_a_limit_takes_no_node_that_has_its_notice() -> None:
    trace = Trace(
        events(
            (0, ADD, "a"), (1, ADD, "b"), (2, ADD, "c"), (3, NOTICE, "b"), (4, REMOVE, "a"), (9, REMOVE, "b")
        ),
        10.0,
        "made",
    )
    assert limit(trace, 1).events == events((0, ADD, "a"), (4, REMOVE, "a"), (4, ADD, "c"))
    with pytest.raises(TraceError, match="at least 1"):
        limit(trace, 0)


def test_statistics_of_a_trace_that_can_be_counted_by_hand() -> None:
    trace = with_notices(
        Trace(
            events((0, ADD, "a"), (0, ADD, "b"), (600, REMOVE, "a"), (630, REMOVE, "b"), (1800, ADD, "c")),
            3600.0,
            "made",
        ),
        20,
    )
    numbers = statistics(trace)
    assert numbers.nodes_mean == pytest.approx((600 * 2 + 30 + 1800) / 3600)
    assert numbers.gpus_mean == pytest.approx(2 * numbers.nodes_mean)
    assert (numbers.nodes_p5, numbers.nodes_p50, numbers.nodes_p95, numbers.nodes_max) == (0, 1, 2, 2)
    assert numbers.empty_share == pytest.approx(1170 / 3600)
    assert (numbers.uptime_mean_s, numbers.uptime_p50_s) == (615, 615)
    assert (numbers.preemptions, numbers.bursts, numbers.burst_largest, numbers.burst_share) == (2, 1, 2, 1)
    assert numbers.preemptions_per_node_h == pytest.approx(2 / (3030 / 3600))
    assert (numbers.noticed, numbers.notice_lead_mean_s, numbers.notice_lead_min_s) == (2, 20, 20)
    assert math.isnan(numbers.price_mean_usd_h)


def test_the_picture_is_high_where_nodes_are_and_blank_where_none_is() -> None:
    trace = Trace(events((0, ADD, "a"), (0, ADD, "b"), (25, REMOVE, "b"), (50, REMOVE, "a")), 100.0, "made")
    assert sparkline(trace, 4) == "█▅  "


def test_the_page_needs_nothing_else() -> None:
    page = html([generate(TraceSpec(seed=1, horizon_s=3600, nodes=2))])
    assert "Plotly.newPlot" in page
    assert "generated, Poisson, seed 1" in page
    assert '<script src="http' not in page
