"""Nodes that were announced to be taken: the cloud is told once nothing works on them any more."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from spotlight.scheduler.cluster.cluster import Cluster
from spotlight.scheduler.types import NodeId


@dataclass(slots=True)
class Drains:
    """Watches the controller's nodes. For the loop's thread only.

    Attributes:
        emptied: nothing works on a noticed node any more; how long stopping its work took, in seconds.
    """

    emptied: Callable[[NodeId, float], None]
    _noticed: set[NodeId] = field(default_factory=set)
    _draining: dict[NodeId, float] = field(default_factory=dict)
    _empty: set[NodeId] = field(default_factory=set)

    def look(self, cluster: Cluster, now: float) -> None:
        """After every event: O(noticed nodes), and O(nodes) where some were noticed."""
        if not cluster.noticed and not self._noticed:
            return
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
                self.emptied(node, now - began_s)
