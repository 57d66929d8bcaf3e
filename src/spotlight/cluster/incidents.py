"""Shows the user, and records in the ledger, nodes, workers and learners that come, go and crash.

:class:`Drains` tells the cloud once no work is left on a machine that has a preemption notice.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from spotlight.cluster.remote_calls import Clock, Notify
from spotlight.scheduler import events as ev
from spotlight.scheduler.fleet.fleet_machine import Fleet
from spotlight.scheduler.types import NodeId, NodeKind
from spotlight.store.ledger.ledger_schema import Incident
from spotlight.store.ledger.sqlite_ledger import SqliteLedger


@dataclass(frozen=True, slots=True)
class IncidentRecorder:
    """Records incidents. ``fleet`` is the controller's."""

    clock: Clock
    note: Notify
    ledger: SqliteLedger
    fleet: Fleet

    def observe(self, event: ev.Event) -> None:
        """Record an event if it is an incident. Call before the controller handles it."""
        machines = self.fleet.machines
        match event:
            case ev.NodeJoined(node):
                detail = f"{node.gpus} x {node.gpu_type}"
                self._write(Incident.NODE_JOINED, node.id, node.kind is NodeKind.SPOT, detail)
                self.note(f"{node.id} joined ({node.kind.value})")
            case ev.NodeNoticed(node_id, deadline_s) if node_id in machines:
                left_s = deadline_s - self.clock()
                self.record(Incident.NODE_NOTICED, node_id, f"{left_s:.1f} s before")
                self.note(f"{node_id} will be taken in {left_s:.0f} s")
            case ev.NoticeCancelled(node_id) if node_id in machines:
                self.record(Incident.NOTICE_CANCELLED, node_id, "")
                self.note(f"{node_id} will not be taken after all")
            case ev.NodeLost(node_id) if node_id in machines:
                self.record(Incident.NODE_LOST, node_id, "")
                self.note(f"{node_id} is gone; nodes left: {len(machines) - 1}")
            case ev.LearnerLost(detail):
                self.record(Incident.LEARNER_LOST, "learner", detail)

    def learner_waits(self, ranks: int, *, even: bool) -> None:
        """No nodes have room for the learner; ``even``: equally many ranks on each node."""
        detail = f"for {ranks} slots of spot nodes" + (", equally many on each" if even and ranks > 1 else "")
        self._write(Incident.LEARNER_WAITS, "learner", True, detail)
        self.note(f"the learner waits {detail}")

    def learner_placed(self, places: Sequence[tuple[str, float]], ranks: int, wished: int) -> None:
        """The learner is up on these nodes, at these USD per hour, with all or some of its ranks."""
        if not places:
            return  # its nodes are gone again
        detail = ", ".join(f"{name} at ${price_usd_h:g}/h" for name, price_usd_h in places)
        if ranks < wished:
            detail += f", with {ranks} of {wished} ranks"
        self._write(Incident.LEARNER_PLACED, "learner", True, detail)
        self.note(f"the learner is on {detail}")

    def nodes_wanted(self, kind: NodeKind, text: str) -> None:
        """Why nodes of a kind are wanted, or no more; a forecast of the rest; or what has failed."""
        if kind is NodeKind.SPOT:
            self._write(Incident.SPOT_TARGET, "fleet", True, text)
            self.note(text)
        else:
            self._write(Incident.ON_DEMAND, kind.value, False, text)
            self.note(f"a node on demand: {text}")

    def node_returned(self, node: NodeId, kind: NodeKind) -> None:
        """A node is given back, after its end was announced."""
        self._write(Incident.NODE_RETURNED, node, kind is NodeKind.SPOT, "")
        self.note(f"{node} is given back")

    def record(self, kind: Incident, subject: str, detail: str) -> None:
        """Record an incident of a node, a worker or the learner."""
        machine = self.fleet.machines.get(NodeId(subject.partition("/")[0]))
        self._write(kind, subject, machine is not None and machine.node.kind is NodeKind.SPOT, detail)

    def _write(self, kind: Incident, subject: str, is_spot: bool, detail: str) -> None:
        self.ledger.record_incident(kind, subject, spot=is_spot, detail=detail, now_s=time.time())


# -- tells the cloud once no work is left on a machine that has a preemption notice ------------------------


@dataclass(slots=True)
class Drains:
    """Watches machines that end until they are empty. ``acknowledge`` is called once for each."""

    acknowledge: Callable[[NodeId], None]
    _began_s: dict[NodeId, float] = field(default_factory=dict)
    """When the work on a machine was first to stop."""
    _empty: set[NodeId] = field(default_factory=set)

    def finished(self, fleet: Fleet, now: float) -> list[tuple[NodeId, float]]:
        """Machines that have no work left, with the seconds it took to stop it. Call after every event."""
        hosts = fleet.cluster.hosts
        if not fleet.cluster.noticed and not self._began_s:
            return []
        ending = {name: each for name, each in fleet.machines.items() if each.ends_s is not None}
        self._began_s = {name: at_s for name, at_s in self._began_s.items() if name in ending}
        self._empty &= ending.keys()
        done: list[tuple[NodeId, float]] = []
        for name, machine in ending.items():
            if name in self._empty or not any(hosts[part.id].draining for part in machine.parts):
                continue
            began_s = self._began_s.setdefault(name, now)
            if fleet.is_empty(machine):
                self._empty.add(name)
                self.acknowledge(name)
                done.append((name, now - began_s))
        return done
