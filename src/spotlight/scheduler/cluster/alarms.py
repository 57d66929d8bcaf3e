"""Deadlines of things that may not happen: a heap, with cancelling by key.

A key has at most one alarm; setting it again replaces the older.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass, field
from typing import Generic, TypeVar

Key = TypeVar("Key")


@dataclass(slots=True)
class Alarms(Generic[Key]):
    """Times in controller seconds. Cancelled alarms stay in the heap until they would ring."""

    _heap: list[tuple[float, int, Key]] = field(default_factory=list)
    _current: dict[Key, int] = field(default_factory=dict)
    _set: int = 0

    def set(self, key: Key, at_s: float) -> None:
        """Ring ``key`` at ``at_s``."""
        self._set += 1
        self._current[key] = self._set
        heapq.heappush(self._heap, (at_s, self._set, key))

    def cancel(self, key: Key) -> None:
        """Do not ring ``key``."""
        self._current.pop(key, None)

    def pop(self, now: float) -> Key | None:
        """The first key due by ``now``; it rings once."""
        while self._heap and self._heap[0][0] <= now:
            _, number, key = heapq.heappop(self._heap)
            if self._current.get(key) == number:
                del self._current[key]
                return key
        return None

    @property
    def next_s(self) -> float | None:
        """When the next alarm rings."""
        while self._heap and self._current.get(self._heap[0][2]) != self._heap[0][1]:
            heapq.heappop(self._heap)
        return self._heap[0][0] if self._heap else None

    def pending(self) -> list[Key]:
        """Keys whose alarm is set."""
        return list(self._current)
