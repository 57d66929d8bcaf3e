"""Which nodes of a simulation train: those that the scenario says, or spot nodes if the learner moves.

A learner that moves takes whole nodes.
"""

from __future__ import annotations

from collections.abc import Container, Iterator
from dataclasses import dataclass, field, replace

from spotlight.scheduler.learner.learner_places import LearnerPlaces
from spotlight.scheduler.plan import Plan
from spotlight.scheduler.types import Node, NodeId, NodeKind


@dataclass(slots=True)
class VirtualPlaces:
    """The nodes that are there, with their roles. ``moving``: None if the learner does not move."""

    moving: LearnerPlaces | None
    nodes: dict[NodeId, Node] = field(default_factory=dict)

    @classmethod
    def of(cls, plan: Plan) -> VirtualPlaces:
        """No node is there yet."""
        return cls(LearnerPlaces(plan.ranks) if plan.cluster.learner_moves else None)

    def join(self, node: Node) -> Node:
        """Add a node; returns it with its role."""
        if self.moving is not None:
            if node.kind is NodeKind.SPOT:
                self.moving.join(node.id, node.gpus)
            trains = self.moving.held(node.id) > 0
            node = replace(node, trains=trains, rolls_out=not trains)
        self.nodes[node.id] = node
        return node

    def take(self, name: NodeId) -> tuple[bool, bool]:
        """Remove a node; returns whether the learner was there, and whether a second one may have been."""
        node, moving = self.nodes.pop(name), self.moving
        if moving is None:
            return node.trains, False
        was_there, second = name in moving.running, name in moving.target
        moving.lose(name)
        return was_there, second and not was_there

    def changed(self, noticed: Container[NodeId]) -> Iterator[Node]:
        """Nodes whose role changes; one that the learner left rests if it has a notice."""
        for node in list(self.nodes.values()) if self.moving is not None else ():
            assert self.moving is not None
            trains = self.moving.held(node.id) > 0
            rolls_out = not trains and (node.rolls_out or node.id not in noticed)
            if (node.trains, node.rolls_out) != (trains, rolls_out):
                self.nodes[node.id] = changed = replace(node, trains=trains, rolls_out=rolls_out)
                yield changed

    def notice(self, name: NodeId) -> None:
        """A node has a preemption notice."""
        if self.moving is not None:
            self.moving.notice(name)

    def cancel(self, name: NodeId) -> None:
        """It is cancelled."""
        if self.moving is not None:
            self.moving.cancel(name)

    def started(self) -> None:
        """The learner starts at its places."""
        if self.moving is not None:
            self.moving.started(self.moving.target)

    def lost(self) -> None:
        """The learner is lost."""
        if self.moving is not None:
            self.moving.lost()
