"""What signals do to a run."""

from __future__ import annotations

import contextlib
import io
import os
import signal
import threading
from collections.abc import Iterator
from typing import Any

import pytest
from rich.console import Console

from spotlight.cli.runs.progress import Facts, PlainProgress, RunProgress
from spotlight.runtime.signals import ending_at_once, stopping_gracefully


class RecordedProgress(RunProgress):
    def __init__(self) -> None:
        super().__init__(Facts(1, 1.0))
        self.notes: list[str] = []

    def note(self, text: str) -> None:
        self.notes.append(text)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_only_the_same_signal_again_stops_at_once(number: signal.Signals) -> None:
    progress, requests = RecordedProgress(), list[str]()
    others = {signal.SIGINT, signal.SIGTERM} - {number}
    with stopping_gracefully(lambda: requests.append("stop"), progress):
        for each in (number, *others):
            os.kill(os.getpid(), each)
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), number)
    assert f"{number.name}: stopping" in progress.notes[0]
    key = " (Ctrl-C)" if number is signal.SIGINT else ""
    assert f"a second {number.name}{key} stops at once" in progress.notes[0]
    assert len(progress.notes) == len(requests) == 1 + len(others)


class Paused(io.FileIO):
    """The writing end of a full pipe, which says when somebody waits in it."""

    def __init__(self, end: int) -> None:
        super().__init__(end, "w")
        self.entered = threading.Event()
        os.set_blocking(end, False)
        with contextlib.suppress(BlockingIOError):
            while os.write(end, b"x" * 4096):
                pass
        os.set_blocking(end, True)

    def write(self, data: Any) -> int | None:
        self.entered.set()
        return super().write(data)


def test_a_signal_while_nobody_reads_the_output_stops_all_the_same() -> None:
    """A pager that is paused: Python refuses a write within a write."""
    reader, writer = os.pipe()
    paused, asked = Paused(writer), threading.Event()

    def interrupt_and_read() -> None:
        paused.entered.wait()
        os.kill(os.getpid(), signal.SIGINT)
        while not asked.wait(0.05):  # it came just before the write, which it does not interrupt then
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGUSR1)
        while os.read(reader, 65536):
            pass
        os.close(reader)

    former = signal.signal(signal.SIGUSR1, lambda *_: None)
    reading = threading.Thread(target=interrupt_and_read)
    with (
        io.TextIOWrapper(io.BufferedWriter(paused), encoding="utf-8") as pipe,
        PlainProgress(Facts(1, 1.0), Console(file=pipe)) as progress,
        stopping_gracefully(asked.set, progress),
    ):
        reading.start()
        while not asked.is_set():
            progress.say("x" * 200)
    reading.join()
    signal.signal(signal.SIGUSR1, former)
    assert asked.is_set()


def test_under_torchrun_the_note_names_its_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    progress = RecordedProgress()
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    with stopping_gracefully(lambda: None, progress):
        os.kill(os.getpid(), signal.SIGTERM)
    assert "torchrun kills its ranks after --shutdown-timeout, 30 s by default" in progress.notes[0]


@pytest.fixture(autouse=True)
def hangups_are_not_ignored() -> Iterator[None]:
    """Whoever runs the tests may have them ignored, as nohup does."""
    former = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, former)


def test_a_closed_terminal_stops_a_run_unless_hangups_are_ignored() -> None:
    progress, requests = RecordedProgress(), list[str]()
    with stopping_gracefully(lambda: requests.append("stop"), progress):
        os.kill(os.getpid(), signal.SIGHUP)
    assert [note.split(":")[0] for note in progress.notes] == ["SIGHUP"]
    former = signal.signal(signal.SIGHUP, signal.SIG_IGN)  # as nohup does
    try:
        with ending_at_once(), stopping_gracefully(lambda: requests.append("stop"), progress):
            os.kill(os.getpid(), signal.SIGHUP)
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, former)
    assert requests == ["stop"]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_process_that_is_still_loading_ends_at_once(number: signal.Signals) -> None:
    with ending_at_once(), pytest.raises(KeyboardInterrupt):
        os.kill(os.getpid(), number)


def test_in_another_thread_a_run_leaves_signals_alone() -> None:
    """Python lets the main thread alone handle them; a run from a web server's thread trains all the same."""
    before, entered = signal.getsignal(signal.SIGTERM), list[bool]()

    def run() -> None:
        with stopping_gracefully(lambda: None, RecordedProgress()):
            entered.append(signal.getsignal(signal.SIGTERM) is before)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert entered == [True]
