"""The emulated cluster that the configuration describes: reserved slots, and spot nodes by a trace.

:func:`plan_fleet` says the same in numbers for ``spotlight train --dry-run``. No torch, no Ray.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from spotlight.config.schema import RunConfig
from spotlight.config.sections.fleet import FleetConfig
from spotlight.scheduler.fleet.rank_places import choose_places
from spotlight_fleet.emulated.market_record import timed
from spotlight_fleet.traces.shipped import find_trace
from spotlight_fleet.traces.trace import Trace, TraceError, TraceEvent, TraceEventKind
from spotlight_fleet.traces.trace_files import read_trace
from spotlight_rewards.base.errors import ConfigError, Problem

SIGTERM_GRACE_S = 30.0
"""Grace period a node's agent assumes if the trace brings its own notices."""


def spot_trace(fleet: FleetConfig) -> Trace:
    """Events of the emulated spot nodes in real seconds. ConfigError: the trace cannot be read."""
    spot = fleet.spot
    if spot.trace is None:
        # With a target a market that always has as many nodes as may be asked for.
        nodes = fleet.target.nodes_max if fleet.target.is_set else spot.emulated_nodes
        adds = tuple(
            TraceEvent(0.0, TraceEventKind.ADD, f"spot-{number}", spot.slots) for number in range(nodes)
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
    most = max((sum(slots.values()) for slots in _present(fleet)), default=0)
    return min(most, fleet.target.nodes_max * fleet.spot.slots) if fleet.target.is_set else most


def _present(fleet: FleetConfig) -> Iterator[dict[str, int]]:
    """Slots by spot node after each event of the trace."""
    slots: dict[str, int] = {}
    for event in spot_trace(fleet).events:
        if event.kind is TraceEventKind.ADD:
            slots[event.node] = event.gpus
        elif event.kind is TraceEventKind.REMOVE:
            del slots[event.node]
        yield slots


def require_learner_room(config: RunConfig) -> None:
    """Check that a learner on spot nodes can train at some time. ConfigError: there is never room for it."""
    fleet, even = config.fleet, config.learner.shard == "node"
    if fleet.learner_placement != "spot" or fleet.address is not None:  # else it takes a node on demand
        return
    elsewhere = config.pipeline.trainers_generate or fleet.local.rollout_slots > 0
    least = fleet.fewest_ranks
    for slots in _present(fleet):
        if (elsewhere or sum(slots.values()) > least) and choose_places(slots, least, even=even):
            return
    traced = fleet.spot.trace is not None
    key = "fleet.learner_ranks" if fleet.learner_ranks_min is None else "fleet.learner_ranks_min"
    wanted = f"{least} slots at a time for {key}"
    wanted += ", equally many on each node that has any (learner.shard=node)" if even else ""
    problem = Problem(
        "fleet.spot.trace" if traced else "fleet.spot.nodes",
        str(fleet.spot.trace) if traced else f"{fleet.spot.emulated_nodes} of {fleet.spot.slots} slots",
        wanted + ("" if elsewhere else ", and one more that rolls out"),
        f"Lower {key}, or set more fleet.spot.slots or nodes"
        + (", or learner.shard=all." if even and fleet.learner_ranks > 1 else "."),
    )
    raise ConfigError("the configuration", [problem])


# -- the configured nodes, for ``spotlight train --dry-run``. No torch, no Ray -----------------------------


@dataclass(frozen=True, slots=True)
class FleetPlan:
    """Nodes of an emulated cluster.

    Attributes:
        spot_slots: peak number.
        horizon_s: real seconds of the trace.
        usd_h: price of all slots per hour, at peak.
    """

    reserved_slots: int
    spot_slots: int
    preemptions: int
    horizon_s: float
    usd_h: float


def plan_fleet(fleet: FleetConfig) -> FleetPlan | None:
    """The emulated fleet; None if this machine emulates none. ConfigError: unreadable trace."""
    if fleet.driver != "ray" or fleet.address is not None:
        return None
    trace, reserved, spot = spot_trace(fleet), reserved_slots(fleet), spot_slots(fleet)
    return FleetPlan(
        reserved_slots=reserved,
        spot_slots=spot,
        preemptions=sum(event.kind is TraceEventKind.REMOVE for event in trace.events),
        horizon_s=trace.horizon_s,
        usd_h=reserved * fleet.price_usd_h + spot * fleet.spot.price_usd_h,
    )
