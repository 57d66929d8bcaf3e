"""Which of Ray's nodes are what to the controller: who trains, who rolls out, at what price. Pure.

Learner ranks go to reserved nodes: as few as possible when the run begins, then to whichever reserved node
comes in place of one that was lost. A node that holds some ranks and has slots left is two nodes to the
controller.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from spotlight.cluster.nodes.listing import Part, RayNode, place_learner, split_node
from spotlight.scheduler.types import NodeId, NodeKind


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
        ranks_roll_out: slots of ranks hold a worker each besides.
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
        """For the nodes that are there when the run begins. Raises ConfigError: too few reserved slots."""
        placed = place_learner(nodes, ranks)
        return cls(
            ranks,
            prices,
            {node.ray_id: (node, placed[node.ray_id]) for node in nodes if node.ray_id in placed},
            ranks_roll_out,
        )

    def join(self, node: RayNode) -> tuple[Part, ...]:
        """The parts of a node of Ray's, each a node of the controller's."""
        _, planned = self.planned.pop(node.ray_id, (node, 0))
        held = min(planned, node.slots)
        if node.kind is NodeKind.RESERVED and not held:
            held = min(node.slots, self.ranks - self._placed)
        parts = split_node(node, held, self.prices.of(node.kind), self.ranks_roll_out)
        self._nodes[node.ray_id] = node, parts
        return parts

    def lose(self, ray_id: str) -> tuple[NodeId, ...]:
        """What the controller is told when it is gone."""
        self.planned.pop(ray_id, None)
        _, parts = self._nodes.pop(ray_id, (None, ()))
        return tuple(part.node.id for part in parts)

    def known(self, ray_id: str) -> tuple[NodeId, ...]:
        """The controller's nodes of one of Ray's."""
        return tuple(part.node.id for part in self._nodes[ray_id][1]) if ray_id in self._nodes else ()

    def host_of(self, node: NodeId) -> RayNode | None:
        """Ray's node of one of the controller's."""
        for ray_node, parts in self._nodes.values():
            if any(part.node.id == node for part in parts):
                return ray_node
        return None

    @property
    def learner_slots(self) -> Mapping[str, tuple[RayNode, int]]:
        """Ray's nodes that train, or will, each with how many ranks it holds."""
        joined = {
            ray_id: (ray_node, sum(part.node.gpus for part in parts if part.node.trains))
            for ray_id, (ray_node, parts) in self._nodes.items()
            if any(part.node.trains for part in parts)
        }
        return {**self.planned, **joined}

    @property
    def _placed(self) -> int:
        return sum(count for _, count in self.learner_slots.values())
