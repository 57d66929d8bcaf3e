"""The configured nodes, for ``spotlight train --dry-run``. No torch, no Ray."""

from __future__ import annotations

from dataclasses import dataclass

from spotlight.cluster.local.emulation import reserved_slots, spot_slots, spot_trace
from spotlight.config.sections.fleet import FleetConfig
from spotlight_fleet.traces.trace import TraceEventKind


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
