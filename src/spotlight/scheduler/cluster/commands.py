"""Alarms, and commands to workers that must be answered: resent on timeout, and finally given up.

Invariant: every open command has an alarm, so no wait is unbounded.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Generic, TypeAlias, TypeVar

from spotlight.scheduler.effects import FormGroup, PullWeights, StartWorker, StopGroup

Name = TypeVar("Name")


@dataclass(slots=True)
class Alarms(Generic[Name]):
    """Deadlines in controller seconds, at most one per key.

    Equal ones ring in the order they were set; one that was postponed keeps its place from before that.
    Postponing and cancelling are O(1): the heap entry is moved or dropped when it comes up.
    """

    _heap: list[tuple[float, int, Name]] = field(default_factory=list)
    _due: dict[Name, tuple[float, int]] = field(default_factory=dict)
    _set: int = 0

    def set(self, key: Name, at_s: float) -> None:
        """Set, postpone or replace the alarm of ``key``."""
        due = self._due.get(key)
        if due is not None and at_s >= due[0]:
            self._due[key] = at_s, due[1]
            return
        self._set += 1
        self._due[key] = at_s, self._set
        heapq.heappush(self._heap, (at_s, self._set, key))

    def cancel(self, key: Name) -> None:
        """Cancel the alarm of ``key``, if any."""
        self._due.pop(key, None)

    def pop(self, now: float) -> Name | None:
        """Remove and return the first key due by ``now``."""
        at_s = self.next_s
        if at_s is None or at_s > now:
            return None
        key = heapq.heappop(self._heap)[2]
        del self._due[key]
        return key

    @property
    def next_s(self) -> float | None:
        """When the next alarm rings; None without alarms."""
        heap = self._heap
        while heap:
            at_s, number, key = heap[0]
            due = self._due.get(key)
            if due is None or due[1] != number:
                heapq.heappop(heap)
            elif due[0] > at_s:
                heapq.heapreplace(heap, (due[0], number, key))
            else:
                return at_s
        return None

    def clear(self) -> None:
        """Cancel all."""
        self._heap.clear()
        self._due.clear()

    def pending(self) -> list[Name]:
        """Keys with an alarm."""
        return list(self._due)


REPEATS = 2
"""How often a command is resent at least before it is given up."""

Key: TypeAlias = tuple[str, str]
"""("start" | "pull", worker) or ("form" | "stop", leader)."""

CommandEffect: TypeAlias = StartWorker | PullWeights | FormGroup | StopGroup


@dataclass(slots=True)
class OpenCommand:
    """An unanswered command, resent at ``due_s``, and not given up before ``until_s``."""

    effect: CommandEffect
    patience_s: float
    due_s: float
    until_s: float
    repeats: int = 0


@dataclass(slots=True)
class Commands:
    """Unanswered commands, at most one per key."""

    _open: dict[Key, OpenCommand] = field(default_factory=dict)
    _alarms: Alarms[Key] = field(default_factory=Alarms)

    def send(
        self, key: Key, effect: CommandEffect, patience_s: float, now: float, busy_s: float = 0.0
    ) -> None:
        """Open a command; it replaces an older one of the same key.

        Args:
            patience_s: until it is resent.
            busy_s: it is not given up before, however often it was resent.
        """
        self._open[key] = OpenCommand(effect, patience_s, now + patience_s, now + busy_s)
        self._alarms.set(key, now + patience_s)

    def amend(self, key: Key, effect: CommandEffect) -> None:
        """Resend ``effect`` instead of the original from now on."""
        self._open[key].effect = effect

    def inherit(self, key: Key, earlier: OpenCommand) -> None:
        """A command took the place of ``earlier``: the time that went by without an answer counts."""
        command = self._open[key]
        command.repeats, command.due_s = earlier.repeats, min(command.due_s, earlier.due_s)
        command.until_s = min(command.until_s, earlier.until_s)
        self._alarms.set(key, command.due_s)

    def answered_earlier(self, key: Key) -> None:
        """The worker answered an earlier command, if this one is open: its resends count from 0 again."""
        if (command := self._open.get(key)) is not None:
            command.repeats = 0

    def hurry(self, key: Key) -> None:
        """Give a command up once it was resent often enough."""
        self._open[key].until_s = -math.inf

    def done(self, key: Key) -> OpenCommand | None:
        """Close and return a command that was answered or no longer matters."""
        if (command := self._open.pop(key, None)) is not None:
            self._alarms.cancel(key)
        return command

    def overdue(self, now: float) -> Iterator[tuple[CommandEffect, bool]]:
        """Timed-out commands, each with whether it is given up (closed) rather than to be resent."""
        while (key := self._alarms.pop(now)) is not None:
            command = self._open[key]
            command.repeats += 1
            if command.repeats > REPEATS and now >= command.until_s:
                del self._open[key]
                yield command.effect, True
            else:
                command.due_s = now + command.patience_s
                self._alarms.set(key, command.due_s)
                yield command.effect, False

    def __contains__(self, key: Key) -> bool:
        return key in self._open

    @property
    def next_s(self) -> float | None:
        """When :meth:`overdue` next has something; None if never."""
        return self._alarms.next_s

    def check(self) -> None:
        """Assert the invariant above."""
        assert set(self._open) == set(self._alarms.pending()), "a command would be awaited forever"
