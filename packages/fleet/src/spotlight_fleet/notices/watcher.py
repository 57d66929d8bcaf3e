"""Watches this node's notice sources and reports changes. I/O.

Asyncio, not threads: stopping cancels hanging requests, and time-outs bound whole calls.

Each source has its own task. A failing source is retried with bounded, jittered back-off while its last
reading stands: silence does not cancel a notice. The same trouble is logged at most once per hour.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from spotlight_fleet.notices.board import NoticeBoard
from spotlight_fleet.notices.notice import MetadataError, Notice, NoticeError, NoticeSource, NoticeTrouble

LOG_AGAIN_S = 3600.0

log = logging.getLogger("spotlight.fleet.notices")


@dataclass(frozen=True, slots=True)
class Backoff:
    """Pauses after failures: doubled from ``first_s`` up to ``max_s``, then shortened by up to half.

    ``max_s`` is below the shortest notice (30 s), so that a notice after an outage is still seen in time.
    """

    first_s: float = 1.0
    max_s: float = 12.0

    def pause_s(self, failures: int, rng: random.Random) -> float:
        """Seconds to wait after ``failures`` (1 or more) in a row."""
        longest = min(self.max_s, self.first_s * 2.0 ** min(failures - 1, 30))
        return longest * rng.uniform(0.5, 1.0)


@dataclass(slots=True)
class _SourceHealth:
    source: NoticeSource
    warn: Callable[[str], None] | None
    failures: int = 0
    trouble: NoticeTrouble | None = None
    logged: bool = False
    _said_s: dict[NoticeTrouble, float] = field(default_factory=dict)

    def failed(self, error: MetadataError, now_s: float) -> None:
        if error.trouble is self.trouble:
            return
        self.trouble = error.trouble
        if now_s - self._said_s.get(error.trouble, -LOG_AGAIN_S) < LOG_AGAIN_S:
            return
        self._said_s[error.trouble] = now_s
        self.logged = True
        name, trouble = self.source.name, error.trouble
        log.warning("%s: metadata service %s, preemptions may come unannounced: %s", name, trouble, error)
        if self.warn is not None:
            self.warn(f"{name}: metadata service {trouble}: {error}")

    def answered(self) -> None:
        if self.logged:
            log.warning("%s: metadata service answers; notices are watched", self.source.name)
        self.trouble, self.logged = None, False


class NoticeWatcher:
    """Watches all notice sources of this node.

    Args:
        rng: jitter of the pauses.
        clock: monotonic seconds; the clock of deadlines.
        warn: called with why preemptions may come unannounced, besides the log.

    Raises:
        NoticeError: no sources, or two with the same name.
    """

    def __init__(
        self,
        sources: Sequence[NoticeSource],
        rng: random.Random,
        backoff: Backoff | None = None,
        clock: Callable[[], float] = time.monotonic,
        warn: Callable[[str], None] | None = None,
    ) -> None:
        names = [source.name for source in sources]
        if not names or len(set(names)) < len(names):
            raise NoticeError(f"sources {names}; expected at least one, each once")
        self._sources = tuple(sources)
        self._rng = rng
        self._backoff = backoff or Backoff()
        self._clock = clock
        self._warn = warn
        self._board = NoticeBoard()

    async def run(self, on_notice: Callable[[Notice], None]) -> None:
        """Call ``on_notice`` with every notice, in order, until cancelled or all sources end.

        An exception from ``on_notice`` ends the watch and propagates.
        """
        try:
            async with asyncio.TaskGroup() as tasks:
                for source in self._sources:
                    tasks.create_task(self._follow(source, on_notice), name=f"notices of {source.name}")
        except ExceptionGroup as group:
            raise group.exceptions[0] from None  # the others were cancelled, so there is exactly one

    async def acknowledge(self) -> bool:
        """Report that this node is drained; it may vanish at once. False: no cloud waits for this node alone.

        Raises:
            MetadataError: a cloud refused the acknowledgement.
        """
        return any([await source.acknowledge() for source in self._sources])

    async def _follow(self, source: NoticeSource, on_notice: Callable[[Notice], None]) -> None:
        health = _SourceHealth(source, self._warn)
        while True:
            began_s = self._clock()
            try:
                reading = await source.read()
            except MetadataError as error:
                health.failures += 1
                health.failed(error, self._clock())
                pause_s = self._backoff.pause_s(health.failures, self._rng)
            else:
                if reading is None:
                    return
                health.failures = 0
                if reading.trouble is None:
                    health.answered()
                else:
                    health.failed(reading.trouble, self._clock())
                for notice in self._board.update(source.name, reading, self._clock()):
                    on_notice(notice)
                pause_s = began_s + source.period_s - self._clock()
            await asyncio.sleep(max(0.0, pause_s))


async def ask_once(source: NoticeSource, clock: Callable[[], float] = time.monotonic) -> list[Notice]:
    """Read once. Raises :class:`MetadataError`, also for a partial failure."""
    reading = await source.read()
    if reading is None:
        return []
    if reading.trouble is not None:
        raise reading.trouble
    return NoticeBoard().update(source.name, reading, clock())
