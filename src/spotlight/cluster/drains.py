"""Tells the cloud once no work is left on a node that has a preemption notice."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from spotlight.scheduler.cluster.cluster import Cluster
from spotlight.scheduler.types import NodeId


@dataclass(slots=True)
class Drains:
    """Watches noticed nodes until they are empty.

    Attributes:
        parts: the controller's nodes on the machine of one; it is acknowledged when all are empty.
    """

    acknowledge: Callable[[NodeId], None]
    parts: Callable[[NodeId], Sequence[NodeId]]
    _noticed: set[NodeId] = field(default_factory=set)
    _draining: dict[NodeId, float] = field(default_factory=dict)
    _empty: set[NodeId] = field(default_factory=set)

    def finished(self, cluster: Cluster, now: float) -> list[tuple[NodeId, float]]:
        """Noticed nodes that have no work left, with the seconds it took to stop their work.

        Call after every event. O(noticed nodes).
        """
        done: list[tuple[NodeId, float]] = []
        if not cluster.noticed and not self._noticed:
            return done
        gone = self._noticed - cluster.noticed
        for node in gone:
            self._draining.pop(node, None)
            self._empty.discard(node)
        self._noticed = set(cluster.noticed)
        for node in self._noticed - self._empty:
            host = cluster.hosts[node]
            if not host.draining:
                continue
            began_s = self._draining.setdefault(node, now)
            if not (host.leaders or host.node.trains):
                self._empty.add(node)
                if self._empty.issuperset(self.parts(node)):
                    self.acknowledge(node)
                done.append((node, now - began_s))
        return done
