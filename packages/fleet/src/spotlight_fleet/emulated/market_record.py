"""Schedule and record of an emulated spot market. Pure: no clock, no Ray.

Machines take time to start, may fail to, and may be removed meanwhile. Rules:

1. an event for a node that is not up is skipped and counted, never applied to a later node of that name;
2. a node whose removal falls due while it starts is removed as soon as it is up;
3. at most one machine of a name exists: an addition is skipped, not delayed, if one does.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from enum import StrEnum

from spotlight_fleet.traces.trace import Trace, TraceError, TraceEvent, TraceEventKind
from spotlight_fleet.traces.transforms import with_notices


class Order(StrEnum):
    """What to do to a machine now."""

    ADD = "add"
    NOTICE = "notice"
    KILL = "kill"


class Fate(StrEnum):
    """Outcome of a trace event."""

    DONE = "done"
    SKIPPED = "skipped"
    FAILED = "failed"
    PENDING = "pending"


class _State(StrEnum):
    QUEUED = "queued"
    COMING = "coming"
    DOOMED = "doomed"
    UP = "up"


@dataclass(frozen=True, slots=True)
class EventOutcome:
    """A trace event and its outcome.

    Attributes:
        planned_s: when it was due, and ``actual_s`` when it was done (an addition: when the node was up),
            in seconds since the market opened; None: not done.
        detail: why not.
    """

    kind: TraceEventKind
    node: str
    slots: int
    planned_s: float
    fate: Fate = Fate.PENDING
    actual_s: float | None = None
    detail: str = ""


def timed(trace: Trace, speed: float, notice_s: float | None) -> Trace:
    """The trace in real time, ``speed`` times as fast.

    Args:
        notice_s: real seconds from notice to removal, whatever the speed; 0: no notices; None: the trace's
            own notices, sped up too.

    Raises:
        TraceError: ``speed`` is not above 0.
    """
    if not (math.isfinite(speed) and speed > 0):
        raise TraceError(f"{trace.source}: speed {speed!r}; expected more than 0")
    events = tuple(replace(event, time_s=event.time_s / speed) for event in trace.events)
    prices = tuple(replace(point, time_s=point.time_s / speed) for point in trace.prices)
    # A horizon rounded below the last event would make the trace invalid.
    horizon_s = max([trace.horizon_s / speed, *(event.time_s for event in events[-1:])])
    fast = Trace(events, horizon_s, trace.source, prices)
    return fast if notice_s is None else with_notices(fast, notice_s)


@dataclass(slots=True)
class MarketRecord:
    """Follows one trace. Not thread-safe."""

    outcomes: list[EventOutcome] = field(default_factory=list)
    _states: dict[str, _State] = field(default_factory=dict)
    _adding: dict[str, int] = field(default_factory=dict)
    _removing: dict[str, int] = field(default_factory=dict)

    def due(self, event: TraceEvent) -> tuple[Order, int] | None:
        """An event falls due. Returns what to do and the index of its record; None: nothing to do."""
        index = len(self.outcomes)
        self.outcomes.append(EventOutcome(event.kind, event.node, event.gpus, event.time_s))
        state = self._states.get(event.node)
        match event.kind:
            case TraceEventKind.ADD:
                if state is not None:
                    return self._skip(index, f"its predecessor is still {state}")
                self._states[event.node], self._adding[event.node] = _State.QUEUED, index
                return Order.ADD, index
            case TraceEventKind.NOTICE:
                return (Order.NOTICE, index) if state is _State.UP else self._skip(index, _absent(state))
            case TraceEventKind.REMOVE:
                return self._removal(event.node, state, index)

    def starts(self, node: str) -> bool:
        """Whether a queued addition is still wanted; called at its turn."""
        if self._states.get(node) is not _State.QUEUED:
            return False
        self._states[node] = _State.COMING
        return True

    def added(self, node: str, now_s: float, error: str = "") -> tuple[Order, int] | None:
        """An addition ended. Returns a kill order if the node was removed meanwhile."""
        index = self._adding.pop(node)
        doomed = self._states[node] is _State.DOOMED
        if error:
            del self._states[node]
            self._settle(index, Fate.FAILED, None, error)
            if doomed:
                self._settle(self._removing.pop(node), Fate.SKIPPED, None, "the node did not come up")
            return None
        self._settle(index, Fate.DONE, now_s)
        if doomed:
            return Order.KILL, self._removing.pop(node)
        self._states[node] = _State.UP
        return None

    def noticed(self, index: int, now_s: float, error: str = "") -> None:
        """Record that a notice was sent or failed."""
        self._settle(index, Fate.FAILED if error else Fate.DONE, None if error else now_s, error)

    def killed(self, index: int, now_s: float, error: str = "") -> None:
        """Record that a node was killed or refused to die; it is dropped either way."""
        self._states.pop(self.outcomes[index].node, None)
        self._settle(index, Fate.FAILED if error else Fate.DONE, None if error else now_s, error)

    def close(self) -> None:
        """Skip whatever was not done."""
        for index, outcome in enumerate(self.outcomes):
            if outcome.fate is Fate.PENDING:
                self._skip(index, "the market closed")

    def up(self) -> list[str]:
        """Nodes that are up."""
        return [node for node, state in self._states.items() if state is _State.UP]

    def _removal(self, node: str, state: _State | None, index: int) -> tuple[Order, int] | None:
        match state:
            case _State.UP:
                return Order.KILL, index
            case _State.QUEUED:
                del self._states[node]
                self._skip(self._adding.pop(node), "removed before its turn came")
                return self._skip(index, "the node never came up")
            case _State.COMING:
                self._states[node], self._removing[node] = _State.DOOMED, index
                return None
            case _:
                return self._skip(index, _absent(state))

    def _skip(self, index: int, why: str) -> tuple[Order, int] | None:
        self._settle(index, Fate.SKIPPED, None, why)
        return None

    def _settle(self, index: int, fate: Fate, actual_s: float | None, detail: str = "") -> None:
        self.outcomes[index] = replace(self.outcomes[index], fate=fate, actual_s=actual_s, detail=detail)


def _absent(state: _State | None) -> str:
    return "the node is not there" if state is None else f"the node is {state}"
