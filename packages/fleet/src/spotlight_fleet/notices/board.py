"""Merges readings of all sources into notices for this node. Pure: no I/O, no clock.

Invariant: the current notice is the earliest pending announcement. An announcement that is read again, even
with a slightly different remaining time, causes no new notice.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from spotlight_fleet.notices.notice import Cancelled, Notice, Noticed, NoticeReading, Rebalance


@dataclass(frozen=True, slots=True)
class _Announcement:
    """An announcement as first read."""

    source: str
    key: str
    stamp: str
    deadline_s: float
    detail: str


@dataclass(slots=True)
class NoticeBoard:
    """The last reading of every source."""

    _held: dict[str, tuple[_Announcement, ...]] = field(default_factory=dict)
    _announced: _Announcement | None = None
    _advised: set[tuple[str, str]] = field(default_factory=set)

    def update(self, source: str, reading: NoticeReading, now_s: float) -> list[Notice]:
        """Store a reading of ``source`` at ``now_s`` (watcher's clock); returns the resulting notices."""
        before = {(held.key, held.stamp): held for held in self._held.get(source, ())}
        self._held[source] = tuple(
            # Seen before: the deadline computed first stands, so a jittering clock causes no new notice.
            before.get((item.key, item.stamp))
            or _Announcement(source, item.key, item.stamp, now_s + item.remaining_s, item.detail)
            for item in reading.pending
        )
        return [*self._advice(source, reading), *self._change()]

    def _advice(self, source: str, reading: NoticeReading) -> Iterator[Notice]:
        if reading.rebalance and (source, reading.rebalance) not in self._advised:
            self._advised.add((source, reading.rebalance))
            yield Rebalance(source, reading.rebalance)

    def _change(self) -> Iterator[Notice]:
        every = [held for group in self._held.values() for held in group]
        earliest = min(every, key=lambda held: held.deadline_s, default=None)
        announced, self._announced = self._announced, earliest
        if announced == earliest:
            return
        if announced is not None and (earliest is None or earliest.deadline_s > announced.deadline_s):
            yield Cancelled(announced.source, announced.detail)
        if earliest is not None:
            yield Noticed(earliest.source, earliest.deadline_s, earliest.detail)
