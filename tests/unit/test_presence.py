"""How many spot nodes work and are paid along a trace, as the planner's closed form counts them."""

from __future__ import annotations

import numpy as np
import pytest

from spotlight_fleet.traces.trace import PricePoint, Trace, TraceEvent, TraceEventKind
from spotlight_plan.scenarios import presence
from spotlight_plan.scenarios.presence import Presence, presence_of
from spotlight_plan.traces.generator import TraceSpec, generate

DAY_S = 86400.0
JOINS_S = 300.0


def trace_of(nodes: int) -> Trace:
    return generate(TraceSpec(0, DAY_S, nodes, mean_uptime_s=7200, bursts_per_h=0.25, notice_lead_s=30))


def counted(trace: Trace, at_s: float) -> tuple[int, int]:
    """Nodes paid and working at one time, one by one."""
    came = {event.node: event.time_s for event in trace.events if event.kind is TraceEventKind.ADD}
    gone = {event.node: event.time_s for event in trace.events if event.kind is TraceEventKind.REMOVE}
    there = [name for name, since_s in came.items() if since_s <= at_s < gone.get(name, DAY_S)]
    works = [name for name in there if not came[name] or came[name] + JOINS_S <= at_s]
    return len(there), len(works)


def test_at_every_time_as_many_nodes_work_and_are_paid_as_are_there() -> None:
    trace = trace_of(12)
    found = presence_of(trace, 2.0, JOINS_S, DAY_S)
    assert found.until_s[-1] == DAY_S
    for since_s, until_s, working, usd_h in zip(
        found.since_s, found.until_s, found.working, found.usd_h, strict=True
    ):
        paid, works = counted(trace, (since_s + until_s) / 2)
        assert (working, usd_h) == (works, 2.0 * paid)


def test_of_many_nodes_the_node_hours_and_dollars_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    trace = trace_of(300)
    few = presence_of(trace, 2.0, JOINS_S, DAY_S)
    monkeypatch.setattr(presence, "STRETCHES", 10**9)
    all_of = presence_of(trace, 2.0, JOINS_S, DAY_S)
    assert len(few.until_s) == 2048 < len(all_of.until_s)
    hours, wanted = (np.diff(one.until_s, prepend=0.0) for one in (few, all_of))
    assert few.usd_h @ hours == pytest.approx(all_of.usd_h @ wanted)
    assert few.working @ hours == pytest.approx(all_of.working @ wanted, rel=1e-3)


def test_nodes_lost_together_are_one_loss_to_a_learner_that_is_on_some_of_them() -> None:
    add, warn, gone = TraceEventKind.ADD, TraceEventKind.NOTICE, TraceEventKind.REMOVE
    events = [TraceEvent(0.0, add, name, 1) for name in "abcd"]
    events += [TraceEvent(60.0, warn, "a", 1), TraceEvent(100.0, gone, "a", 1)]  # alone, of four
    events += [TraceEvent(5000.0, gone, "b", 1), TraceEvent(5100.0, gone, "c", 1)]  # together, of three
    found = presence_of(Trace(tuple(events), DAY_S, "a test"), 2.0, JOINS_S, DAY_S)
    assert found.lost == ((4, 1), (3, 2))
    assert found.notice_s == pytest.approx(40 / 3)
    assert found.losses_s(1) == pytest.approx((1 / 4 + 2 / 3) / DAY_S)
    assert found.losses_s(2) == pytest.approx((1 / 2 + 1) / DAY_S)
    assert found.losses_s(4) == pytest.approx(2 / DAY_S)  # of three, all
    assert found.numbers == (4, 3, 1, 1)
    assert presence.steady(4, DAY_S).losses_s(2) == 0


def test_the_trace_s_own_price_counts_from_its_time() -> None:
    prices = PricePoint(0.0, 2.0), PricePoint(3600.0, 5.0)
    trace = Trace((TraceEvent(0.0, TraceEventKind.ADD, "a", 1),), DAY_S, "a test", prices)
    found = presence_of(trace, None, JOINS_S, DAY_S)
    assert found.until_s.tolist() == [3600.0, DAY_S]
    assert found.usd_h.tolist() == [2.0, 5.0]


def test_a_node_on_demand_works_from_its_arrival_until_the_learner_has_its_own_again() -> None:
    there = Presence(np.array([10.0, 20.0, 100.0, 200.0]), np.array([4.0, 1.0, 0.0, 3.0]), np.ones(4))
    found = there.with_learner(2, 30.0, 7.0)
    assert found.until_s.tolist() == [10.0, 20.0, 40.0, 100.0, 200.0]
    assert found.working.tolist() == [4.0, 1.0, 0.0, 2.0, 3.0]
    assert found.usd_h.tolist() == [1.0, 1.0, 1.0, 8.0, 1.0]
