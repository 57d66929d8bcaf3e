"""From a spot trace to what happens to nodes in a simulation. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from spotlight.config.errors import ConfigError, Problem
from spotlight.core.events import NodeJoined, NodeLost, NodeNoticed
from spotlight.core.types import Node, NodeId, NodeKind
from spotlight.fleet.traces.events import Trace, TraceEvent, TraceEventKind
from spotlight.simulation.scenario import NodeEvent, PriceChanged


@dataclass(frozen=True, slots=True)
class SpotOffer:
    """What a spot node is.

    Attributes:
        gpus: of a node.
        usd_h: price of a node; None: what the trace says, at every moment.
    """

    gpu_type: str
    gpus: int
    usd_h: float | None


def spot_events(trace: Trace, offer: SpotOffer) -> tuple[tuple[float, NodeEvent], ...]:
    """What happens to spot nodes, as (seconds, event), ascending.

    The deadline of a notice is the removal that follows it; if there is none, the horizon of the trace.

    Raises:
        ConfigError: the trace's nodes have other GPUs than the offer's, or no price is known.
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
    return tuple(sorted(_events(trace, offer), key=lambda item: item[0]))


def _events(trace: Trace, offer: SpotOffer) -> Iterator[tuple[float, NodeEvent]]:
    """In the order of time, but for changes of price, each of which follows what happens at its moment."""
    removals = _removals(trace)
    for index, event in enumerate(trace.events):
        name = NodeId(f"spot:{event.node}")
        match event.kind:
            case TraceEventKind.ADD:
                price = offer.usd_h if offer.usd_h is not None else _price_at(trace, event.time_s)
                node = Node(name, NodeKind.SPOT, event.gpus, offer.gpu_type, price, False, True)
                yield event.time_s, NodeJoined(node)
            case TraceEventKind.NOTICE:
                yield event.time_s, NodeNoticed(name, removals.get(index, trace.horizon_s))
            case TraceEventKind.REMOVE:
                yield event.time_s, NodeLost(name)
    if offer.usd_h is None:
        for point in trace.prices:
            for node_name in _present(trace.events, point.time_s):
                yield point.time_s, PriceChanged(NodeId(f"spot:{node_name}"), point.usd_h)


def _removals(trace: Trace) -> dict[int, float]:
    """When the node of each notice is removed, by the notice's index."""
    warned: dict[str, int] = {}
    removals: dict[int, float] = {}
    for index, event in enumerate(trace.events):
        if event.kind is TraceEventKind.NOTICE:
            warned[event.node] = index
        elif event.kind is TraceEventKind.REMOVE and event.node in warned:
            removals[warned.pop(event.node)] = event.time_s
    return removals


def _price_at(trace: Trace, time_s: float) -> float:
    """The price in force; before the first one, the first."""
    known = [point.usd_h for point in trace.prices if point.time_s <= time_s]
    return known[-1] if known else trace.prices[0].usd_h


def _present(events: tuple[TraceEvent, ...], time_s: float) -> Iterator[str]:
    """Nodes that came before a moment, and are there after it."""
    present: dict[str, None] = {}
    for event in events:
        if event.time_s > time_s:
            break
        if event.kind is TraceEventKind.ADD:
            present[event.node] = None
        elif event.kind is TraceEventKind.REMOVE:
            del present[event.node]
    yield from present
