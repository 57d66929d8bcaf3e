"""Carries notices from a node to the head: numbered, so that a lost answer can be asked for again. No Ray.

Deadlines travel as seconds remaining, computed when sent, since machines' clocks differ.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import assert_never

from spotlight_fleet.notices.notice import Cancelled, Notice, Noticed, Rebalance


class NoticeUpdate(StrEnum):
    """Kind of a message."""

    NOTICED = "noticed"
    CANCELLED = "cancelled"
    REBALANCE = "rebalance"
    UNWATCHED = "unwatched"
    """Nothing watches for notices on this node (any more); ``detail`` says why."""


@dataclass(frozen=True, slots=True)
class Message:
    """One message.

    Attributes:
        number: counts from 1 within an agent's life.
        remaining_s: until preemption (``NOTICED``), when the message was sent.
    """

    number: int
    update: NoticeUpdate
    detail: str
    remaining_s: float = 0.0


@dataclass(slots=True)
class Outbox:
    """Stores a node's messages; one thread puts, others wait."""

    clock: Callable[[], float] = time.monotonic
    _kept: list[Notice | str] = field(default_factory=list)
    _changed: threading.Condition = field(default_factory=threading.Condition)

    def put(self, item: Notice | str) -> None:
        """Add a notice, or the reason why nothing is watched."""
        with self._changed:
            self._kept.append(item)
            self._changed.notify_all()

    def after(self, number: int, timeout_s: float) -> list[dict[str, object]]:
        """Messages after ``number`` as plain values; waits up to ``timeout_s`` for the first."""
        with self._changed:
            self._changed.wait_for(lambda: len(self._kept) > number, timeout_s)
            now_s = self.clock()
            return [
                _plain(index + 1, item, now_s)
                for index, item in enumerate(self._kept[number:], start=number)
            ]  # fmt: skip


def read_messages(values: Sequence[Mapping[str, object]]) -> list[Message]:
    """Parse plain values; content unknown to this version is dropped."""
    return [
        Message(
            int(str(item["number"])),
            NoticeUpdate(str(item["update"])),
            str(item["detail"]),
            float(str(item["remaining_s"])),
        )
        for item in values
        if item["update"] in set(NoticeUpdate)
    ]


def _plain(number: int, item: Notice | str, now_s: float) -> dict[str, object]:
    remaining_s = 0.0
    match item:
        case Noticed():
            update, detail, remaining_s = NoticeUpdate.NOTICED, item.detail, item.remaining_s(now_s)
        case Cancelled():
            update, detail = NoticeUpdate.CANCELLED, item.detail
        case Rebalance():
            update, detail = NoticeUpdate.REBALANCE, item.detail
        case str():
            update, detail = NoticeUpdate.UNWATCHED, item
        case _:
            assert_never(item)
    return {"number": number, "update": str(update), "detail": detail, "remaining_s": remaining_s}
