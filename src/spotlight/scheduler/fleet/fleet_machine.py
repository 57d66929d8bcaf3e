"""Which machines there are, what each does, and how many are wanted. Part of the controller.

    a machine joins, gets a notice or is lost ─► policies give machines their roles ─► AssignRoles
                                              └► and say how many of a kind are wanted ─► NodesWanted

To the rest of the controller a machine is one node, or two if the learner has some of its GPUs:
``spot-0/learner`` and ``spot-0/rollout``. Drivers report machines, not these nodes.

Invariants
    1. The cluster knows exactly the parts of the machines that are there.
    2. A machine may have two ends, the cloud's and the run's own. The earlier one holds; if one is withdrawn,
       the other remains.
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
        node: the whole machine, as it joined.
        parts: the nodes that the cluster knows it as.
        taken_s: when the cloud takes it; None: no such time is known.
        returned_s: when the run gives it back; None: the run keeps it.
        advised: whether the cloud has said that it is likelier than others to be taken.
    """

    node: Node
    parts: tuple[Node, ...] = ()
    taken_s: float | None = None
    returned_s: float | None = None
    advised: bool = False

    @property
    def ends_s(self) -> float | None:
        """When the machine ends; None: no end is known."""
        return min((at_s for at_s in (self.taken_s, self.returned_s) if at_s is not None), default=None)

    @property
    def ranks(self) -> int:
        """Number of its GPUs that train, or will."""
        return sum(part.gpus for part in self.parts if part.trains)


class FleetPolicy:
    """What machines do, and how many are wanted, beside the default: every machine does what it joined for.

    A policy is asked after events. It sees the fleet and gives machines roles (:meth:`Fleet.assign`), or says
    how many of a kind are wanted (``Supply.wanted``). Like the controller it does no I/O and reads no clock.
    It has a folder of its own under ``scheduler/policies``, and only runs that use it import it. The methods
    of this class change nothing.

    Another package adds one with an entry point of the group ``spotlight.fleet_policies``, and a run uses it
    with ``policies.NAME: {keys of its section}``.

    Attributes:
        section: class of its configuration section, if it is another package's policy.
        name: key of its state in snapshots.
        watches: whether to ask it after every event, not only after those that :meth:`observe` sees.
    """

    section: ClassVar[type[Section]] = Section
    name: ClassVar[str]
    watches: bool = False

    @classmethod
    def of(cls, plan: Plan, settings: Section | None) -> Sequence[FleetPolicy]:
        """The policies that a run needs for this one, in the order in which they are asked.

        Args:
            settings: its configuration section; None for a built-in policy, whose keys are in ``plan``.
        """
        return [cls()]

    def observe(self, event: ev.Event, fleet: Fleet) -> None:
        """Take note of an event: of machines, workers, groups, the learner's place, or costs."""

    def place(self, fleet: Fleet) -> None:
        """Assign roles, or say how many machines are wanted."""

    def next_s(self, fleet: Fleet) -> float | None:
        """When to ask it next even if no event arrives; None: never."""
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
        next_s: when :meth:`place` is next due even if no event arrives; None: never.
        changes: how often a machine came or went, or changed its end or its parts.
    """

    cluster: Cluster
    policies: Sequence[FleetPolicy] = ()
    machines: dict[NodeId, FleetMachine] = field(default_factory=dict)
    effects: list[Effect] = field(default_factory=list)
    now: float = 0.0
    next_s: float | None = None
    changes: int = 0
    _changed: bool = False

    def observe(self, event: ev.Event) -> None:
        """Follow machines that come, go, or get a notice, and let policies see the event."""
        self.changes += isinstance(event, ev.MachineEvent)
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
        self._changed = True
        for policy in self.policies:
            policy.observe(event, self)

    def place(self) -> None:
        """Ask the policies, if an event or the time calls for it. To be called after every event."""
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
        """Give ``ranks`` GPUs of a machine to the learner; the others roll out.

        A machine that the learner leaves because of a notice does nothing more: rollouts that began on it
        would not be done in time.
        """
        rests = not any(part.trains or part.rolls_out for part in machine.parts)
        if machine.parts and machine.ranks == ranks and (machine.ends_s is not None or not rests):
            return
        parts = split_machine(machine.node, ranks, ranks_roll_out=ranks_roll_out)
        if machine.parts and machine.ends_s is not None and not ranks:
            parts = tuple(replace(part, rolls_out=False) for part in parts)
        self._become(machine, parts)

    def give_back(self, machine: FleetMachine, at_s: float | None) -> None:
        """End a machine at ``at_s``, in controller time; None: keep it, unless the cloud takes it."""
        machine.returned_s, self._changed = at_s, True
        self.changes += 1
        self._announce(machine)

    def kind(self, kind: NodeKind) -> list[FleetMachine]:
        """The machines of a kind, in the order in which they joined."""
        return [machine for machine in self.machines.values() if machine.node.kind is kind]

    def is_empty(self, machine: FleetMachine) -> bool:
        """Whether no group and no rank works on a machine that ends."""
        hosts = [self.cluster.hosts[part.id] for part in machine.parts]
        return all(host.draining and not host.leaders and not host.node.trains for host in hosts)

    def machine_of(self, worker: WorkerId) -> FleetMachine | None:
        """The machine that a worker runs on; None: the worker is unknown."""
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
                self.cluster.join(part)
        if (before or (machine.node,)) != parts:
            self.effects.append(AssignRoles(machine.node.id, parts))
        self._announce(machine)

    def _announce(self, machine: FleetMachine) -> None:
        ends_s = machine.ends_s
        for part in machine.parts:
            if self.cluster.hosts[part.id].deadline_s == ends_s:
                continue
            if ends_s is None:
                self.cluster.cancel_notice(part.id)
            else:
                self.cluster.notice(part.id, ends_s)

    def _forget(self, machine: FleetMachine) -> None:
        for part in machine.parts:
            self.cluster.lose(part.id)

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
