"""Processes that work beside a test, say what they reached, and are killed."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from multiprocessing import get_context
from multiprocessing.connection import Connection

from ray import cloudpickle

_SMALL = get_context("forkserver")
"""Copies of the test runner, with all that its earlier tests have left, may be refused for want of memory."""


class Child:
    """A process of its own. What ``work`` returns, or raises, is its last word.

    ``work`` gets a function that says a word to the test.
    """

    def __init__(self, work: Callable[[Callable[[str], None]], str]) -> None:
        self._pipe, says = _SMALL.Pipe(duplex=False)
        self._process = _SMALL.Process(target=_live, args=(cloudpickle.dumps(work), says))
        self._process.start()
        says.close()

    @property
    def pid(self) -> int:
        pid = self._process.pid
        assert pid is not None
        return pid

    def receive(self, timeout_s: float = 20.0) -> str:
        """Its next word; empty when it is gone."""
        assert self._pipe.poll(timeout_s), "the child says nothing"
        try:
            return str(self._pipe.recv())
        except EOFError:
            return ""

    def signal(self, number: signal.Signals) -> None:
        os.kill(self.pid, number)

    def kill(self) -> None:
        """SIGKILL, and wait for its end."""
        self._process.kill()
        self._process.join()
        self._pipe.close()

    def __enter__(self) -> Child:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()


def _live(work: bytes, says: Connection) -> None:
    try:
        says.send(cloudpickle.loads(work)(says.send))
    except BaseException as error:  # noqa: BLE001 - whatever ended it is its last word
        says.send(f"{type(error).__name__}: {error}")
