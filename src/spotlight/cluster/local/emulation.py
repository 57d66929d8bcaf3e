"""The emulated cluster that the configuration describes: reserved slots, and spot nodes by a trace."""

from __future__ import annotations

from spotlight.cluster.local.market_book import timed
from spotlight.config.errors import ConfigError, Problem
from spotlight.config.sections.fleet import FleetConfig
from spotlight.fleet.traces.shipped import find_trace
from spotlight.fleet.traces.trace import Trace, TraceError, TraceEvent, TraceEventKind
from spotlight.fleet.traces.trace_files import read_trace

SIGTERM_GRACE_S = 30.0
"""Grace period a node's agent assumes if the trace brings its own notices."""


def spot_trace(fleet: FleetConfig) -> Trace:
    """Events of the emulated spot nodes in real seconds. ConfigError: the trace cannot be read."""
    spot = fleet.spot
    if spot.trace is None:
        adds = tuple(
            TraceEvent(0.0, TraceEventKind.ADD, f"spot-{number}", spot.slots)
            for number in range(spot.emulated_nodes)
        )
        return Trace(adds, 1.0, "fleet.spot.nodes")
    try:
        return timed(read_trace(find_trace(spot.trace), gpus_per_node=spot.slots), spot.speed, spot.notice_s)
    except (TraceError, OSError) as error:
        problem = Problem(
            "fleet.spot.trace",
            str(error),
            "a spot trace (see `spotlight traces --help`)",
            "Name another file, or leave the key out for spot nodes that stay.",
        )
        raise ConfigError("the configuration", [problem]) from error


def reserved_slots(fleet: FleetConfig) -> int:
    """Slots of the reserved node: the learner's if it is there, and those that roll out."""
    return fleet.reserved_ranks + fleet.local.rollout_slots


def spot_slots(fleet: FleetConfig) -> int:
    """Peak number of spot slots."""
    most = present = 0
    for event in spot_trace(fleet).events:
        if event.kind is TraceEventKind.ADD:
            present += event.gpus
        elif event.kind is TraceEventKind.REMOVE:
            present -= event.gpus
        most = max(most, present)
    return most
