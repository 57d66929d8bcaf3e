"""The default on a cluster: a learner's ranks are on reserved nodes, the rest rolls out."""

from __future__ import annotations

from collections.abc import Mapping

from spotlight.scheduler import events as ev
from spotlight.scheduler.effects import PlaceLearner
from spotlight.scheduler.fleet.fleet_machine import Fleet, FleetPolicy
from spotlight.scheduler.types import NodeId, NodeKind


class ReservedLearner(FleetPolicy):
    """Ranks are where they were planned at the start; later, a reserved node takes those of one that is lost.

    Args:
        planned: ranks by node, of nodes that have yet to join.
    """

    name = "reserved_learner"

    def __init__(self, ranks: int, planned: Mapping[NodeId, int], *, ranks_roll_out: bool) -> None:
        self._ranks, self._ranks_roll_out = ranks, ranks_roll_out
        self._placed = dict(planned)
        self._reported = dict(planned)

    def observe(self, event: ev.Event, fleet: Fleet) -> None:
        """See :class:`FleetPolicy`."""
        match event:
            case ev.NodeJoined(node) if node.kind is NodeKind.RESERVED:
                planned = self._placed.pop(node.id, 0)
                held = min(node.gpus, planned or self._ranks - sum(self._placed.values()))
                if held:
                    self._placed[node.id] = held
            case ev.NodeLost(name):
                self._placed.pop(name, None)

    def place(self, fleet: Fleet) -> None:
        """See :class:`FleetPolicy`."""
        if self._placed != self._reported:
            self._reported = dict(self._placed)
            fleet.effects.append(PlaceLearner(self._reported))
        for name, ranks in self._placed.items():
            if (machine := fleet.machines.get(name)) is not None and not machine.parts:
                fleet.assign(machine, ranks, ranks_roll_out=self._ranks_roll_out)
