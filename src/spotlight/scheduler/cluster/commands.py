"""Commands to workers that must be answered: sent again when their time is up, and given up at last.

Invariant: every open command has an alarm, so nobody is waited for without an end.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Generic, TypeAlias, TypeVar

from spotlight.scheduler.effects import FormGroup, PullWeights, StartWorker, StopGroup

Name = TypeVar("Name")


@dataclass(slots=True)
class Alarms(Generic[Name]):
    """Deadlines of things that may not happen, in controller seconds; a key has at most one.

    Cancelled alarms stay in the heap until they would ring.
    """

    _heap: list[tuple[float, int, Name]] = field(default_factory=list)
    _current: dict[Name, int] = field(default_factory=dict)
    _set: int = 0

    def set(self, key: Name, at_s: float) -> None:
        """Ring ``key`` at ``at_s``."""
        self._set += 1
        self._current[key] = self._set
        heapq.heappush(self._heap, (at_s, self._set, key))

    def cancel(self, key: Name) -> None:
        """Do not ring ``key``."""
        self._current.pop(key, None)

    def pop(self, now: float) -> Name | None:
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

    def pending(self) -> list[Name]:
        """Keys whose alarm is set."""
        return list(self._current)


REPEATS = 2
"""A command is sent this many times more before it is given up."""

Key: TypeAlias = tuple[str, str]
"""("start" | "pull", worker) or ("form" | "stop", leader)."""

CommandEffect: TypeAlias = StartWorker | PullWeights | FormGroup | StopGroup


@dataclass(slots=True)
class _OpenCommand:
    effect: CommandEffect
    patience_s: float
    repeats: int = 0


@dataclass(slots=True)
class Commands:
    """Commands sent and not answered, at most one a key."""

    _open: dict[Key, _OpenCommand] = field(default_factory=dict)
    _alarms: Alarms[Key] = field(default_factory=Alarms)

    def send(self, key: Key, effect: CommandEffect, patience_s: float, now: float) -> None:
        """A command is on its way; it replaces an older one of the same key."""
        self._open[key] = _OpenCommand(effect, patience_s)
        self._alarms.set(key, now + patience_s)

    def amend(self, key: Key, effect: CommandEffect) -> None:
        """Repeat ``effect`` from now on, and not what was sent first."""
        self._open[key].effect = effect

    def done(self, key: Key) -> None:
        """A command was answered, or does not matter any more."""
        if self._open.pop(key, None) is not None:
            self._alarms.cancel(key)

    def overdue(self, now: float) -> Iterator[tuple[CommandEffect, bool]]:
        """Commands whose time is up, and whether they are given up (closed) or have to be sent again."""
        while (key := self._alarms.pop(now)) is not None:
            command = self._open[key]
            command.repeats += 1
            if command.repeats > REPEATS:
                del self._open[key]
                yield command.effect, True
            else:
                self._alarms.set(key, now + command.patience_s)
                yield command.effect, False

    def __contains__(self, key: Key) -> bool:
        return key in self._open

    @property
    def next_s(self) -> float | None:
        """When :meth:`overdue` has something."""
        return self._alarms.next_s

    def check(self) -> None:
        """Assert the invariant of the module's docstring."""
        assert set(self._open) == set(self._alarms.pending()), "a command would be awaited forever"
