"""The machines of a simulation, and what each is to the controller."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from spotlight.scheduler.types import Node, NodeId

Parts = tuple[Node, ...]


@dataclass(slots=True)
class VirtualPlaces:
    """See the module's docstring.

    Attributes:
        machines: as they joined.
        parts: the nodes on each.
        nodes: all of them.
        machine_of: the machine of each.
        placed: of a learner that moves: where it is formed next, or is, as the controller says.
        running: where it runs.
        warm: machines that have the model's files.
    """

    machines: dict[NodeId, Node] = field(default_factory=dict)
    parts: dict[NodeId, Parts] = field(default_factory=dict)
    nodes: dict[NodeId, Node] = field(default_factory=dict)
    machine_of: dict[NodeId, NodeId] = field(default_factory=dict)
    placed: Mapping[NodeId, int] = field(default_factory=dict)
    running: Mapping[NodeId, int] = field(default_factory=dict)
    warm: set[NodeId] = field(default_factory=set)

    def join(self, machine: Node) -> None:
        """Add a machine, which is one node."""
        self.machines[machine.id] = machine
        self.put(machine.id, (machine,))

    def take(self, name: NodeId) -> Parts:
        """Remove a machine; returns the nodes that were on it."""
        del self.machines[name]
        self.warm.discard(name)
        parts = self.put(name, ())
        del self.parts[name]
        return parts

    def put(self, machine: NodeId, parts: Parts) -> Parts:
        """A machine is these nodes from now on; returns what it was."""
        before = self.parts.get(machine, ())
        for part in before:
            del self.nodes[part.id], self.machine_of[part.id]
        self.parts[machine] = parts
        self.nodes |= {part.id: part for part in parts}
        self.machine_of |= {part.id: machine for part in parts}
        return before

    @property
    def ranks(self) -> int:
        """GPUs that train."""
        return sum(node.gpus for node in self.nodes.values() if node.trains)

    @property
    def is_cold(self) -> bool:
        """Whether a machine where a learner that moves starts next lacks the model's files."""
        return not self.warm.issuperset(self.placed)

    def started(self) -> None:
        """A learner that moves starts where it is placed."""
        self.running = self.placed
        self.warm.update(self.placed)
