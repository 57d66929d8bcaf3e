"""What signals do to a run. Imports nothing heavy: signals are heeded before everything else is loaded."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from types import FrameType

from spotlight.runtime.observer import Observer


@contextmanager
def stopping_gracefully(request_stop: Callable[[], None], observer: Observer) -> Iterator[None]:
    """SIGTERM, SIGHUP unless it is ignored (nohup), and the first SIGINT stop after the next checkpoint; a
    second SIGINT stops at once.
    """

    def stop(number: int, frame: FrameType | None) -> None:
        request_stop()
        observer.note(
            f"{signal.Signals(number).name}: stopping after the next checkpoint; the same command resumes"
        )
        if number == signal.SIGINT:
            signal.signal(signal.SIGINT, signal.default_int_handler)

    with _on_signals((signal.SIGINT, *_ending()), stop):
        yield


@contextmanager
def ending_at_once() -> Iterator[None]:
    """SIGTERM and SIGHUP act as Ctrl-C does, so that a process that is still loading ends in order; without
    a handler the first process of a container would not end at all.
    """
    with _on_signals(_ending(), signal.default_int_handler):
        yield


def _ending() -> list[signal.Signals]:
    ignored = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    return [signal.SIGTERM] if ignored else [signal.SIGTERM, signal.SIGHUP]


@contextmanager
def _on_signals(
    numbers: Iterable[signal.Signals], handler: Callable[[int, FrameType | None], object]
) -> Iterator[None]:
    before = {number: signal.signal(number, handler) for number in numbers}
    try:
        yield
    finally:
        for number, former in before.items():
            signal.signal(number, former)
