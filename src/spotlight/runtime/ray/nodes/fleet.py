"""Which of Ray's nodes are what to the controller: who trains, who rolls out, at what price. Pure.

Learner ranks go to reserved nodes: as few as possible when the run begins, then to whichever reserved node
comes in place of one that was lost. A node that holds some ranks and has slots left is two nodes to the
controller.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from spotlight.core.types import Node, NodeId, NodeKind
from spotlight.runtime.ray.nodes.listing import RayNode, place_learner, split_node


@dataclass(frozen=True, slots=True)
class Prices:
    """USD an hour of one slot."""

    reserved_usd_h: float
    spot_usd_h: float

    def of(self, kind: NodeKind) -> float:
        """Of a node of that kind."""
        return self.spot_usd_h if kind is NodeKind.SPOT else self.reserved_usd_h


@dataclass(slots=True)
class Fleet:
    """The nodes that joined.

    Attributes:
        ranks: learner ranks of the run.
        planned: ranks by Ray's id, of reserved nodes that were there when the run began and did not join yet.
    """

    ranks: int
    prices: Prices
    planned: dict[str, tuple[RayNode, int]]
    _nodes: dict[str, tuple[RayNode, tuple[Node, ...]]] = field(default_factory=dict)

    @classmethod
    def plan(cls, ranks: int, prices: Prices, nodes: Sequence[RayNode]) -> Fleet:
        """For the nodes that are there when the run begins. Raises ConfigError: too few reserved slots."""
        placed = place_learner(nodes, ranks)
        return cls(
            ranks,
            prices,
            {node.ray_id: (node, placed[node.ray_id]) for node in nodes if node.ray_id in placed},
        )

    def join(self, node: RayNode) -> tuple[Node, ...]:
        """What the controller is told of a node of Ray's."""
        _, planned = self.planned.pop(node.ray_id, (node, 0))
        held = min(planned, node.slots)
        if node.kind is NodeKind.RESERVED and not held:
            held = min(node.slots, self.ranks - self._placed)
        parts = split_node(node, held, self.prices.of(node.kind), ranks_roll_out=False)
        nodes = tuple(part.node for part in parts)
        self._nodes[node.ray_id] = node, nodes
        return nodes

    def lose(self, ray_id: str) -> tuple[NodeId, ...]:
        """What the controller is told when it is gone."""
        self.planned.pop(ray_id, None)
        _, nodes = self._nodes.pop(ray_id, (None, ()))
        return tuple(node.id for node in nodes)

    def known(self, ray_id: str) -> tuple[NodeId, ...]:
        """The controller's nodes of one of Ray's."""
        return tuple(node.id for node in self._nodes[ray_id][1]) if ray_id in self._nodes else ()

    def host_of(self, node: NodeId) -> RayNode | None:
        """Ray's node of one of the controller's."""
        for ray_node, nodes in self._nodes.values():
            if any(part.id == node for part in nodes):
                return ray_node
        return None

    @property
    def learner_slots(self) -> Mapping[str, tuple[RayNode, int]]:
        """Ray's nodes that train, or will, each with how many ranks it holds."""
        joined = {
            ray_id: (ray_node, sum(node.gpus for node in nodes if node.trains))
            for ray_id, (ray_node, nodes) in self._nodes.items()
            if any(node.trains for node in nodes)
        }
        return {**self.planned, **joined}

    @property
    def _placed(self) -> int:
        return sum(count for _, count in self.learner_slots.values())
