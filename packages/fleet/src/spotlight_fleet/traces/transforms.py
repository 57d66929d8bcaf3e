"""Trace transforms: notices, cutting, repetition, fewer nodes. Pure; every result is a validated trace."""

from __future__ import annotations

import math
from collections.abc import Container, Iterator
from dataclasses import replace
from itertools import chain

from spotlight_fleet.traces.trace import (
    PricePoint,
    Trace,
    TraceError,
    TraceEvent,
    TraceEventKind,
    require_room,
)

_ADD, _NOTICE, _REMOVE = TraceEventKind.ADD, TraceEventKind.NOTICE, TraceEventKind.REMOVE


def with_notices(trace: Trace, lead_s: float) -> Trace:
    """Replace all notices by one ``lead_s`` before every removal, but not before the node joined.

    A lead of 0 removes all notices.
    """
    if not (math.isfinite(lead_s) and lead_s >= 0):
        raise TraceError(f"the notice lead is {lead_s!r} s; expected 0 or more")
    came: dict[str, float] = {}
    timed: list[tuple[float, int, TraceEvent]] = []
    for index, event in enumerate(event for event in trace.events if event.kind is not _NOTICE):
        if event.kind is _ADD:
            came[event.node] = event.time_s
        elif lead_s > 0:
            time_s = max(event.time_s - lead_s, came[event.node])
            timed.append((time_s, index, replace(event, time_s=time_s, kind=_NOTICE)))
        timed.append((event.time_s, index, event))
    # Ties keep the original order. A notice at its node's arrival has the removal's index, which is higher;
    # one at its removal comes before it already.
    ordered = tuple(event for _, _, event in sorted(timed, key=lambda item: item[:2]))
    return replace(trace, events=ordered, source=f"{trace.source}, notices {lead_s:g} s ahead")


def cut(trace: Trace, start_s: float, end_s: float) -> Trace:
    """The part between two times, starting at 0; nodes present at ``start_s`` are added at 0."""
    if not 0 <= start_s < end_s <= trace.horizon_s:
        raise TraceError(
            f"{trace.source}: a cut from {start_s:g} to {end_s:g} s; expected a part of "
            f"[0, {trace.horizon_s:g}] s. Repeat the trace first if it is too short."
        )
    present: dict[str, TraceEvent] = {}
    warned: dict[str, TraceEvent] = {}
    for event in trace.events:
        if event.time_s >= start_s:
            break
        if event.kind is _REMOVE:
            del present[event.node]
            warned.pop(event.node, None)
        else:
            (present if event.kind is _ADD else warned)[event.node] = event
    standing = (replace(event, time_s=0.0) for event in chain(present.values(), warned.values()))
    # Events at the end belong to the next part, except at the horizon, which has none.
    within = (
        replace(event, time_s=event.time_s - start_s)
        for event in trace.events
        if start_s <= event.time_s and (event.time_s < end_s or end_s == trace.horizon_s)
    )
    before = [point for point in trace.prices if point.time_s <= start_s][-1:]
    later = [point for point in trace.prices if start_s < point.time_s <= end_s]
    prices = tuple(PricePoint(max(point.time_s - start_s, 0.0), point.usd_h) for point in (*before, *later))
    source = f"{trace.source}, from {start_s:g} to {end_s:g} s"
    return Trace((*standing, *within), end_s - start_s, source, prices)


def repeat(trace: Trace, horizon_s: float) -> Trace:
    """Repeat the trace until ``horizon_s``, or cut it if it is longer.

    At a seam, present nodes continue as the trace's first nodes; surplus nodes and those with a notice are
    removed. From the second round on, new nodes carry the round in their name: ``node7@2``.
    """
    if not (math.isfinite(horizon_s) and horizon_s > 0):
        raise TraceError(f"{trace.source}: repeated to {horizon_s!r} s; expected more than 0")
    require_room(trace.source, horizon_s / trace.horizon_s * (1 + len(trace.events) + len(trace.prices)))
    rounds = math.ceil(horizon_s / trace.horizon_s)
    if rounds <= 1:
        return trace if horizon_s == trace.horizon_s else cut(trace, 0, horizon_s)
    events = tuple(_rounds(trace, rounds))
    prices = tuple(
        PricePoint(min(point.time_s + turn * trace.horizon_s, (turn + 1) * trace.horizon_s), point.usd_h)
        for turn in range(rounds)
        for point in trace.prices
    )
    whole = Trace(events, rounds * trace.horizon_s, trace.source, prices)
    if horizon_s < whole.horizon_s:
        whole = cut(whole, 0, horizon_s)
    return replace(whole, source=f"{trace.source}, repeated to {horizon_s:g} s")


def _rounds(trace: Trace, rounds: int) -> Iterator[TraceEvent]:
    present: dict[str, int] = {}  # actual name -> GPUs
    warned: set[str] = set()
    for turn in range(rounds):
        offset_s, end_s = turn * trace.horizon_s, (turn + 1) * trace.horizon_s  # a sum may round above it
        names: dict[str, str] = {}  # name in the trace -> actual name
        yield from _leave([name for name in present if name in warned], present, offset_s)
        warned.clear()
        spare = list(present)
        opening = True
        for event in trace.events:
            if opening and event.time_s > 0:
                yield from _leave(spare, present, offset_s)
                opening = False
            if event.kind is _ADD:
                heir = (
                    next((name for name in spare if present[name] == event.gpus), None) if opening else None
                )
                if heir is not None:
                    spare.remove(heir)
                    names[event.node] = heir
                    continue
                names[event.node] = _new_name(event.node, turn, present)
                present[names[event.node]] = event.gpus
            elif event.kind is _REMOVE:
                del present[names[event.node]]
                warned.discard(names[event.node])
            else:
                warned.add(names[event.node])
            yield replace(event, node=names[event.node], time_s=min(event.time_s + offset_s, end_s))
        if opening:  # no event after the start
            yield from _leave(spare, present, offset_s)


def _new_name(name: str, turn: int, present: Container[str]) -> str:
    new = name if turn == 0 else f"{name}@{turn + 1}"
    while new in present:
        new = f"{new}'"
    return new


def _leave(spare: list[str], present: dict[str, int], time_s: float) -> Iterator[TraceEvent]:
    for name in spare:
        yield TraceEvent(time_s, _REMOVE, name, present.pop(name))
    spare.clear()


def limit(trace: Trace, nodes: int) -> Trace:
    """At most ``nodes`` at once, as for a user who requests no more.

    A node that leaves is replaced at once by the longest-present free node without a notice.
    """
    if nodes < 1:
        raise TraceError(f"{trace.source}: limited to {nodes} nodes; expected at least 1")
    return replace(
        trace, events=tuple(_limited(trace, nodes)), source=f"{trace.source}, at most {nodes} nodes"
    )


def _limited(trace: Trace, nodes: int) -> Iterator[TraceEvent]:
    free: dict[str, int] = {}  # available, without notice, not taken; oldest first
    held: set[str] = set()
    for event in trace.events:
        if event.kind is _ADD:
            free[event.node] = event.gpus
        elif event.node in held:
            yield event
            if event.kind is _REMOVE:
                held.discard(event.node)
        else:
            free.pop(event.node, None)
        while free and len(held) < nodes:
            name, gpus = next(iter(free.items()))
            del free[name]
            held.add(name)
            yield TraceEvent(event.time_s, _ADD, name, gpus)
