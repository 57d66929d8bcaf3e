"""A lock that another process holds on the ledger is waited for, and ends no run."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
from store_history import history, write

from spotlight.config.load import dump_config, load_config
from spotlight.data.datasets import Prompts
from spotlight.runtime.attempt import RunResult, open_attempt
from spotlight.runtime.observer import Observer
from spotlight.store.ledger import ledger_file
from spotlight.store.ledger import ledger_queries as queries
from spotlight.store.ledger.ledger_schema import Ending
from spotlight.store.ledger.sqlite_ledger import SqliteLedger
from spotlight.store.run_directory import RunDirectory
from spotlight.training.sharding import Ranks
from spotlight_rewards.base.file_errors import StoreError

HOLD = """
import sqlite3, sys
connection = sqlite3.connect(sys.argv[1], isolation_level=None)
for statement in sys.argv[2:]:
    connection.execute(statement)
print("held", flush=True)
sys.stdin.read()
"""
WRITER = ("BEGIN IMMEDIATE",)
ALONE = ("PRAGMA locking_mode = EXCLUSIVE", "BEGIN EXCLUSIVE")


@contextmanager
def held(path: Path, statements: tuple[str, ...]) -> Iterator[Callable[[], None]]:
    """Another process holds the lock; yields what makes it let go."""
    with subprocess.Popen(
        [sys.executable, "-c", HOLD, str(path), *statements], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as holder:
        assert holder.stdin is not None
        assert holder.stdout is not None
        assert holder.stdout.readline() == b"held\n"
        try:
            yield holder.stdin.close
        finally:
            holder.stdin.close()


class Heard(list[str]):
    """Notes; at the first, the lock is released."""

    def __init__(self, release: Callable[[], None]) -> None:
        super().__init__()
        self.release = release

    def __call__(self, text: str) -> None:
        self.append(text)
        self.release()


@pytest.fixture(autouse=True)
def _looks_often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ledger_file, "_LOOK_S", 0.05)


def test_what_is_written_under_a_lock_is_written_when_it_is_released(tmp_path: Path) -> None:
    path = tmp_path / "ledger.sqlite"
    first, *others = history(1, iterations=1)
    SqliteLedger(path).close()
    with held(path, WRITER) as release, SqliteLedger(path, heard := Heard(release)) as ledger:
        write(ledger, [first])
        write(ledger, others)
        position = ledger.position()
    locked, released = heard
    assert "is locked by another program" in locked
    assert "the run waits until it is released, and is paid for meanwhile" in locked
    assert "is released: the run goes on" in released
    with SqliteLedger(path) as ledger:
        assert ledger.position() == position


def test_a_ledger_that_another_has_for_itself_alone_is_opened_when_it_is_released(tmp_path: Path) -> None:
    path = tmp_path / "ledger.sqlite"
    with SqliteLedger(path) as ledger:
        write(ledger, history(1, iterations=1))
        position = ledger.position()
    with held(path, ALONE) as release:
        heard = Heard(release)
        with SqliteLedger(path, heard) as ledger:
            assert ledger.position() == position
    assert ["locked" in text for text in heard] == [True, False]


@pytest.mark.slow  # SQLite waits for five seconds
def test_a_reader_is_told_of_the_lock(tmp_path: Path) -> None:
    SqliteLedger(tmp_path / "ledger.sqlite").close()
    with (
        held(tmp_path / "ledger.sqlite", ALONE),
        pytest.raises(StoreError, match=r"database is locked\. Close the program that locks it"),
    ):
        queries.open_readonly(tmp_path / "ledger.sqlite")


class Interrupted(Observer):
    """A second Ctrl-C while the run waits for the lock."""

    def note(self, text: str) -> None:
        if "is locked" in text:
            raise KeyboardInterrupt


def test_a_second_signal_ends_the_wait_at_once_and_the_next_attempt_goes_on(tmp_path: Path) -> None:
    config = load_config(None, [f"runs_dir={tmp_path}", "name=run"])

    def attempt(observer: Observer, lock: bool) -> None:
        with (
            ExitStack() as locks,
            RunDirectory.open(tmp_path, "run", dump_config(config)) as directory,
            open_attempt(
                config, directory, Prompts((), ()), Ranks(), workers={}, began_s=time.time(), scored_by={},
                observer=observer, account=lambda recorder: recorder.flush(),
            ) as it,
        ):  # fmt: skip
            if lock:
                locks.enter_context(held(directory.ledger, WRITER))
                write(it.recorder.ledger, history(1, iterations=1))
            it.result = RunResult(directory.path, stopped=True)

    with pytest.raises(KeyboardInterrupt):
        attempt(Interrupted(), lock=True)
    attempt(Observer(), lock=False)
    with queries.open_readonly(tmp_path / "run/ledger.sqlite") as ledger:
        assert queries.last_ending(ledger) is Ending.STOPPED
