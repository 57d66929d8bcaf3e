"""What reaches the head's loop from other threads, and the deadlines of its remote calls.

The loop never blocks on a remote call: :meth:`Calls.send` returns at once, and the answer, the failure or the
end of patience comes back as exactly one function call in the loop's own thread.
"""

from __future__ import annotations

import heapq
import queue
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import count
from typing import Any

import ray

Answer = Callable[[Any], None]
Failure = Callable[[Exception], None]


class NoAnswerError(TimeoutError):
    """A remote call was not answered by its deadline."""


@dataclass(slots=True)
class Inbox:
    """Functions for the loop's thread to call, in the order in which they came."""

    _items: queue.SimpleQueue[Callable[[], None]] = field(default_factory=queue.SimpleQueue)

    def post(self, then: Callable[[], None]) -> None:
        """From any thread."""
        self._items.put(then)

    def take(self, timeout_s: float | None) -> Callable[[], None] | None:
        """The next one; None when none came in time."""
        try:
            return self._items.get(timeout=timeout_s)
        except queue.Empty:
            return None


@dataclass(slots=True)
class _Call:
    """An open call; closed by whatever comes first."""

    what: str
    answered: Answer
    failed: Failure
    reference: ray.ObjectRef[Any] | None
    open: bool = True


@dataclass(slots=True)
class Calls:
    """Open remote calls. All methods but none of the callbacks' sources belong to the loop's thread."""

    inbox: Inbox
    clock: Callable[[], float] = time.monotonic
    _deadlines: list[tuple[float, int, _Call]] = field(default_factory=list)
    _numbers: count[int] = field(default_factory=count)

    def send(
        self,
        reference: ray.ObjectRef[Any],
        what: str,
        deadline_s: float,
        answered: Answer,
        failed: Failure,
    ) -> None:
        """Watch a call that was just made.

        Args:
            what: for the error's text.
            answered: takes the value.
            failed: takes Ray's error, the remote function's own, or :class:`NoAnswerError`.
        """
        call = _Call(what, answered, failed, reference)
        heapq.heappush(self._deadlines, (self.clock() + deadline_s, next(self._numbers), call))
        reference.future().add_done_callback(lambda future: self.inbox.post(lambda: _close(call, future)))

    def expire(self) -> None:
        """Fail the calls whose time is up."""
        now = self.clock()
        while self._deadlines and (self._deadlines[0][0] <= now or not self._deadlines[0][2].open):
            deadline_s, _, call = heapq.heappop(self._deadlines)
            if call.open:
                call.open, call.reference = False, None
                call.failed(
                    NoAnswerError(f"{call.what}: no answer in time (due {now - deadline_s:.1f} s ago)")
                )

    @property
    def next_s(self) -> float | None:
        """When :meth:`expire` has something to do, on ``clock``."""
        while self._deadlines and not self._deadlines[0][2].open:
            heapq.heappop(self._deadlines)
        return self._deadlines[0][0] if self._deadlines else None


def _close(call: _Call, future: Any) -> None:
    if not call.open:
        return
    call.open, call.reference = False, None
    error = future.exception()
    if error is None:
        call.answered(future.result())
    elif isinstance(error, Exception):
        call.failed(error)
    else:
        raise error
