"""The fleet of a run, with the policies that its plan names. The others are not imported.

By default (:class:`ReservedLearner`) a learner's ranks are on reserved nodes, and the rest rolls out.
"""

from __future__ import annotations

from collections.abc import Mapping

from spotlight.registry import FLEET_POLICIES
from spotlight.scheduler import events as ev
from spotlight.scheduler.cluster.cluster import Cluster
from spotlight.scheduler.effects import PlaceLearner
from spotlight.scheduler.fleet.fleet_machine import Fleet, FleetPolicy
from spotlight.scheduler.plan import Plan
from spotlight.scheduler.types import NodeId, NodeKind


def make_fleet(plan: Plan, cluster: Cluster) -> Fleet:
    """No machine is there yet."""
    moves, fleet = plan.cluster.learner_moves, plan.fleet
    built_in = {"spot-learner": moves, "target": fleet.target is not None}
    used = {name: None for name, on in built_in.items() if on} | dict(plan.added)
    policies = [
        each
        for name in FLEET_POLICIES
        if name in used
        for each in FLEET_POLICIES.load(name).of(plan, used[name])
    ]
    if fleet.reserved is not None and not moves:
        learner = ReservedLearner(plan.ranks, fleet.reserved, ranks_roll_out=fleet.ranks_roll_out)
        policies.insert(0, learner)
    return Fleet(cluster, policies)


# -- the default on a cluster: a learner's ranks are on reserved nodes, the rest rolls out -----------------


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
