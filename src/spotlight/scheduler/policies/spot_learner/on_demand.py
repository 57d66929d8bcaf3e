"""When a learner on spot nodes takes a node on demand, and when it gives it back.

    it waits for after_s ─► one is wanted ─► the node joins, the learner starts there
    spot nodes have had room for back_after_s ─► none is wanted ─► the learner moves ─► the node ends

Invariants
    1. At most one is wanted.
    2. One that does not come in time, or is of no use, is given up, and the next is wanted after a pause,
       longer each time.
"""

from __future__ import annotations

from spotlight.config.sections.fleet import OnDemandConfig
from spotlight.scheduler import events as ev
from spotlight.scheduler.effects import ReportFleet
from spotlight.scheduler.fleet.fleet_machine import Fleet, FleetPolicy
from spotlight.scheduler.fleet.supply import Supply
from spotlight.scheduler.plan import Plan
from spotlight.scheduler.policies.spot_learner.learner_places import LearnerPlaces
from spotlight.scheduler.types import NodeKind

_PAUSE_MIN_S, _PAUSE_MAX_S = 60.0, 3600.0
"""After one that did not come, before the next is wanted."""


class OnDemand(FleetPolicy):
    """Decides :attr:`Supply.wanted` of nodes on demand."""

    name = "on_demand"

    def __init__(self, settings: OnDemandConfig, plan: Plan, places: LearnerPlaces, supply: Supply) -> None:
        self.settings, self.places, self.supply = settings, places, supply
        self._ranks_min, self._start_s = plan.ranks_min, plan.cluster.start_s
        self._waits_since_s: float | None = None
        self._room_since_s: float | None = None
        self._taken_s: float | None = None
        """When the one that is coming was first wanted."""
        self._pause_s = self._not_before_s = 0.0
        self._failed = False

    def observe(self, event: ev.Event, fleet: Fleet) -> None:
        """See :class:`FleetPolicy`."""
        match event:
            case ev.NodesProvided(NodeKind.ON_DEMAND, nodes, wanted):
                if self.supply.wanted is None:
                    self.supply.wanted = min(nodes, 1)
                    self._taken_s = fleet.now if nodes else None  # by a head that was killed
                self._failed = self._taken_s is not None and bool(wanted) and not nodes

    def place(self, fleet: Fleet) -> None:
        """See :class:`FleetPolicy`."""
        now, places, supply = fleet.now, self.places, self.supply
        waits = sum(places.target.values()) < self._ranks_min
        self._waits_since_s = since(self._waits_since_s, waits, now)
        room_since_s = self._room_since_s = since(self._room_since_s, places.spot_room, now)
        if supply.wanted is None:
            return
        wanted, why = supply.wanted, ""
        there = fleet.kind(NodeKind.ON_DEMAND)
        if any(machine.ranks for machine in there):
            self._taken_s, self._pause_s = None, 0.0
            if wanted and room_since_s is not None and now >= room_since_s + self.settings.back_after_s:
                wanted, why = 0, "leave: spot nodes have room for the learner"
            elif not wanted and room_since_s is None:
                wanted, why = 1, "stay: spot nodes have no room for the learner"
        elif there:
            if wanted and waits:
                wanted, why = 0, "cancel: it has too few slots for the learner"
                self._pause(now)
            elif wanted:
                wanted, why = 0, "empty: the learner is on spot nodes"
            self._taken_s = None
        elif self._taken_s is not None:
            if now >= self._taken_s + self._start_s or self._failed:
                wanted, why = 0, "cancel: it does not join"
                self._taken_s = None
                self._pause(now)
        elif self._waits_since_s is not None and now >= self._next_take_s(self._waits_since_s):
            wanted, why = 1, "take: no spot node has room for the learner"
            self._taken_s, self._failed = now, False
        else:
            wanted = 0  # the one that was there is lost
        if why:
            fleet.effects.append(ReportFleet(NodeKind.ON_DEMAND, why))
        supply.wanted = wanted

    def _pause(self, now: float) -> None:
        self._pause_s = min(_PAUSE_MAX_S, max(_PAUSE_MIN_S, 2 * self._pause_s))
        self._not_before_s = now + self._pause_s

    def _next_take_s(self, waits_since_s: float) -> float:
        return max(waits_since_s + self.settings.after_s, self._not_before_s)

    def next_s(self, fleet: Fleet) -> float | None:
        """See :class:`FleetPolicy`."""
        times: list[float] = []
        if self._taken_s is not None:
            times.append(self._taken_s + self._start_s)
        elif self._waits_since_s is not None:
            times.append(self._next_take_s(self._waits_since_s))
        if self._room_since_s is not None and fleet.kind(NodeKind.ON_DEMAND):
            times.append(self._room_since_s + self.settings.back_after_s)
        return min((at_s for at_s in times if at_s > fleet.now), default=None)


def since(before_s: float | None, holds: bool, now: float) -> float | None:
    """When something began that ``holds`` now, or None; ``before_s``: the answer before."""
    if not holds:
        return None
    return now if before_s is None else before_s
