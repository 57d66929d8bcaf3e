"""Reads runs in threads beside the server's loop, and leaves behind those that do not answer.

A thread that waits for a disk cannot be ended. It keeps what it is at until the disk answers, if ever; the
others are read by other threads, and the same is not asked again meanwhile. Threads end with the process.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Hashable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from threading import Lock, Thread
from typing import Any, Generic, TypeVar

LISTED_S = 3.0
"""Of each run in a list."""
ASKED_S = 60.0
"""Of one run that is asked for."""
_THREADS_MAX = 32
"""Of one list, once something in it does not answer."""
K = TypeVar("K", bound=Hashable)
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Read(Generic[T]):
    """What was found, or the error."""

    found: T | None = None
    error: BaseException | None = None

    def get(self) -> T:
        """What was found. Raises the error."""
        if self.error is not None:
            raise self.error
        return self.found  # type: ignore[return-value]


@dataclass(slots=True)
class RunThreads:
    """What is waited for in vain, by kind of question, for all loops of the process."""

    _stuck: set[tuple[str, Hashable]] = field(default_factory=set)
    _lock: Lock = field(default_factory=Lock)

    async def each(
        self, kind: str, items: Sequence[K], work: Callable[[K], T], limit_s: float = LISTED_S
    ) -> dict[K, Read[T]]:
        """What ``work`` finds of each, in their order; those that take longer than ``limit_s`` are missing.

        However many do not answer, all together take twice ``limit_s`` longer than those that do.
        """
        with self._lock:
            futures = {item: _started() for item in items if (kind, item) not in self._stuck}
        left = deque(futures)

        def work_through() -> None:
            while left:
                try:
                    item = left.popleft()
                except IndexError:  # another thread took the last
                    return
                read = _read(work, item)
                with self._lock:
                    self._stuck.discard((kind, item))
                    futures[item].set_result(read)

        _start(min(1, len(left)), work_through)
        for future in futures.values():
            if future.done() or await _are_done([future], limit_s):
                continue
            self._leave(kind, futures, left)
            _start(min(_THREADS_MAX, len(left)), work_through)
            await _are_done([each for each in futures.values() if each is not future], limit_s)
            self._leave(kind, futures, left)
            left.clear()
            break
        return {item: future.result() for item, future in futures.items() if future.done()}

    async def one(
        self, kind: str, item: K, work: Callable[[K], T], limit_s: float = ASKED_S
    ) -> Read[T] | None:
        """What ``work`` finds; None if it takes longer."""
        return (await self.each(kind, [item], work, limit_s)).get(item)

    def _leave(self, kind: str, futures: Mapping[K, Future[Read[T]]], left: deque[K]) -> None:
        with self._lock:
            waiting = set(left)
            self._stuck.update(
                (kind, item) for item, future in futures.items() if not future.done() and item not in waiting
            )


def _started() -> Future[Any]:
    future = Future[Any]()
    future.set_running_or_notify_cancel()  # whoever waits may give up; the thread sets it nevertheless
    return future


def _start(number: int, work: Callable[[], None]) -> None:
    for _ in range(number):
        Thread(target=work, daemon=True).start()


def _read(work: Callable[[K], T], item: K) -> Read[T]:
    try:
        return Read(work(item))
    except BaseException as error:  # noqa: BLE001 - for whoever asked
        return Read(error=error)


async def _are_done(futures: Sequence[Future[Any]], limit_s: float) -> bool:
    waiting = [asyncio.wrap_future(each) for each in futures if not each.done()]
    if not waiting:
        return True
    _, late = await asyncio.wait(waiting, timeout=limit_s)
    for each in late:
        each.cancel()
    return not late
