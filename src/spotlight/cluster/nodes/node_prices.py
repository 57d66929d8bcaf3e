"""Assign roles and prices to Ray's nodes: which train, which roll out, at what cost. Pure.

On reserved nodes, learner ranks go to as few as possible at the start, later to whichever replaces a lost
one. On spot nodes they move, and a node changes its role while it is there
(:class:`~spotlight.scheduler.learner.learner_places.LearnerPlaces`). A node with ranks and free slots is two
nodes to the controller.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from spotlight.cluster.nodes.listing import Part, RayNode, place_learner, split_node, unused
from spotlight.scheduler.learner.learner_places import LearnerPlaces
from spotlight.scheduler.types import NodeId, NodeKind


@dataclass(frozen=True, slots=True)
class Prices:
    """USD per hour of one slot."""

    reserved_usd_h: float
    spot_usd_h: float

    def of(self, kind: NodeKind) -> float:
        """Price for a kind of node."""
        return self.spot_usd_h if kind is NodeKind.SPOT else self.reserved_usd_h


@dataclass(frozen=True, slots=True)
class RoleChange:
    """A node that stays and does something else: the controller's nodes on it, before and after."""

    node: RayNode
    before: tuple[NodeId, ...]
    after: tuple[Part, ...]


@dataclass(slots=True)
class Fleet:
    """The nodes that joined.

    Attributes:
        planned: ranks by Ray id of the initial reserved nodes that have not joined yet.
        ranks_roll_out: slots of ranks also hold a worker each.
        places: of the ranks among spot nodes; None: they are on reserved nodes.
    """

    ranks: int
    prices: Prices
    planned: dict[str, tuple[RayNode, int]]
    ranks_roll_out: bool = False
    places: LearnerPlaces | None = None
    _nodes: dict[str, tuple[RayNode, tuple[Part, ...]]] = field(default_factory=dict)

    @classmethod
    def plan(
        cls, ranks: int, prices: Prices, nodes: Sequence[RayNode], *, ranks_roll_out: bool = False
    ) -> Fleet:
        """Plan for the nodes present at the start. Raises ConfigError: too few reserved slots."""
        return cls(ranks, prices, dict(LearnerSlots.plan(ranks, nodes).by_node), ranks_roll_out)

    @classmethod
    def on_spot(
        cls,
        ranks: int,
        prices: Prices,
        *,
        ranks_roll_out: bool = False,
        even: bool = False,
        ranks_min: int = 0,
    ) -> Fleet:
        """A fleet whose learner is on spot nodes; see :class:`LearnerPlaces`."""
        return cls(ranks, prices, {}, ranks_roll_out, LearnerPlaces(ranks, even, ranks_min))

    @property
    def fewest_ranks(self) -> int:
        """The learner starts with no fewer."""
        return self.ranks if self.places is None else self.places.ranks_min or self.ranks

    def join(self, node: RayNode) -> tuple[Part, ...]:
        """Add a Ray node; returns the controller's nodes on it. :meth:`changes` may follow."""
        if self.places is not None:
            if node.kind is not NodeKind.RESERVED:
                self.places.join(node.ray_id, node.slots, on_demand=node.kind is NodeKind.ON_DEMAND)
            held = self.places.held(node.ray_id)
        else:
            held = self._held(node)
        parts = self._parts(node, held)
        self._nodes[node.ray_id] = node, parts
        return parts

    def _held(self, node: RayNode) -> int:
        _, planned = self.planned.pop(node.ray_id, (node, 0))
        held = min(planned, node.slots)
        if node.kind is NodeKind.RESERVED and not held:
            held = min(node.slots, self.ranks - self._placed)
        return held

    def lose(self, ray_id: str) -> tuple[NodeId, ...]:
        """Remove a Ray node; returns the controller's nodes on it. :meth:`changes` may follow."""
        self.planned.pop(ray_id, None)
        _, parts = self._nodes.pop(ray_id, (None, ()))
        if self.places is not None:
            self.places.lose(ray_id)
        return tuple(part.node.id for part in parts)

    def changes(self) -> list[RoleChange]:
        """Give every node the role that the learner's places leave it; returns those that change it."""
        if self.places is None:
            return []
        found: list[RoleChange] = []
        for ray_id, (node, parts) in self._nodes.items():
            held, leaves = self.places.held(ray_id), ray_id in self.places.leaving
            rests = bool(parts) and not any(part.node.trains or part.node.rolls_out for part in parts)
            same = held == sum(part.node.gpus for part in parts if part.node.trains)
            if same and (leaves or not rests):
                continue
            after = self._parts(node, held)
            if leaves and not held:
                after = tuple(unused(part) for part in after)
            found.append(RoleChange(node, tuple(part.node.id for part in parts), after))
        for change in found:
            self._nodes[change.node.ray_id] = change.node, change.after
        return found

    def _parts(self, node: RayNode, held: int) -> tuple[Part, ...]:
        return split_node(node, held, self.prices.of(node.kind), self.ranks_roll_out)

    def known(self, ray_id: str) -> tuple[NodeId, ...]:
        """The controller's nodes on a Ray node."""
        return tuple(part.node.id for part in self._nodes[ray_id][1]) if ray_id in self._nodes else ()

    @property
    def nodes(self) -> list[RayNode]:
        """Those that are there, in the order in which they joined."""
        return [node for node, _ in self._nodes.values()]

    def ray_node(self, ray_id: str) -> RayNode | None:
        """A node that is there."""
        return self._nodes[ray_id][0] if ray_id in self._nodes else None

    def host_of(self, node: NodeId) -> RayNode | None:
        """The Ray node of a controller's node."""
        for ray_node, parts in self._nodes.values():
            if any(part.node.id == node for part in parts):
                return ray_node
        return None

    @property
    def learner_slots(self) -> Mapping[str, tuple[RayNode, int]]:
        """Ray nodes that train, or will, with their rank counts."""
        if self.places is not None:
            return {ray_id: (self._nodes[ray_id][0], count) for ray_id, count in self.places.target.items()}
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
        """As :meth:`Fleet.plan` places them; 0 ranks: they go to spot nodes."""
        placed = place_learner(nodes, ranks) if ranks else {}
        return cls({node.ray_id: (node, placed[node.ray_id]) for node in nodes if node.ray_id in placed})
