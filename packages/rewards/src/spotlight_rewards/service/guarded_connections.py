"""Connections that nobody can use up: for the servers of the packages, on uvicorn.

Who connects and sends nothing, sends half a request, or does not read what it is sent, is cut off after some
seconds, and at once where others need the place: a new connection takes that of the one that has been waited
for longest. One that is being answered is never cut off for another.
"""

from __future__ import annotations

import asyncio
import time
from typing import Any

import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.h11_impl import H11Protocol

CONNECTIONS_MAX = 400
"""Below the 1024 files that a process may usually have open."""
SILENT_S = 10.0
"""From connecting, or from the last answer, to the whole head of a request, and then without a byte."""
UNREAD_S = 30.0
READ_BYTES_S = 4000.0
"""Who reads at least so much of what waits to be sent has a slow link, and goes on."""


def guarded(app: ASGIApp, **settings: Any) -> uvicorn.Config:
    """How to serve ``app``; ``settings`` are uvicorn's."""
    # Addresses as the socket has them: a header of that name may be anybody's, and guesses are counted by it.
    return uvicorn.Config(
        app, http=GuardedConnection, ws="none", proxy_headers=False, log_level="warning", **settings
    )


class GuardedConnection(H11Protocol):
    """One connection."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Take a place."""
        super().connection_made(transport)
        self._unread: asyncio.TimerHandle | None = None
        self._silent: asyncio.TimerHandle | None = None
        self._wait()
        if len(self.connections) > CONNECTIONS_MAX:
            others = [each for each in self.connections if isinstance(each, GuardedConnection)]
            idle = [each for each in others if each.is_waited_for and each is not self]
            last = min(idle, key=lambda each: each.since, default=self)
            self.connections.discard(last)
            last.transport.abort()

    @property
    def is_waited_for(self) -> bool:
        """Whether it is its turn to send."""
        return self.cycle is None or self.cycle.response_complete or self.cycle.more_body

    def data_received(self, data: bytes) -> None:
        """Take bytes; those of a body gain time, those of a head do not."""
        super().data_received(data)
        if self.cycle is not None and not self.cycle.response_complete:
            self._wait()

    def on_response_complete(self) -> None:
        """Wait for the next request."""
        self._wait()
        super().on_response_complete()

    def pause_writing(self) -> None:
        """Note that what was sent is not read."""
        super().pause_writing()
        self._wait_for_reader()

    def resume_writing(self) -> None:
        """Note that it is read."""
        super().resume_writing()
        if self._unread is not None:
            self._unread.cancel()

    def connection_lost(self, exc: Exception | None) -> None:
        """Leave no timers."""
        for timer in filter(None, (self._silent, self._unread)):
            timer.cancel()
        super().connection_lost(exc)

    def _wait(self) -> None:
        self.since = time.monotonic()
        if self._silent is not None:
            self._silent.cancel()
        left_bytes = self._left_bytes()
        seconds = UNREAD_S if left_bytes else SILENT_S
        self._silent = self.loop.call_later(seconds, self._cut_off, left_bytes)

    def _cut_off(self, left_bytes: int) -> None:
        if self.flow.read_paused or self._reads(left_bytes):
            self._wait()  # it is we who take no more, or a slow link
        elif self.is_waited_for:
            self.transport.abort()

    def _wait_for_reader(self) -> None:
        self._unread = self.loop.call_later(UNREAD_S, self._cut_off_unread, self._left_bytes())

    def _cut_off_unread(self, left_bytes: int) -> None:
        if self._reads(left_bytes):
            self._wait_for_reader()
        else:
            self.transport.abort()

    def _reads(self, left_bytes: int) -> bool:
        return left_bytes - self._left_bytes() >= READ_BYTES_S * UNREAD_S

    def _left_bytes(self) -> int:
        return self.transport.get_write_buffer_size()
