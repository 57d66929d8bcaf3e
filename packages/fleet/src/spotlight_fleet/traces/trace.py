"""Canonical spot trace: nodes that join, get a notice, and leave. Pure.

A :class:`Trace` validates itself on construction:

1. times lie in [0, horizon] and do not decrease;
2. only an absent node is added; only a present one is removed or gets a notice (at most one);
3. a node keeps its number of GPUs while present.

A node may return under its name. Nodes present at the horizon stay.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

from spotlight_rewards.base.errors import UserError

_PROBLEMS_SHOWN_MAX = 10
_EVENTS_MAX = 10_000_000


class TraceError(UserError, ValueError):
    """Unusable trace; names file, line, value and expectation."""


class TraceEventKind(StrEnum):
    """Kind of node event."""

    ADD = "add"
    NOTICE = "notice"
    REMOVE = "remove"


@dataclass(frozen=True, slots=True)
class TraceEvent:
    """An event of one node.

    Attributes:
        time_s: from the start of the trace.
        gpus: of the node.
    """

    time_s: float
    kind: TraceEventKind
    node: str
    gpus: int


@dataclass(frozen=True, slots=True)
class PricePoint:
    """Spot price of one node from ``time_s`` on."""

    time_s: float
    usd_h: float


@dataclass(frozen=True, slots=True)
class Trace:
    """Events in order of time.

    Attributes:
        horizon_s: end of the trace; at least the time of the last event.
        source: file, or how it was generated.
        prices: spot prices in order of time; empty if unknown.

    Raises:
        TraceError: an invariant of the module docstring is violated.
    """

    events: tuple[TraceEvent, ...]
    horizon_s: float
    source: str
    prices: tuple[PricePoint, ...] = ()

    def __post_init__(self) -> None:
        if not (math.isfinite(self.horizon_s) and self.horizon_s > 0):
            raise TraceError(f"{self.source}: the horizon is {self.horizon_s!r} s; expected more than 0")
        if problem := next(problems_of(self.events, self.horizon_s), None):
            index, text = problem
            raise TraceError(f"{self.source}: event {index}: {text}")
        last_s = 0.0
        for point in self.prices:
            if not (last_s <= point.time_s <= self.horizon_s and 0 < point.usd_h < math.inf):
                raise TraceError(f"{self.source}: price {point}; expected above 0 $/h, in order of time")
            last_s = point.time_s


def require_room(source: str, events: float) -> None:
    """Raise :class:`TraceError` unless a trace of so many events fits in memory."""
    if events > _EVENTS_MAX:
        raise TraceError(
            f"{source}: it would have {events:.1g} events; expected at most {_EVENTS_MAX:,}. "
            "Name fewer hours or nodes."
        )


def problems_of(events: Iterable[TraceEvent], horizon_s: float = math.inf) -> Iterator[tuple[int, str]]:
    """(index, problem) of every event that violates an invariant; such events are skipped."""
    present: dict[str, int] = {}
    warned: set[str] = set()
    last_s = 0.0
    for index, event in enumerate(events):
        if problem := _problem(event, present, warned, last_s, horizon_s):
            yield index, problem
            continue
        last_s = event.time_s
        if event.kind is TraceEventKind.ADD:
            present[event.node] = event.gpus
        elif event.kind is TraceEventKind.NOTICE:
            warned.add(event.node)
        else:
            del present[event.node]
            warned.discard(event.node)


def _problem(
    event: TraceEvent, present: Mapping[str, int], warned: set[str], last_s: float, horizon_s: float
) -> str | None:
    if not math.isfinite(event.time_s) or event.time_s < 0:
        return f"the time is {event.time_s!r} s; expected 0 or more"
    if event.time_s < last_s:
        return f"unsorted: the time falls from {last_s:g} s to {event.time_s:g} s; sort the lines by time"
    if event.time_s > horizon_s:
        return f"the time is {event.time_s:g} s; expected at most the horizon, {horizon_s:g} s"
    if not event.node:
        return "the node has no name; expected one"
    if event.gpus < 1:
        return f"node {event.node} has {event.gpus} GPUs; expected at least 1"
    if event.kind is TraceEventKind.ADD:
        return (
            f"node {event.node} is added twice; expected a removal between" if event.node in present else None
        )
    if event.node not in present:
        return f"{event.kind.value} of node {event.node}, which is not there; expected it to be added before"
    if event.gpus != present[event.node]:
        return f"node {event.node} has {event.gpus} GPUs; expected the {present[event.node]} it came with"
    if event.kind is TraceEventKind.NOTICE and event.node in warned:
        return f"a second notice for node {event.node}; expected one"
    return None


def refuse(source: str, problems: Sequence[tuple[str, str]]) -> TraceError:
    """Build an error that lists the first (place, problem) pairs; the caller raises it."""
    shown = [f"{source}:{place}: {text}" for place, text in problems[:_PROBLEMS_SHOWN_MAX]]
    if len(problems) > _PROBLEMS_SHOWN_MAX:
        shown.append(f"... and {len(problems) - _PROBLEMS_SHOWN_MAX} more")
    return TraceError("\n  ".join([f"Cannot use the trace {source}:", *shown]))
