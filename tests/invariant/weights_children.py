"""Forked processes that work beside a test, say what they reached, and are killed."""

from __future__ import annotations

import os
import select
import signal
from collections.abc import Callable


class Child:
    """A forked process. What ``work`` returns, or raises, is its last word.

    ``work`` gets a function that says a word to the test.
    """

    def __init__(self, work: Callable[[Callable[[str], None]], str]) -> None:
        self._read, write = os.pipe()
        self.pid = os.fork()
        if self.pid == 0:
            try:
                os.close(self._read)
                last = work(lambda word: say(write, word))
                say(write, last)
                os._exit(0)
            except BaseException as error:  # noqa: BLE001 - the child must never return into the test runner
                say(write, f"{type(error).__name__}: {error}")
                os._exit(1)
        os.close(write)
        self._heard = b""

    def hear(self, timeout_s: float = 20.0) -> str:
        """Its next word; empty when it is gone."""
        while b"\0" not in self._heard:
            ready, _, _ = select.select([self._read], [], [], timeout_s)
            assert ready, "the child says nothing"
            data = os.read(self._read, 65536)
            if not data:
                return ""
            self._heard += data
        word, _, self._heard = self._heard.partition(b"\0")
        return word.decode()

    def signal(self, number: signal.Signals) -> None:
        os.kill(self.pid, number)

    def kill(self) -> None:
        """SIGKILL, and wait for its end."""
        if self.pid:
            os.kill(self.pid, signal.SIGKILL)
            os.waitpid(self.pid, 0)
            os.close(self._read)
            self.pid = 0

    def __enter__(self) -> Child:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()


def say(descriptor: int, word: str) -> None:
    os.write(descriptor, word.encode() + b"\0")
