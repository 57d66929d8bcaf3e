"""What signals do to a run. Imports nothing heavy: signals are heeded before everything else is loaded."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from types import FrameType

from spotlight.runtime.observer import Observer


@contextmanager
def stopping_gracefully(request_stop: Callable[[], object], observer: Observer) -> Iterator[None]:
    """SIGINT, SIGTERM, and SIGHUP unless it is ignored (nohup) stop the run where a resume is exact; the same
    signal again stops at once. Another one does not: a launcher may answer Ctrl-C with a SIGTERM of its own.
    """

    def stop(number: int, frame: FrameType | None) -> None:
        signal.signal(number, signal.default_int_handler)
        request_stop()
        name, again = signal.Signals(number).name, " (Ctrl-C)" * (number == signal.SIGINT)
        try:
            observer.note(
                f"{name}: stopping where the same command can resume exactly; a second {name}{again} stops "
                f"at once, and loses what is not in a checkpoint{_limit()}"
            )
        except RuntimeError as error:
            if "reentrant" not in str(error):  # the signal came within a write to the same terminal or pipe
                raise

    with on_signals((signal.SIGINT, *signals_that_end()), stop):
        yield


@contextmanager
def ending_at_once() -> Iterator[None]:
    """SIGTERM and SIGHUP act as Ctrl-C does, so that a process that is still loading ends in order; without
    a handler the first process of a container would not end at all.
    """
    with on_signals(signals_that_end(), signal.default_int_handler):
        yield


def _limit() -> str:
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        return ""
    return ". torchrun kills its ranks after --shutdown-timeout, 30 s by default"


def signals_that_end() -> list[signal.Signals]:
    """Besides SIGINT: SIGTERM, and SIGHUP unless it is ignored."""
    ignored = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    return [signal.SIGTERM] if ignored else [signal.SIGTERM, signal.SIGHUP]


@contextmanager
def on_signals(
    numbers: Iterable[signal.Signals], handler: Callable[[int, FrameType | None], object]
) -> Iterator[None]:
    """Handle signals within the block; in another thread than the main one, which alone may: leave them."""
    main = threading.current_thread() is threading.main_thread()
    before = {number: signal.signal(number, handler) for number in numbers if main}
    try:
        yield
    finally:
        for number, former in before.items():
            signal.signal(number, former)
