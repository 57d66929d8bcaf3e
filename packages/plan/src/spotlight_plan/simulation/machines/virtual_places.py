"""Which nodes of a simulation train: those that the scenario says, or spot nodes (and one on demand) if the
learner moves.

A machine of which the learner takes a part is two nodes to the controller: ``spot-0/learner`` and
``spot-0/rollout``.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from spotlight.scheduler.learner.learner_places import LearnerPlaces
from spotlight.scheduler.plan import Plan
from spotlight.scheduler.types import Node, NodeId, NodeKind

Parts = tuple[Node, ...]
GROWS_AFTER_S = 60.0


@dataclass(slots=True)
class VirtualPlaces:
    """The machines that are there, and the controller's nodes on them, with their roles.

    Attributes:
        moving: None if the learner does not move.
        ranks_roll_out: GPUs of a learner that moves also roll out while it waits.
        ranks: of a learner that does not move.
        machines: as they joined.
        parts: the nodes on each.
        nodes: all of them.
        machine_of: the machine of each.
        warm: machines that have the model's files.
        room_since_s: when there was room for more ranks; None: there is none now.
    """

    moving: LearnerPlaces | None
    ranks_roll_out: bool = False
    ranks: int = 1
    machines: dict[NodeId, Node] = field(default_factory=dict)
    parts: dict[NodeId, Parts] = field(default_factory=dict)
    nodes: dict[NodeId, Node] = field(default_factory=dict)
    machine_of: dict[NodeId, NodeId] = field(default_factory=dict)
    warm: set[NodeId] = field(default_factory=set)
    room_since_s: float | None = None

    @classmethod
    def of(cls, plan: Plan, *, ranks_roll_out: bool = False, even: bool = False) -> VirtualPlaces:
        """No node is there yet; ``even``: equally many ranks on each node."""
        moves, least = plan.cluster.learner_moves, plan.ranks_min
        return cls(LearnerPlaces(plan.ranks, even, least) if moves else None, ranks_roll_out, plan.ranks)

    def join(self, machine: Node) -> Parts:
        """Add a machine; returns the nodes on it."""
        self.machines[machine.id] = machine
        if self.moving is None:
            return self._put(machine.id, (machine,))
        if machine.kind is not NodeKind.RESERVED:
            self.moving.join(machine.id, machine.gpus, on_demand=machine.kind is NodeKind.ON_DEMAND)
        return self._put(machine.id, self._split(machine, self.moving.held(machine.id)))

    def _split(self, machine: Node, held: int) -> Parts:
        return split(machine, held, ranks_roll_out=self.ranks_roll_out)

    def take(self, name: NodeId) -> tuple[bool, bool]:
        """Remove a machine; returns whether the learner was there, and whether a second one may have been."""
        machine, moving = self.machines.pop(name), self.moving
        self.warm.discard(name)
        self._put(name, ())
        del self.parts[name]
        if moving is None:
            return machine.trains, False
        was_there, second = name in moving.running, name in moving.target
        moving.lose(name)
        return was_there, second and not was_there

    def has_room(self, ranks: int) -> bool:
        """Whether all ranks have a place."""
        return sum(node.gpus for node in self.nodes.values() if node.trains) >= ranks

    def changed(self) -> Iterator[tuple[Parts, Parts]]:
        """Nodes before and after, of machines that change roles; one left with a notice rests."""
        moving = self.moving
        for machine in list(self.machines.values()) if moving is not None else ():
            assert moving is not None
            held, leaves, before = (
                moving.held(machine.id),
                machine.id in moving.leaving,
                self.parts[machine.id],
            )
            rests = not any(part.trains or part.rolls_out for part in before)
            same = held == sum(part.gpus for part in before if part.trains)
            if same and (leaves or not rests):
                continue
            after = self._split(machine, held)
            if leaves and not held:
                after = tuple(replace(part, rolls_out=False) for part in after)
            yield before, self._put(machine.id, after)

    def _put(self, machine: NodeId, parts: Parts) -> Parts:
        for part in self.parts.get(machine, ()):
            del self.nodes[part.id], self.machine_of[part.id]
        self.parts[machine] = parts
        self.nodes |= {part.id: part for part in parts}
        self.machine_of |= dict.fromkeys((part.id for part in parts), machine)
        return parts

    def notice(self, name: NodeId) -> None:
        """A machine has a preemption notice."""
        if self.moving is not None:
            self.moving.notice(name)

    def cancel(self, name: NodeId) -> None:
        """It is cancelled."""
        if self.moving is not None:
            self.moving.cancel(name)

    @property
    def is_cold(self) -> bool:
        """Whether a machine where a learner that moves starts next lacks the model's files."""
        return self.moving is not None and not self.warm.issuperset(self.moving.target)

    def started(self) -> None:
        """The learner starts at its places."""
        if self.moving is not None:
            self.warm.update(map(NodeId, self.moving.target))
            self.moving.started(self.moving.target)

    @property
    def next_ranks(self) -> int:
        """Of the learner that is formed now."""
        return self.ranks if self.moving is None else sum(self.moving.target.values())

    def sees_more_room(self, now: float) -> bool:
        """Whether there is room for more ranks since now: :meth:`grow` is due after :data:`GROWS_AFTER_S`."""
        if self.moving is None or not self.moving.larger:
            self.room_since_s = None
            return False
        if self.room_since_s is not None:
            return False
        self.room_since_s = now
        return True

    def grow(self, now: float) -> bool:
        """Have the learner move to more ranks if there has been room for them for long enough."""
        since_s = self.room_since_s
        if self.moving is None or since_s is None or now < since_s + GROWS_AFTER_S:
            return False
        self.moving.grow()
        return True

    def lost(self) -> None:
        """The learner is lost."""
        if self.moving is not None:
            self.moving.lost()


def split(machine: Node, held: int, *, ranks_roll_out: bool = False) -> Parts:
    """The nodes on a machine of which the learner holds so many GPUs; a single one has its name.

    Args:
        ranks_roll_out: the learner's part also rolls out.
    """
    free = machine.gpus - held

    def part(suffix: str, gpus: int) -> Node:
        name = NodeId(f"{machine.id}/{suffix}") if held and free else machine.id
        trains, price_usd_h = suffix == "learner", machine.price_usd_h * gpus / machine.gpus
        rolls_out = ranks_roll_out or not trains
        return replace(
            machine, id=name, gpus=gpus, price_usd_h=price_usd_h, trains=trains, rolls_out=rolls_out
        )

    return tuple(part(suffix, gpus) for suffix, gpus in (("learner", held), ("rollout", free)) if gpus)
