"""The node provider in virtual time: one on demand for a learner that waits, and spot nodes of a market.

The market is the scenario's spot nodes. The run takes as many of them as it wants; one that it takes joins
after ``delay_s``, and one that the market takes away is replaced by another, if there is one.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from spotlight.scheduler import events as ev
from spotlight.scheduler.effects import NodesWanted
from spotlight.scheduler.types import Node, NodeId, NodeKind
from spotlight_fleet.providers.spot_offers import SpotOffers
from spotlight_plan.simulation.scenario import NodeEvent

if TYPE_CHECKING:
    from spotlight_plan.simulation.virtual_driver import Simulation


@dataclass(slots=True)
class OnDemandSupply:
    """Nodes on demand; ``taken``: so many so far."""

    host: Simulation
    node: Node
    taken: int = 0
    _coming: NodeId | None = None

    @property
    def provided(self) -> int:
        """Nodes that are there, or coming."""
        return len(self._there) + (self._coming is not None)

    @property
    def _there(self) -> list[NodeId]:
        machines = self.host.places.machines.values()
        there = [machine.id for machine in machines if machine.kind is NodeKind.ON_DEMAND]
        if self._coming in there:
            self._coming = None
        return there

    def carry_out(self, order: NodesWanted) -> None:
        """Start one, or end those that may end."""
        for name in order.ending[: max(0, self.provided - order.nodes)]:
            self.host.apply(ev.NodeLost(name))
        there = self._there
        if order.nodes == 0 and self._coming is not None:
            self.host.apply(ev.NodeLost(self._coming))
            self._coming = None
        elif order.nodes and not there and self._coming is None:
            self.taken += 1
            node = replace(self.node, id=NodeId(f"{self.node.id}:{self.taken}"))
            self._coming = node.id
            self.host.apply(ev.NodeJoined(node))


@dataclass(slots=True)
class SpotSupply:
    """The spot nodes that a run with a target takes; ``first``: so many at the beginning."""

    host: Simulation
    first: int
    delay_s: float
    _offers: SpotOffers = field(init=False)
    _nodes: dict[NodeId, Node] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._offers = SpotOffers(self.first)

    @property
    def provided(self) -> int:
        """Nodes that it tries to provide."""
        return self._offers.wanted

    def offer(self, event: NodeEvent, now: float) -> bool:
        """The market offers a node, or takes one away; returns whether the run has to do with it."""
        match event:
            case ev.NodeJoined(node) if node.kind is NodeKind.SPOT:
                self._nodes[node.id] = node
                self._offers.offered[node.id] = node.gpus
                self._take(self.delay_s if now else 0.0)
                return False
            case ev.NodeLost(name) if name in self._nodes:
                had = self._offers.withdraw(name)
                del self._nodes[name]
                self._take(self.delay_s)
                return had
            case ev.NodeJoined() | ev.NodeLost():
                return True
            case _:
                return event.node not in self._nodes or event.node in self._offers.taken

    def carry_out(self, order: NodesWanted) -> None:
        """Take more, or give back those that may end."""
        for name in self._offers.want(order.nodes, self.host.places.machines, order.ending):
            self.host.apply(ev.NodeLost(NodeId(name)))
        self._take(self.delay_s)

    def _take(self, delay_s: float) -> None:
        while (taken := self._offers.take()) is not None:
            self.host.after(delay_s, self._bring_in, NodeId(taken[0]))

    def _bring_in(self, name: NodeId) -> None:
        if name in self._offers.taken and name not in self.host.places.machines:
            self.host.apply(ev.NodeJoined(self._nodes[name]))
