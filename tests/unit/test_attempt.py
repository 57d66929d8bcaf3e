"""What signals do to a run."""

from __future__ import annotations

import os
import signal

import pytest

from spotlight.cli.runs.progress import Facts, RunProgress
from spotlight.runtime.attempt import stopping_gracefully


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
