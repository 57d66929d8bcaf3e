"""Threads that send and bring chunks, for which a process that is told to end does not wait."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from queue import SimpleQueue
from typing import Self, TypeVar

_T = TypeVar("_T")


class Transfers:
    """Calls in ``count`` threads. Leaving the block does not wait for calls under way, nor does the process's
    end, unlike an executor's: a service may take two minutes to fail.
    """

    def __init__(self, count: int) -> None:
        self._count = count
        self._calls = SimpleQueue[Callable[[], None] | None]()
        for _ in range(count):
            threading.Thread(target=self._work, name="bucket", daemon=True).start()

    def submit(self, call: Callable[[], _T]) -> Future[_T]:
        future = Future[_T]()

        def run() -> None:
            try:
                future.set_result(call())
            except BaseException as error:  # noqa: BLE001 - the future has it
                future.set_exception(error)

        self._calls.put(run)
        return future

    def _work(self) -> None:
        while (call := self._calls.get()) is not None:
            call()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        for _ in range(self._count):
            self._calls.put(None)
