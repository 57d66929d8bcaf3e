"""Which machines there are, what each does, and which are wanted. Part of the controller.

    a machine joins, is noticed or is lost ─► policies give machines their roles ─► AssignRoles
                                           └► and say how many of a kind are wanted ─► NodesWanted

A machine is one node to the rest of the controller, or two if the learner has a part of its GPUs:
``spot-0/learner`` and ``spot-0/rollout``. Drivers report machines; only they know what these are elsewhere.

Invariants
    1. The cluster knows exactly the parts of the machines that are there.
    2. A machine ends for two reasons, the cloud's and the run's own: the earlier end holds, and one that is
       withdrawn leaves the other.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, ClassVar

from spotlight.config.section import Section
from spotlight.scheduler import events as ev
from spotlight.scheduler.cluster.cluster import Cluster
from spotlight.scheduler.cluster.recovery import Recovery
from spotlight.scheduler.effects import AssignRoles, Effect
from spotlight.scheduler.types import Node, NodeId, NodeKind, WorkerId

if TYPE_CHECKING:
    from spotlight.scheduler.plan import Plan


@dataclass(slots=True)
class FleetMachine:
    """A machine that is there.

    Attributes:
        node: all of it, as it joined.
        parts: what it is to the cluster.
        taken_s: when the cloud takes it; None: not as far as is known.
        returned_s: when the run gives it back, likewise.
        advised: whether the cloud finds it likelier than others to be taken.
    """

    node: Node
    parts: tuple[Node, ...] = ()
    taken_s: float | None = None
    returned_s: float | None = None
    advised: bool = False

    @property
    def ends_s(self) -> float | None:
        """When it ends; None: not as far as is known."""
        return min((at_s for at_s in (self.taken_s, self.returned_s) if at_s is not None), default=None)

    @property
    def ranks(self) -> int:
        """GPUs that train, or will."""
        return sum(part.gpus for part in self.parts if part.trains)


class FleetPolicy:
    """What machines do, and how many are wanted, beside the default: every machine does what it joined for.

    A policy is asked after events. It sees the fleet and gives machines roles (:meth:`Fleet.assign`), or says
    how many of a kind are wanted (``Supply.wanted``). It is as pure as the controller, has a folder of its
    own under ``scheduler/policies``, and is imported only by runs that use it. Every hook here is the default
    and changes nothing.

    Another package adds one with an entry point of the group ``spotlight.fleet_policies``, and a run uses it
    with ``policies.NAME: {keys of its section}``.

    Attributes:
        section: of its keys, in another package's policy.
        name: of its state in snapshots.
        watches: it is to be asked after every event, not only after those that :meth:`observe` sees.
    """

    section: ClassVar[type[Section]] = Section
    name: ClassVar[str]
    watches: bool = False

    @classmethod
    def of(cls, plan: Plan, settings: Section | None) -> Sequence[FleetPolicy]:
        """What a run needs of this: itself, and before or after it others that do what it decides.

        Args:
            settings: its section; None for those that are built in, whose keys stand in ``plan``.
        """
        return [cls()]

    def observe(self, event: ev.Event, fleet: Fleet) -> None:
        """See an event of machines, workers or groups, of where the learner is, or of what all this costs."""

    def place(self, fleet: Fleet) -> None:
        """Decide."""

    def next_s(self, fleet: Fleet) -> float | None:
        """When it is to be asked although nothing happens; None: never."""
        return None

    def roll_back(self, iteration: int) -> None:
        """The learner was lost, and the run goes back to the beginning of an iteration; machines stay."""

    def snapshot(self) -> Mapping[str, object]:
        """JSON-able state between two iterations; empty: none."""
        return {}

    def restore(self, state: Mapping[str, object]) -> None:
        """Inverse of :meth:`snapshot`. Raises ValueError if malformed."""


@dataclass(slots=True)
class Fleet:
    """See the module's docstring.

    Attributes:
        policies: asked in this order.
        effects: taken by the controller after each event.
        now: of the event being processed.
        next_s: when :meth:`place` is next due although nothing happens; None: never.
        changes: so often a machine came or went, or its end or its parts changed.
    """

    cluster: Cluster
    policies: Sequence[FleetPolicy] = ()
    machines: dict[NodeId, FleetMachine] = field(default_factory=dict)
    effects: list[Effect] = field(default_factory=list)
    now: float = 0.0
    next_s: float | None = None
    changes: int = 0
    _changed: bool = False

    def handle(self, event: ev.MachineEvent) -> None:
        """A machine comes, goes or is noticed."""
        self.changes += 1
        match event:
            case ev.NodeJoined(node):
                if (before := self.machines.get(node.id)) is not None:
                    self.cluster.count(Recovery.NODE_RETURNED)
                    self._forget(before)
                self.machines[node.id] = FleetMachine(node)
            case ev.NodeLost(name):
                if (lost := self.machines.pop(name, None)) is not None:
                    self._forget(lost)
            case ev.NodeNoticed(name, deadline_s) if name in self.machines:
                self.machines[name].taken_s = deadline_s
                self._announce(self.machines[name])
            case ev.NodeAdvised(name) if name in self.machines:
                self.machines[name].advised = True
            case ev.NoticeCancelled(name) if name in self.machines:
                self.machines[name].taken_s = None
                self._announce(self.machines[name])
        self.observe(event)

    def observe(self, event: ev.Event) -> None:
        """Let policies see an event."""
        self._changed = True
        for policy in self.policies:
            policy.observe(event, self)

    def place(self) -> None:
        """Ask the policies, if there is reason to; call it after every event."""
        due = self.next_s is not None and self.next_s <= self.now
        if not (self._changed or due or any(policy.watches for policy in self.policies)):
            return
        self._changed = False
        self._ask()
        if self._changed:  # machines are given back: those who place the learner look again
            self._changed = False
            self._ask()
        times = (policy.next_s(self) for policy in self.policies)
        self.next_s = min((at_s for at_s in times if at_s is not None), default=None)

    def _ask(self) -> None:
        for policy in self.policies:
            policy.place(self)
        for machine in self.machines.values():
            if not machine.parts:  # new, and of no concern to a policy
                self._become(machine, (machine.node,))

    # -- for policies ----------------------------------------------------------------------------------

    def assign(self, machine: FleetMachine, ranks: int, *, ranks_roll_out: bool) -> None:
        """Give so many GPUs of a machine to the learner; the others roll out.

        One that is left with a notice rests: what would begin on it would not be done in time.
        """
        rests = not any(part.trains or part.rolls_out for part in machine.parts)
        if machine.parts and machine.ranks == ranks and (machine.ends_s is not None or not rests):
            return
        parts = split_machine(machine.node, ranks, ranks_roll_out=ranks_roll_out)
        if machine.parts and machine.ends_s is not None and not ranks:
            parts = tuple(replace(part, rolls_out=False) for part in parts)
        self._become(machine, parts)

    def give_back(self, machine: FleetMachine, at_s: float | None) -> None:
        """Have a machine end at this time; None: it stays, unless the cloud takes it."""
        machine.returned_s, self._changed = at_s, True
        self.changes += 1
        self._announce(machine)

    def kind(self, kind: NodeKind) -> list[FleetMachine]:
        """The machines of a kind, as they joined."""
        return [machine for machine in self.machines.values() if machine.node.kind is kind]

    def is_empty(self, machine: FleetMachine) -> bool:
        """Whether nothing works any more on a machine that ends."""
        hosts = [self.cluster.hosts[part.id] for part in machine.parts]
        return all(host.draining and not host.leaders and not host.node.trains for host in hosts)

    def machine_of(self, worker: WorkerId) -> FleetMachine | None:
        """The machine of a worker."""
        known = self.cluster.workers.get(worker)
        parts = ((part, each) for each in self.machines.values() for part in each.parts)
        return next((each for part, each in parts if known is not None and part.id == known.node), None)

    # -- the cluster -----------------------------------------------------------------------------------

    def _become(self, machine: FleetMachine, parts: tuple[Node, ...]) -> None:
        before, machine.parts = machine.parts, parts
        if before == parts:
            return
        self.changes += 1
        if before:
            self.cluster.reassign([part.id for part in before], parts)
        else:
            for part in parts:
                self.cluster.handle(ev.NodeJoined(part))
        if (before or (machine.node,)) != parts:
            self.effects.append(AssignRoles(machine.node.id, parts))
        self._announce(machine)

    def _announce(self, machine: FleetMachine) -> None:
        ends_s = machine.ends_s
        for part in machine.parts:
            if self.cluster.hosts[part.id].deadline_s != ends_s:
                self.cluster.handle(
                    ev.NoticeCancelled(part.id) if ends_s is None else ev.NodeNoticed(part.id, ends_s)
                )

    def _forget(self, machine: FleetMachine) -> None:
        for part in machine.parts:
            self.cluster.handle(ev.NodeLost(part.id))

    # -- state -----------------------------------------------------------------------------------------

    def roll_back(self, iteration: int) -> None:
        """The learner was lost, and the run goes back to the beginning of an iteration; machines stay."""
        for policy in self.policies:
            policy.roll_back(iteration)

    def snapshot(self) -> dict[str, Mapping[str, object]]:
        """JSON-able state of the policies that have one."""
        states = {policy.name: policy.snapshot() for policy in self.policies}
        return {name: state for name, state in states.items() if state}

    def restore(self, states: Mapping[str, Mapping[str, object]]) -> None:
        """Inverse of :meth:`snapshot`; the state of other policies is left alone."""
        for policy in self.policies:
            if policy.name in states:
                policy.restore(states[policy.name])

    def check(self) -> None:
        """Assert the invariants above, in O(machines)."""
        parts = {part.id: machine for machine in self.machines.values() for part in machine.parts}
        assert parts.keys() == self.cluster.hosts.keys(), f"{[*parts]} and {[*self.cluster.hosts]}"
        for name, machine in parts.items():
            assert self.cluster.hosts[name].deadline_s == machine.ends_s
        for machine in self.machines.values():
            assert sum(part.gpus for part in machine.parts) == machine.node.gpus


def split_machine(machine: Node, ranks: int, *, ranks_roll_out: bool) -> tuple[Node, ...]:
    """The nodes on a machine of which the learner has so many GPUs; a single one has its name.

    Args:
        ranks_roll_out: the learner's part also rolls out.

    Raises:
        ValueError: the machine has fewer GPUs.
    """
    free = machine.gpus - ranks
    if free < 0:
        raise ValueError(f"{ranks} learner ranks do not fit on the {machine.gpus} GPUs of {machine.id}")

    def part(suffix: str, gpus: int, *, trains: bool) -> Node:
        return replace(
            machine,
            id=NodeId(f"{machine.id}/{suffix}") if ranks and free else machine.id,
            gpus=gpus,
            price_usd_h=machine.price_usd_h * gpus / machine.gpus,
            trains=trains,
            rolls_out=machine.rolls_out and (ranks_roll_out or not trains),
        )

    parts = part("learner", ranks, trains=True), part("rollout", free, trains=False)
    return tuple(each for each in parts if each.gpus)
