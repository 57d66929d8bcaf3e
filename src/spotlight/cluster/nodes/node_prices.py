"""Assign roles and prices to Ray's nodes: which train, which roll out, at what cost. Pure.

Learner ranks go to as few reserved nodes as possible at the start, later to whichever reserved node replaces
a lost one. A node with ranks and free slots is two nodes to the controller.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from spotlight.cluster.nodes.listing import Part, RayNode, place_learner, split_node
from spotlight.scheduler.types import NodeId, NodeKind


@dataclass(frozen=True, slots=True)
class Prices:
    """USD per hour of one slot."""

    reserved_usd_h: float
    spot_usd_h: float

    def of(self, kind: NodeKind) -> float:
        """Price for a kind of node."""
        return self.spot_usd_h if kind is NodeKind.SPOT else self.reserved_usd_h


@dataclass(slots=True)
class Fleet:
    """The nodes that joined.

    Attributes:
        planned: ranks by Ray id of the initial reserved nodes that have not joined yet.
        ranks_roll_out: slots of ranks also hold a worker each.
    """

    ranks: int
    prices: Prices
    planned: dict[str, tuple[RayNode, int]]
    ranks_roll_out: bool = False
    _nodes: dict[str, tuple[RayNode, tuple[Part, ...]]] = field(default_factory=dict)

    @classmethod
    def plan(
        cls, ranks: int, prices: Prices, nodes: Sequence[RayNode], *, ranks_roll_out: bool = False
    ) -> Fleet:
        """Plan for the nodes present at the start. Raises ConfigError: too few reserved slots."""
        return cls(ranks, prices, dict(LearnerSlots.plan(ranks, nodes).by_node), ranks_roll_out)

    def join(self, node: RayNode) -> tuple[Part, ...]:
        """Add a Ray node; returns the controller's nodes on it."""
        _, planned = self.planned.pop(node.ray_id, (node, 0))
        held = min(planned, node.slots)
        if node.kind is NodeKind.RESERVED and not held:
            held = min(node.slots, self.ranks - self._placed)
        parts = split_node(node, held, self.prices.of(node.kind), self.ranks_roll_out)
        self._nodes[node.ray_id] = node, parts
        return parts

    def lose(self, ray_id: str) -> tuple[NodeId, ...]:
        """Remove a Ray node; returns the controller's nodes that were on it."""
        self.planned.pop(ray_id, None)
        _, parts = self._nodes.pop(ray_id, (None, ()))
        return tuple(part.node.id for part in parts)

    def known(self, ray_id: str) -> tuple[NodeId, ...]:
        """The controller's nodes on a Ray node."""
        return tuple(part.node.id for part in self._nodes[ray_id][1]) if ray_id in self._nodes else ()

    def host_of(self, node: NodeId) -> RayNode | None:
        """The Ray node of a controller's node."""
        for ray_node, parts in self._nodes.values():
            if any(part.node.id == node for part in parts):
                return ray_node
        return None

    @property
    def learner_slots(self) -> Mapping[str, tuple[RayNode, int]]:
        """Ray nodes that train, or will, with their rank counts."""
        joined = {
            ray_id: (ray_node, sum(part.node.gpus for part in parts if part.node.trains))
            for ray_id, (ray_node, parts) in self._nodes.items()
            if any(part.node.trains for part in parts)
        }
        return {**self.planned, **joined}

    @property
    def _placed(self) -> int:
        return sum(count for _, count in self.learner_slots.values())


@dataclass(slots=True)
class LearnerSlots:
    """:attr:`Fleet.learner_slots` for other threads: replaced as a whole, never mutated."""

    by_node: Mapping[str, tuple[RayNode, int]]

    @classmethod
    def plan(cls, ranks: int, nodes: Sequence[RayNode]) -> LearnerSlots:
        """As :meth:`Fleet.plan` places them."""
        placed = place_learner(nodes, ranks)
        return cls({node.ray_id: (node, placed[node.ray_id]) for node in nodes if node.ray_id in placed})
