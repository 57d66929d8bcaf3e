"""What befalls a cluster, for people and for the ledger."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass

from spotlight.cluster.loop import Clock
from spotlight.runtime.observer import Observer
from spotlight.scheduler import events as ev
from spotlight.scheduler.cluster.members import Host
from spotlight.scheduler.types import NodeId, NodeKind
from spotlight.store.ledger.ledger_schema import Incident
from spotlight.store.ledger.sqlite_ledger import SqliteLedger


@dataclass(frozen=True, slots=True)
class Incidents:
    """Writes and tells. ``hosts`` are the controller's nodes, as they were before the event."""

    clock: Clock
    observer: Observer

    def tell(self, event: ev.Event, hosts: Mapping[NodeId, Host], ledger: SqliteLedger) -> None:
        """Of an event, if it is one of those that befall somebody."""
        note = self.observer.note
        match event:
            case ev.NodeJoined(node):
                is_spot = node.kind is NodeKind.SPOT
                _write(ledger, Incident.NODE_JOINED, node.id, is_spot, f"{node.gpus} x {node.gpu_type}")
                note(f"{node.id} joined ({node.kind.value})")
            case ev.NodeNoticed(node_id, deadline_s) if node_id in hosts:
                left_s = deadline_s - self.clock()
                self.write(Incident.NODE_NOTICED, node_id, f"{left_s:.1f} s before", hosts, ledger)
                note(f"{node_id} will be taken in {left_s:.0f} s")
            case ev.NoticeCancelled(node_id) if node_id in hosts:
                self.write(Incident.NOTICE_CANCELLED, node_id, "", hosts, ledger)
                note(f"{node_id} will not be taken after all")
            case ev.NodeLost(node_id) if node_id in hosts:
                self.write(Incident.NODE_LOST, node_id, "", hosts, ledger)
                note(f"{node_id} is gone; {len(hosts) - 1} nodes are left")
            case ev.LearnerLost(detail):
                self.write(Incident.LEARNER_LOST, "learner", detail, hosts, ledger)

    def write(
        self, kind: Incident, subject: str, detail: str, hosts: Mapping[NodeId, Host], ledger: SqliteLedger
    ) -> None:
        """Of a node, a worker or the learner, into the ledger."""
        host = hosts.get(NodeId(subject)) or hosts.get(NodeId(subject.rpartition("/")[0]))
        _write(ledger, kind, subject, host is not None and host.node.kind is NodeKind.SPOT, detail)


def _write(ledger: SqliteLedger, kind: Incident, subject: str, is_spot: bool, detail: str) -> None:
    ledger.record_incident(kind, subject, spot=is_spot, detail=detail, now_s=time.time())
