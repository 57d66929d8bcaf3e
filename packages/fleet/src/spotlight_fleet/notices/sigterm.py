"""SIGTERM as a notice: Kubernetes and SLURM send it, with a known grace period.

The handler only notes the time and writes a byte to a pipe, so it is safe at any moment and works with the
watcher's loop in another thread. Only the main thread can set it. While set, SIGTERM does not end the
process: the drain does, or SIGKILL after the grace period.
"""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import FrameType

from spotlight_fleet.notices.notice import NoticeError, NoticeReading, PendingNotice

GRACE_S = 30.0
"""Default terminationGracePeriodSeconds of Kubernetes and KillWait of SLURM."""


@dataclass(slots=True)
class SigtermNotices:
    """Waits for the signal; created by :func:`catching_sigterm`.

    Attributes:
        grace_s: from SIGTERM to SIGKILL.
    """

    grace_s: float
    clock: Callable[[], float]
    _pipe: int
    name: str = field(default="sigterm", init=False)
    period_s: float = field(default=0.0, init=False)
    came_s: float | None = field(default=None, init=False)
    _reported: bool = field(default=False, init=False)

    async def read(self) -> NoticeReading | None:
        """See :class:`NoticeSource`; waits for the signal and reports it once."""
        if self._reported:
            return None
        loop, came = asyncio.get_running_loop(), asyncio.Event()
        loop.add_reader(self._pipe, came.set)
        try:
            await came.wait()
        finally:
            loop.remove_reader(self._pipe)
        self._reported = True
        assert self.came_s is not None
        remaining_s = max(0.0, self.came_s + self.grace_s - self.clock())
        detail = f"SIGTERM, SIGKILL after {self.grace_s:g} s"
        return NoticeReading((PendingNotice("sigterm", "", remaining_s, detail),))

    async def acknowledge(self) -> bool:
        """Nothing to report to: the process ends by itself."""
        return False


@contextmanager
def catching_sigterm(
    grace_s: float = GRACE_S, clock: Callable[[], float] = time.monotonic
) -> Iterator[SigtermNotices]:
    """Turn SIGTERM into a notice within the block, then restore the previous handler.

    Raises:
        NoticeError: a grace period below 0, or not in the main thread.
    """
    if not 0 <= grace_s < float("inf"):
        raise NoticeError(f"grace period {grace_s!r} s; expected a number of seconds of at least 0")
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    source = SigtermNotices(grace_s, clock, reading)

    def note(signal_number: int, frame: FrameType | None) -> None:
        if source.came_s is None:  # Kubernetes and SLURM may resend it
            source.came_s = clock()
            os.write(writing, b"!")

    try:
        former = signal.signal(signal.SIGTERM, note)
    except ValueError:
        os.close(reading)
        os.close(writing)
        raise NoticeError(
            "SIGTERM is caught in the main thread only: enter catching_sigterm() there and hand on the source"
        ) from None
    try:
        yield source
    finally:
        signal.signal(signal.SIGTERM, former)
        os.close(reading)
        os.close(writing)
