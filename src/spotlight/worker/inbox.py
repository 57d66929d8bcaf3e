"""Commands to a worker, from any thread to the one that works."""

from __future__ import annotations

import queue

from spotlight.worker.interfaces import Command


class Inbox:
    """First in, first out."""

    def __init__(self) -> None:
        self._waiting: queue.SimpleQueue[Command] = queue.SimpleQueue()

    def put(self, command: Command) -> None:
        """From any thread; returns at once."""
        self._waiting.put(command)

    def take(self, timeout_s: float | None) -> list[Command]:
        """All commands that are there; when there is none, wait for one.

        Args:
            timeout_s: how long to wait at most; None is without an end.
        """
        taken: list[Command] = []
        try:
            taken.append(
                self._waiting.get(timeout=timeout_s) if timeout_s != 0 else self._waiting.get_nowait()
            )
            while True:
                taken.append(self._waiting.get_nowait())
        except queue.Empty:
            return taken
