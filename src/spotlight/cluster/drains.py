"""Nodes that were announced to be taken: the cloud is told once nothing works on them any more."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from spotlight.scheduler.cluster.cluster import Cluster
from spotlight.scheduler.types import NodeId


@dataclass(slots=True)
class Drains:
    """Watches the controller's nodes.

    Attributes:
        acknowledge: tells the cloud of a node that it may be taken.
    """

    acknowledge: Callable[[NodeId], None]
    _noticed: set[NodeId] = field(default_factory=set)
    _draining: dict[NodeId, float] = field(default_factory=dict)
    _empty: set[NodeId] = field(default_factory=set)

    def finished(self, cluster: Cluster, now: float) -> list[tuple[NodeId, float]]:
        """Noticed nodes on which nothing works any more, and the seconds that stopping their work took.

        To be called after every event: O(noticed nodes).
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
            if not host.leaders:
                self._empty.add(node)
                self.acknowledge(node)
                done.append((node, now - began_s))
        return done
