"""A listener to nodes of a cluster, for tests."""

from __future__ import annotations

import threading
import time

from spotlight.cluster.nodes.listing import RayNode
from spotlight.scheduler import events as ev
from spotlight_fleet.facts import NodeFacts


class RecordingListener:
    """A listener that remembers what happened, and when."""

    def __init__(self) -> None:
        self.entries: list[tuple[float, str, str, object]] = []
        self._changed = threading.Condition()

    def joined(self, node: RayNode, facts: NodeFacts) -> None:
        self._put("joined", node.name, (node, facts))

    def happened(self, event: ev.Event) -> None:
        match event:
            case ev.NodeLost(node):
                self._put("lost", node, None)
            case ev.NodeNoticed(node, deadline_s):
                self._put("noticed", node, deadline_s - time.monotonic())
            case ev.NodeAdvised(node):
                self._put("advised", node, None)
            case ev.NoticeCancelled(node):
                self._put("cancelled", node, None)

    def told(self, text: str) -> None:
        self._put("told", text.partition(":")[0], text)

    def _put(self, what: str, name: str, value: object) -> None:
        with self._changed:
            self.entries.append((time.monotonic(), what, name, value))
            self._changed.notify_all()

    def wait(self, what: str, name: str, timeout_s: float = 120.0) -> tuple[float, object]:
        """When it happened, and with what; forgets it."""

        def found() -> tuple[float, str, str, object] | None:
            return next((entry for entry in self.entries if entry[1:3] == (what, name)), None)

        with self._changed:
            assert self._changed.wait_for(lambda: found() is not None, timeout_s), (
                f"no {what} of {name}: {self.entries}"
            )
            entry = found()
            assert entry is not None
            self.entries.remove(entry)
        return entry[0], entry[3]
