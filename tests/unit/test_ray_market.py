"""An emulated spot market: what is done, when, and never to the wrong node."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spotlight_fleet.emulated.market import MachineError, Market
from spotlight_fleet.emulated.market_record import Fate, MarketRecord, Order, timed
from spotlight_fleet.traces.trace import Trace, TraceError, TraceEvent, TraceEventKind

ADD, NOTICE, REMOVE = TraceEventKind


def event(time_s: float, kind: TraceEventKind, node: str = "a", gpus: int = 1) -> TraceEvent:
    return TraceEvent(time_s, kind, node, gpus)


# -- the record ---------------------------------------------------------------------------------------------

steps = st.lists(
    st.one_of(
        st.tuples(st.sampled_from(list(TraceEventKind)), st.sampled_from("abc")),
        st.tuples(st.just("turn"), st.booleans()),
        st.tuples(st.just("up"), st.booleans()),
    ),
    max_size=60,
)


@given(steps)
def test_machines_are_never_double_and_never_taken_for_another(script: list[tuple[object, object]]) -> None:
    record, up, queue, coming = MarketRecord(), set[str](), list[str](), list[str]()

    def obey(order: tuple[Order, int] | None, node: str) -> None:
        if order is None:
            return
        what, index = order
        assert record.outcomes[index].node == node
        if what is Order.ADD:
            queue.append(node)
        elif what is Order.NOTICE:
            assert node in up
            record.noticed(index, 1.0)
        else:
            assert node in up, "only what is up is killed"
            up.remove(node)
            record.killed(index, 1.0)

    for step, value in script:
        if step == "turn":
            if queue and not coming and record.starts(name := queue.pop(0)):
                coming.append(name)
        elif step == "up":
            if coming:
                name = coming.pop()
                assert name not in up
                if value:
                    up.add(name)
                obey(record.added(name, 1.0, "" if value else "no room"), name)
        else:
            assert isinstance(step, TraceEventKind)
            obey(record.due(event(0.0, step, str(value))), str(value))
        assert set(record.up()) <= up
    record.close()
    assert all(outcome.fate is not Fate.PENDING for outcome in record.outcomes)
    added = sum(outcome.kind is ADD and outcome.fate is Fate.DONE for outcome in record.outcomes)
    removed = sum(outcome.kind is REMOVE and outcome.fate is Fate.DONE for outcome in record.outcomes)
    assert added - removed == len(up)


def test_a_node_removed_while_it_comes_up_is_killed_when_it_is() -> None:
    record = MarketRecord()
    assert record.due(event(0, ADD)) == (Order.ADD, 0)
    assert record.starts("a")
    assert record.due(event(1, NOTICE)) is None
    assert record.due(event(2, REMOVE)) is None
    assert record.added("a", 3.0) == (Order.KILL, 2)
    record.killed(2, 3.1)
    assert [outcome.fate for outcome in record.outcomes] == [Fate.DONE, Fate.SKIPPED, Fate.DONE]
    removed = record.outcomes[-1]
    assert (removed.kind, removed.planned_s, removed.actual_s) == (REMOVE, 2, 3.1)
    assert record.due(event(4, ADD)) == (Order.ADD, 3)


# -- the trace as it is played ------------------------------------------------------------------------------


@given(st.floats(0.01, 1000), st.lists(st.floats(0.1, 100), min_size=2, max_size=6))
def test_a_faster_trace_is_the_same_trace(speed: float, gaps: list[float]) -> None:
    times = [sum(gaps[: index + 1]) for index in range(len(gaps))]
    events = tuple(event(at, ADD, f"n{index}") for index, at in enumerate(times))
    fast = timed(Trace(events, times[-1], "x"), speed, None)
    assert [item.node for item in fast.events] == [item.node for item in events]
    assert [item.time_s * speed for item in fast.events] == pytest.approx(times)
    assert fast.horizon_s * speed == pytest.approx(times[-1])


def test_notices_are_in_real_seconds_unless_the_traces_own_are_kept() -> None:
    trace = Trace((event(0, ADD), event(70, NOTICE), event(100, REMOVE)), 100, "x")

    def notices(notice_s: float | None) -> list[float]:
        return [item.time_s for item in timed(trace, 10, notice_s).events if item.kind is NOTICE]

    assert notices(None) == [7.0]
    assert notices(4.0) == [6.0]
    assert notices(0) == []
    with pytest.raises(TraceError, match="speed 0"):
        timed(trace, 0, None)


# -- playing it ---------------------------------------------------------------------------------------------


class Fake:
    """Machines that come up as soon as they are asked for, but those that are held."""

    def __init__(self, held: str = "", broken: str = "") -> None:
        self.asked: list[str] = []
        self.done: list[tuple[str, str]] = []
        self.go_on = threading.Event()
        self._held, self._broken = held, broken
        self._changed = threading.Condition()

    def add(self, name: str, slots: int) -> None:
        with self._changed:
            self.asked.append(name)
            self._changed.notify_all()
        if name == self._held:
            assert self.go_on.wait(60)
        if name == self._broken:
            raise MachineError(f"{name} did not come up")
        self._note("add", name)

    def notice(self, name: str) -> None:
        self._note("notice", name)

    def kill(self, name: str) -> None:
        self._note("kill", name)

    def until(self, true: Callable[[], bool]) -> None:
        with self._changed:
            assert self._changed.wait_for(true, 60)

    def _note(self, what: str, name: str) -> None:
        with self._changed:
            self.done.append((what, name))
            self._changed.notify_all()


class Scripted:
    """A trace whose events fall due when the test says, instead of by the clock."""

    def __init__(self, events: Iterator[TraceEvent]) -> None:
        self.events = events


def test_a_slow_start_delays_no_removal_of_another() -> None:
    machines, market = Fake("slow", "bad"), None

    def events() -> Iterator[TraceEvent]:
        assert market is not None
        yield event(0, ADD, "quick")
        machines.until(lambda: "quick" in market.record.up())
        yield event(0, ADD, "slow")
        machines.until(lambda: "slow" in machines.asked)
        yield event(0, ADD, "bad")
        yield event(0, NOTICE, "quick")
        yield event(0, REMOVE, "quick")
        assert machines.done[1:] == [("notice", "quick"), ("kill", "quick")], "while the other starts"
        yield event(0, REMOVE, "slow")
        yield event(0, ADD, "late")
        machines.go_on.set()
        machines.until(lambda: "late" in market.record.up())
        yield event(0, REMOVE, "bad")

    market = Market(Scripted(events()), machines)  # type: ignore[arg-type]
    with market:
        assert market.wait(120)
    assert machines.done == [
        ("add", "quick"), ("notice", "quick"), ("kill", "quick"),
        ("add", "slow"), ("kill", "slow"), ("add", "late"),
    ]  # fmt: skip
    assert Counter((outcome.kind, outcome.fate) for outcome in market.record.outcomes) == {
        (ADD, Fate.DONE): 3,
        (ADD, Fate.FAILED): 1,
        (NOTICE, Fate.DONE): 1,
        (REMOVE, Fate.DONE): 2,
        (REMOVE, Fate.SKIPPED): 1,
    }
    assert market.record.up() == ["late"]


def test_a_market_that_is_closed_early_does_nothing_more() -> None:
    machines = Fake()
    with Market(Trace((event(0, ADD), event(3600, REMOVE)), 3600, "x"), machines) as market:
        machines.until(lambda: bool(machines.done))
        assert not market.wait(0)
    assert machines.done == [("add", "a")]
    assert len(market.record.outcomes) == 1
