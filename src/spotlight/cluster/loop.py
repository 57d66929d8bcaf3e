"""The head's loop: functions to call, in one thread, soon or later; and remote calls with deadlines.

The loop never blocks on a remote call: :meth:`Calls.send` returns at once, and the answer, the failure or the
end of patience comes back as exactly one function call in the loop's own thread.
"""

from __future__ import annotations

import heapq
import queue
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from typing import Any

Clock = Callable[[], float]

STANDSTILL_S, GRACE_S = 1.0, 2.0
"""A turn that ends so much later than it should was a standstill, after which timers wait so long."""


class NoAnswerError(TimeoutError):
    """A remote call was not answered by its deadline."""


@dataclass(slots=True, eq=False)
class Timer:
    """A call that was put off; :meth:`cancel` has it not made."""

    _call: Callable[[], object] | None

    def cancel(self) -> None:
        """Nothing happens when it was made already."""
        self._call = None

    def ring(self) -> None:
        """Make the call, unless it was cancelled."""
        call, self._call = self._call, None
        if call is not None:
            call()

    @property
    def pending(self) -> bool:
        """Whether the call is still to be made."""
        return self._call is not None


@dataclass(slots=True)
class Loop:
    """See the module's docstring.

    Attributes:
        clock: seconds, never set back.
    """

    clock: Clock = time.monotonic
    _items: queue.SimpleQueue[Callable[[], object]] = field(default_factory=queue.SimpleQueue)
    _timers: list[tuple[float, int, Timer]] = field(default_factory=list)
    _numbers: count[int] = field(default_factory=count)
    _held_until_s: float = float("-inf")

    def call_soon_threadsafe(self, callback: Callable[..., object], /, *args: Any) -> None:
        """From any thread; calls are made in the order in which they came."""
        self._items.put(partial(callback, *args))

    def call_later(self, delay: float, callback: Callable[..., object], /, *args: Any) -> Timer:
        """From the loop's thread: call after so many seconds."""
        timer = Timer(partial(callback, *args))
        heapq.heappush(self._timers, (self.clock() + delay, next(self._numbers), timer))
        return timer

    def turn(self, until_s: float) -> None:
        """Make the calls that are due; wait for one, but not beyond ``until_s`` on the clock.

        What others have called comes before the timers: an answer that is there beats its own deadline. After
        a standstill (a stopped process, a long call) timers wait a little: so did everybody's answers.
        """
        while self._timers and not self._timers[0][2].pending:
            heapq.heappop(self._timers)
        if self._timers:
            until_s = min(until_s, max(self._timers[0][0], self._held_until_s))
        began_s = self.clock()
        with suppress(queue.Empty):
            self._items.get(timeout=max(0.0, until_s - began_s))()
            for _ in range(self._items.qsize()):
                self._items.get_nowait()()
        now = self.clock()
        if now > max(until_s, began_s) + STANDSTILL_S:
            self._held_until_s = now + GRACE_S
        while self._timers and self._timers[0][0] <= now and now >= self._held_until_s:
            heapq.heappop(self._timers)[2].ring()


@dataclass(slots=True)
class _Call:
    """An open call; closed by whatever comes first. Ray forgets a call whose reference nobody holds."""

    reference: Any
    timer: Timer | None = None


@dataclass(slots=True)
class Calls:
    """Remote calls under way. For the loop's thread only."""

    loop: Loop
    _open: dict[int, _Call] = field(default_factory=dict)
    _numbers: count[int] = field(default_factory=count)

    def send(
        self,
        reference: Any,
        what: str,
        deadline_s: float,
        answered: Callable[[Any], object],
        failed: Callable[[Exception], object],
    ) -> None:
        """Watch a call that was just made.

        Args:
            reference: Ray's, of the value to come.
            what: for the error's text.
            answered: takes the value.
            failed: takes Ray's error, the remote function's own, or :class:`NoAnswerError`.
        """
        number = next(self._numbers)
        call = self._open[number] = _Call(reference)

        def expire() -> None:
            if self._open.pop(number, None) is not None:
                failed(NoAnswerError(f"{what}: no answer within {deadline_s:g} s"))

        def close(future: Any) -> None:
            if self._open.pop(number, None) is None:
                return
            assert call.timer is not None
            call.timer.cancel()
            error = future.exception()
            if error is None:
                answered(future.result())
            elif isinstance(error, Exception):
                failed(error)
            else:
                raise error

        call.timer = self.loop.call_later(deadline_s, expire)
        future = reference.future()
        future.add_done_callback(lambda done: self.loop.call_soon_threadsafe(close, done))
