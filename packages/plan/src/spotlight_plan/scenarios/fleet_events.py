"""Convert a spot trace to node events of a simulation. Pure."""

from __future__ import annotations

from collections import deque
from collections.abc import Generator, Iterable, Iterator
from dataclasses import dataclass

from spotlight.scheduler.events import NodeJoined, NodeLost, NodeNoticed
from spotlight.scheduler.types import Node, NodeId, NodeKind
from spotlight_fleet.traces.trace import PricePoint, Trace, TraceEventKind
from spotlight_plan.simulation.scenario import NodeEvent, PriceChanged
from spotlight_rewards.base.errors import ConfigError, Problem


@dataclass(frozen=True, slots=True)
class SpotOffer:
    """A type of spot node.

    Attributes:
        gpus: per node.
        usd_h: price per node-hour; None: the trace's price over time.
    """

    gpu_type: str
    gpus: int
    usd_h: float | None


def require_usable(trace: Trace, offer: SpotOffer) -> None:
    """Refuse a trace that says nothing of such nodes.

    Raises:
        ConfigError: the trace's nodes have a different number of GPUs, or no price is known.
    """
    wrong = next((event for event in trace.events if event.gpus != offer.gpus), None)
    if wrong is not None:
        found, expected = f"{wrong.gpus} GPUs of node {wrong.node} in the trace", f"{offer.gpus}"
        remedy = "Set it to what the trace's nodes have."
        raise ConfigError(trace.source, [Problem("cluster.spot.gpus_per_node", found, expected, remedy)])
    if offer.usd_h is None and not trace.prices:
        remedy = "Leave the key out, and set cluster.spot.usd_gpu_h or prices."
        raise ConfigError(
            trace.source, [Problem("trace.use_prices", "no prices in the trace", "some", remedy)]
        )


def spot_events(trace: Trace, offer: SpotOffer) -> tuple[tuple[float, NodeEvent], ...]:
    """Events of spot nodes as (seconds, event), ascending.

    A notice's deadline is the removal that follows it, else the trace's horizon.

    Raises:
        ConfigError: as :func:`require_usable`.
    """
    require_usable(trace, offer)
    return tuple(_events(trace, offer))


def _events(trace: Trace, offer: SpotOffer) -> Iterator[tuple[float, NodeEvent]]:
    """A price change follows the events of its time."""
    removals = _removals(trace)
    present: dict[NodeId, None] = {}
    points = deque(() if offer.usd_h is not None else trace.prices)
    usd_h = (
        offer.usd_h if offer.usd_h is not None else trace.prices[0].usd_h
    )  # before the first one, the first
    for index, event in enumerate(trace.events):
        while points and points[0].time_s < event.time_s:
            usd_h = yield from _change(points.popleft(), usd_h, present)
        name = NodeId(f"spot:{event.node}")
        match event.kind:
            case TraceEventKind.ADD:
                present[name] = None
                node = Node(name, NodeKind.SPOT, event.gpus, offer.gpu_type, usd_h, False, True)
                yield event.time_s, NodeJoined(node)
            case TraceEventKind.NOTICE:
                yield event.time_s, NodeNoticed(name, removals.get(index, trace.horizon_s))
            case TraceEventKind.REMOVE:
                del present[name]
                yield event.time_s, NodeLost(name)
    for point in points:
        usd_h = yield from _change(point, usd_h, present)


def _change(
    point: PricePoint, usd_h: float, present: Iterable[NodeId]
) -> Generator[tuple[float, NodeEvent], None, float]:
    """Report a changed price to all present nodes; returns the price in force."""
    if point.usd_h != usd_h:
        for name in present:
            yield point.time_s, PriceChanged(name, point.usd_h)
    return point.usd_h


def _removals(trace: Trace) -> dict[int, float]:
    warned: dict[str, int] = {}
    removals: dict[int, float] = {}
    for index, event in enumerate(trace.events):
        if event.kind is TraceEventKind.NOTICE:
            warned[event.node] = index
        elif event.kind is TraceEventKind.REMOVE and event.node in warned:
            removals[warned.pop(event.node)] = event.time_s
    return removals
