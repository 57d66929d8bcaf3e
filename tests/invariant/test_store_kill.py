"""Real SIGKILLs: what was acknowledged before one is there after it, and what is there is whole.

Each test is a small process that forks: copies of the test runner, with torch in it, take ten times as long.
"""

from __future__ import annotations

import multiprocessing
import os
import random
import shutil
import signal
import sqlite3
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from spotlight.scheduler.records import CommitRejected
from spotlight.store.checkpoints import CheckpointStore
from spotlight.store.ledger import ledger_queries as queries
from spotlight.store.ledger.sqlite_ledger import SqliteLedger
from spotlight.store.manifest import CheckpointHeader

FILE_EVENTS = {
    "open",
    "os.mkdir",
    "os.rename",
    "os.remove",
    "os.rmdir",
    "os.listdir",
    "os.scandir",
    "shutil.rmtree",
}


def write_checkpoint(directory: Path, iteration: int) -> None:
    header = CheckpointHeader(iteration, iteration, config_digest="", package_version="")
    with CheckpointStore(directory, keep=2).writer(header) as temporary:
        for part in range(3):
            (temporary / f"part-{part}").write_bytes(bytes([iteration]) * 20_000)


def loaded(directory: Path) -> int:
    checkpoint = CheckpointStore(directory, keep=2).newest_valid()
    if checkpoint is None:
        return 0
    assert checkpoint.damages == ()
    for part in range(3):
        content = (checkpoint.directory / f"part-{part}").read_bytes()
        assert content == bytes([checkpoint.header.iteration]) * 20_000
    return checkpoint.header.iteration


def in_small_process(work: Callable[[Path], None], directory: Path) -> None:
    process = multiprocessing.get_context("spawn").Process(target=work, args=(directory,))
    process.start()
    process.join()
    assert process.exitcode == 0  # the error is in the captured output


def in_child(work: Callable[[], None]) -> int:
    pid = os.fork()
    if pid == 0:
        try:
            work()
            os._exit(0)
        except BaseException:  # noqa: BLE001 - the child must never return into the test runner
            os._exit(1)
    return pid


def die_at_step(step: int) -> None:
    """SIGKILL this process at its step-th file operation, each fsync counted twice: before and after."""
    remaining = step
    fsync = os.fsync

    def count(event: str, _: object) -> None:
        nonlocal remaining
        if event in FILE_EVENTS:
            remaining -= 1
            if remaining < 0:
                os.kill(os.getpid(), signal.SIGKILL)

    def counted_fsync(descriptor: int) -> None:
        count("open", ())
        fsync(descriptor)
        count("open", ())

    sys.addaudithook(count)
    os.fsync = counted_fsync


def test_sigkill_at_every_step_of_a_checkpoint(tmp_path: Path) -> None:
    in_small_process(sigkill_at_every_step, tmp_path)


def sigkill_at_every_step(root: Path) -> None:
    outcomes: list[int] = []
    base = root / "base"
    base.mkdir()
    for iteration in (1, 2):
        write_checkpoint(base, iteration)
    os.fsync = lambda descriptor: None  # a killed process leaves its writes to the system
    for step in range(1000):
        directory = shutil.copytree(base, root / str(step))

        def work(step: int = step, directory: Path = directory) -> None:
            die_at_step(step)
            write_checkpoint(directory, 3)

        _, status = os.waitpid(in_child(work), 0)
        outcomes.append(loaded(directory))
        write_checkpoint(directory, 4)
        assert loaded(directory) == 4
        assert not list(directory.glob(".*"))
        if not os.WIFSIGNALED(status):
            assert os.WEXITSTATUS(status) == 0
            break
    assert outcomes == sorted(outcomes)
    assert set(outcomes) == {2, 3}
    assert len(outcomes) > 25


def acknowledged_until_killed(work: Callable[[], Iterator[int]], rng: random.Random) -> int:
    """Run ``work`` in a child, kill it at a random moment; the last number that it said was safe."""
    reader, writer = os.pipe()

    def acknowledge() -> None:
        for number in work():
            os.write(writer, number.to_bytes(4, "little"))

    pid = in_child(acknowledge)
    os.close(writer)
    with os.fdopen(reader, "rb") as pipe:
        said = pipe.read(4 * rng.randint(1, 2))  # so that every child gets somewhere, however slow the disk
        time.sleep(rng.uniform(0, 0.02))
        os.kill(pid, signal.SIGKILL)
        _, status = os.waitpid(pid, 0)
        assert os.WIFSIGNALED(status)
        said += pipe.read()
    return int.from_bytes(said[-4:], "little")


def test_acknowledged_checkpoints_survive_kills_at_random_moments(tmp_path: Path) -> None:
    in_small_process(kill_while_checkpoints_are_written, tmp_path)


def kill_while_checkpoints_are_written(root: Path) -> None:
    rng = random.Random(0)
    for _ in range(12):
        start = loaded(root)

        def work(start: int = start) -> Iterator[int]:
            for iteration in range(start + 1, 256):
                write_checkpoint(root, iteration)
                yield iteration

        safe = acknowledged_until_killed(work, rng)
        assert start < safe <= loaded(root) <= safe + 1


def test_acknowledged_records_survive_kills_at_random_moments(tmp_path: Path) -> None:
    in_small_process(kill_while_records_are_written, tmp_path)


def kill_while_records_are_written(root: Path) -> None:
    rng = random.Random(1)
    path = root / "ledger.sqlite"
    for attempt in range(1, 13):

        def work(attempt: int = attempt) -> Iterator[int]:
            with SqliteLedger(path) as ledger:
                ledger.begin_attempt(pid=attempt, host="h", workers={}, now_s=attempt)
                while True:
                    first = ledger.position() + 1
                    ledger.append([(first + i, CommitRejected(None, "stale epoch")) for i in range(3)])
                    yield ledger.position()

        safe = acknowledged_until_killed(work, rng)
        with SqliteLedger(path) as ledger:
            assert safe <= ledger.position() <= safe + 3
            assert ledger.position() % 3 == 0
            assert queries.counts(ledger.connection).rejected == ledger.position()
    connection = sqlite3.connect(path)
    assert connection.execute("PRAGMA integrity_check").fetchall() == [("ok",)]
    ended = connection.execute("SELECT ended FROM attempts ORDER BY number").fetchall()
    assert ended == [("killed",)] * 11 + [(None,)]
    connection.close()
