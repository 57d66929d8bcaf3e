"""Keeps as many nodes of a kind as a policy wants. Surplus nodes are drained before they end.

too few ─► NodesWanted
too many ─► nodes are drained, as on a notice ─► empty, or out of time ─► NodesWanted names them
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from spotlight.scheduler.effects import NodesWanted
from spotlight.scheduler.fleet.fleet_machine import Fleet, FleetMachine, FleetPolicy
from spotlight.scheduler.types import NodeId, NodeKind


@dataclass(frozen=True, slots=True)
class _Leaving:
    """A node that is drained, until ``end_s`` at the latest; ``moves``: the learner is on it."""

    end_s: float
    moves: bool


class Supply(FleetPolicy):
    """See the module's docstring. Asked after the policy that says how many.

    Attributes:
        wanted: number of nodes; None: not decided yet.

    Args:
        move_s: seconds that a learner has to move off a node.
        drain_s: seconds after which a node without the learner may end even if it is not empty.
    """

    name = "supply"

    def __init__(self, kind: NodeKind, move_s: float, drain_s: float) -> None:
        self.kind, self._move_s, self._drain_s = kind, move_s, drain_s
        self.wanted: int | None = None
        self._leaving: dict[NodeId, _Leaving] = {}
        self._ordered: NodesWanted | None = None

    def place(self, fleet: Fleet) -> None:
        """See :class:`FleetPolicy`."""
        if self.wanted is None:
            return
        present = {machine.node.id: machine for machine in fleet.kind(self.kind)}
        told = {name for name, machine in present.items() if machine.returned_s is not None}
        self._leaving = {name: each for name, each in self._leaving.items() if name in told}
        self._announce_ends(fleet, present, max(0, len(present) - self.wanted))
        ready = [
            name
            for name, leaving in self._leaving.items()
            if fleet.is_empty(present[name]) or fleet.now >= leaving.end_s
        ]
        self.watches = bool(self._leaving)  # they may be empty after any event
        order = NodesWanted(self.kind, max(self.wanted, len(present) - len(ready)), tuple(ready))
        if order != self._ordered:
            self._ordered = order
            fleet.effects.append(order)

    def _announce_ends(self, fleet: Fleet, present: Mapping[NodeId, FleetMachine], surplus: int) -> None:
        """Drain ``surplus`` nodes, and keep the others, with those that were drained for nothing."""
        # Not the learner's, if possible; then what the cloud may take soon; then the newest: their workers
        # have the least to lose.
        stay = [machine for name, machine in present.items() if name not in self._leaving]
        stay.sort(key=lambda machine: (machine.ranks > 0, not machine.advised), reverse=True)
        for machine in stay[max(0, len(stay) - (surplus - len(self._leaving))) :]:
            self._announce(fleet, machine)
        for name in list(self._leaving)[surplus:]:
            del self._leaving[name]
            fleet.give_back(present[name], None)
        for name, leaving in list(self._leaving.items()):
            if leaving.moves and not present[name].ranks:
                self._announce(fleet, present[name])  # what else is on it needs no such time

    def _announce(self, fleet: Fleet, machine: FleetMachine) -> None:
        moves = machine.ranks > 0
        end_s = fleet.now + (self._move_s if moves else self._drain_s)
        self._leaving[machine.node.id] = _Leaving(end_s, moves)
        fleet.give_back(machine, fleet.now + (self._move_s if moves else 0.0))

    def next_s(self, fleet: Fleet) -> float | None:
        """See :class:`FleetPolicy`: when a node that does not empty may end."""
        return min((each.end_s for each in self._leaving.values() if each.end_s > fleet.now), default=None)
