"""What signals do to a run."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator

import pytest

from spotlight.cli.runs.progress import Facts, RunProgress
from spotlight.runtime.signals import ending_at_once, stopping_gracefully


class RecordedProgress(RunProgress):
    def __init__(self) -> None:
        super().__init__(Facts(1, 1.0))
        self.notes: list[str] = []

    def note(self, text: str) -> None:
        self.notes.append(text)


def test_only_a_second_interrupt_stops_at_once() -> None:
    progress, requests = RecordedProgress(), list[str]()
    with stopping_gracefully(lambda: requests.append("stop"), progress):
        os.kill(os.getpid(), signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGINT)
        assert [note.split(":")[0] for note in progress.notes] == ["SIGTERM", "SIGINT"]
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
    assert requests == ["stop", "stop"]


@pytest.fixture(autouse=True)
def hangups_are_not_ignored() -> Iterator[None]:
    """Whoever runs the tests may have them ignored, as nohup does."""
    former = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, former)


def test_a_closed_terminal_stops_after_a_checkpoint_unless_hangups_are_ignored() -> None:
    progress, requests = RecordedProgress(), list[str]()
    with stopping_gracefully(lambda: requests.append("stop"), progress):
        os.kill(os.getpid(), signal.SIGHUP)
    assert progress.notes == ["SIGHUP: stopping after the next checkpoint; the same command resumes"]
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
