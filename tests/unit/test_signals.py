"""What signals do to a run."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Iterator

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


def test_a_signal_while_nobody_reads_the_output_stops_all_the_same() -> None:
    """A pager that is paused: Python refuses a write within a write."""
    reader, writer = os.pipe()
    requests = list[str]()
    os.set_blocking(writer, False)
    with contextlib.suppress(BlockingIOError):
        while os.write(writer, b"x" * 4096):
            pass
    os.set_blocking(writer, True)

    def interrupt_and_read() -> None:
        time.sleep(0.3)  # until the other thread waits for the pipe
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(0.3)
        while os.read(reader, 65536):
            pass
        os.close(reader)

    reading = threading.Thread(target=interrupt_and_read)
    with (
        os.fdopen(writer, "w", encoding="utf-8") as pipe,
        PlainProgress(Facts(1, 1.0), Console(file=pipe)) as progress,
        stopping_gracefully(lambda: requests.append("stop"), progress),
    ):
        reading.start()
        while not requests:
            progress.say("x" * 200)
    reading.join()
    assert requests == ["stop"]


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
