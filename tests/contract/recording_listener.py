"""A listener to nodes of a cluster, for tests."""

from __future__ import annotations

import threading
import time

from spotlight.cluster.nodes.listing import RayNode
from spotlight_fleet.facts import NodeFacts
from spotlight_rewards.base.errors import Problem


class RecordingListener:
    """A listener that remembers what happened, and when."""

    def __init__(self) -> None:
        self.entries: list[tuple[float, str, str, object]] = []
        self._changed = threading.Condition()

    def joined(self, node: RayNode, facts: NodeFacts) -> None:
        self._put("joined", node.name, (node, facts))

    def lost(self, node: RayNode) -> None:
        self._put("lost", node.name, node)

    def noticed(self, node: RayNode, remaining_s: float, detail: str) -> None:
        self._put("noticed", node.name, remaining_s)

    def advised(self, node: RayNode) -> None:
        self._put("advised", node.name, None)

    def notice_cancelled(self, node: RayNode, detail: str) -> None:
        self._put("cancelled", node.name, detail)

    def refused(self, problem: Problem) -> None:
        self._put("refused", problem.key, problem)

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
