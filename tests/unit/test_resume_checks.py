"""A run goes on only from the ledger and the checkpoint that were written together."""

from __future__ import annotations

import random
import shutil
import sqlite3
import tempfile
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from store_history import SCRATCH, WORKER, history, write
from test_store_audit import LIMITS, broken, make_run

from spotlight.runtime.attempt import require_resumable
from spotlight.scheduler.types import Lease, LeaseId, Phase, RolloutId
from spotlight.store.checkpoints import CheckpointStore
from spotlight.store.ledger.ledger_audit import audit
from spotlight.store.ledger.ledger_schema import RECORD_TABLES, Ending
from spotlight.store.ledger.sqlite_ledger import GpuSpend, GrantedLease, SqliteLedger
from spotlight.store.manifest import read_manifest
from spotlight.store.run_directory import RunPaths
from spotlight.store.store_errors import DamagedCheckpointError, LedgerError
from spotlight_rewards.base.file_errors import StoreError


@pytest.fixture
def tmp_path() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(dir=SCRATCH) as name:
        yield Path(name)


def resume(run: Path) -> str:
    """The digest at the checkpoint that the run goes on from. Raises StoreError as a resume does."""
    paths = RunPaths(run)
    with SqliteLedger(paths.ledger) as ledger:
        newest = CheckpointStore(paths.checkpoints, keep=2).newest_valid()
        require_resumable(ledger, newest, paths)
        return ledger.digest_at(newest.header.ledger_position) if newest else ""


@pytest.mark.parametrize("appends", [None, 40])
def test_a_foreign_ledger_is_refused_and_named_by_the_audit(tmp_path: Path, appends: int | None) -> None:
    make_run(tmp_path / "run")
    make_run(tmp_path / "other", seed=2, appends=appends)
    resume(tmp_path / "run")
    shutil.copy(tmp_path / "other/ledger.sqlite", tmp_path / "run/ledger.sqlite")
    with pytest.raises(LedgerError, match="not the ledger of 000001-iteration-000001") as refused:
        resume(tmp_path / "run")
    assert "restore the ledger and the checkpoints from one copy of the run" in str(refused.value)
    assert broken(audit(tmp_path / "run", LIMITS)) & {"same-ledger", "checkpoint"}


def test_a_flipped_bit_is_refused_or_changes_nothing_that_the_checkpoint_counts(tmp_path: Path) -> None:
    make_run(tmp_path)
    path = tmp_path / "ledger.sqlite"
    with closing(sqlite3.connect(path)) as connection:
        connection.execute("PRAGMA journal_mode = DELETE")  # all is in one file
    content, resumed, counted = path.read_bytes(), resume(tmp_path), records(path)
    rng = random.Random(0)
    refused = 0
    for _ in range(150):
        flipped = bytearray(content)
        flipped[rng.randrange(len(content))] ^= 1 << rng.randrange(8)
        path.write_bytes(flipped)
        for left in tmp_path.glob("ledger.sqlite-*"):
            left.unlink()
        try:
            found = resume(tmp_path)
        except StoreError as error:
            said = str(error)
            refused += 1
        else:
            said = "restore nothing"
            assert (found, records(path)) == (resumed, counted)
        assert "estore" in said or "Use the version that made it" in said
    assert 20 < refused < 100, "in free space, and after the checkpoint, bits may flip"


def records(ledger: Path) -> list[object]:
    """All that the record tables say up to the checkpoint."""
    newest = CheckpointStore(ledger.parent / "checkpoints", keep=2).newest_valid()
    assert newest is not None
    with closing(sqlite3.connect(ledger)) as connection:
        return [
            connection.execute(
                f"SELECT * FROM {table} WHERE seq <= ? ORDER BY seq", (newest.header.ledger_position,)
            ).fetchall()
            for table in RECORD_TABLES
        ]


@pytest.mark.parametrize(
    "change",
    [
        "UPDATE rewards SET value = value + 1e-15 WHERE seq = (SELECT MIN(seq) FROM rewards)",
        "UPDATE samples SET epoch = epoch + 4 WHERE seq = (SELECT MIN(seq) FROM samples)",
        "UPDATE gpu_seconds SET seconds = seconds * 2 WHERE id = 2",
        "INSERT INTO leases VALUES ('r', 1, 1, 3, 1000.0, 'worker-0', 0, 0)",
    ],
)
def test_what_a_sound_file_may_say_otherwise_is_refused(tmp_path: Path, change: str) -> None:
    make_run(tmp_path)
    with closing(sqlite3.connect(tmp_path / "ledger.sqlite")) as connection:
        for table in ("rewards", "samples"):
            connection.execute(f"DROP TRIGGER {table}_insert_only")
        assert connection.execute(change).rowcount > 0
        connection.commit()
    with pytest.raises(LedgerError, match="not the ledger of"):
        resume(tmp_path)
    assert "same-ledger" in broken(audit(tmp_path, LIMITS))


def test_removed_checkpoints_are_missed_and_never_written_ones_are_not(tmp_path: Path) -> None:
    make_run(tmp_path, ending=Ending.STOPPED)
    for path in (tmp_path / "checkpoints").iterdir():
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    with pytest.raises(
        DamagedCheckpointError, match=r"by the ledger one was committed at record \d+ of"
    ) as e:
        resume(tmp_path)
    assert "Restore the folder from a copy, or delete the run directory" in str(e.value)
    assert "checkpoint" in broken(audit(tmp_path, LIMITS))
    with closing(sqlite3.connect(tmp_path / "ledger.sqlite")) as connection:
        connection.execute("DELETE FROM checkpoints")
        connection.commit()
    assert resume(tmp_path) == ""
    assert audit(tmp_path, LIMITS).ok
    with closing(sqlite3.connect(tmp_path / "ledger.sqlite")) as connection:
        connection.executescript(
            "DROP TABLE checkpoints; DROP TABLE course_changes"
        )  # an older version's, resumed once
        connection.execute("INSERT INTO rollbacks (attempt, from_position, to_position) VALUES (1, 9, 5)")
        connection.execute("PRAGMA user_version = 12")
        connection.commit()
    assert "checkpoint" in broken(audit(tmp_path, LIMITS))
    with pytest.raises(DamagedCheckpointError, match="committed at record 5"):
        resume(tmp_path)


def test_a_ledger_from_before_checkpoints_were_recorded_misses_the_one_it_was_resumed_from(
    tmp_path: Path,
) -> None:
    make_run(tmp_path)
    paths = RunPaths(tmp_path)
    with closing(sqlite3.connect(paths.ledger)) as connection:
        connection.executescript(
            "DROP TABLE checkpoints; DROP TABLE course_changes; PRAGMA user_version = 12;"
        )
    newest = CheckpointStore(paths.checkpoints, keep=2).newest_valid()
    assert newest is not None
    with SqliteLedger(paths.ledger) as ledger:
        attempt = ledger.begin_attempt(pid=1, host="h", workers={WORKER: 1.0}, now_s=2e9)
        ledger.rollback(newest.header.ledger_position, attempt)
    shutil.rmtree(paths.checkpoints)
    with pytest.raises(DamagedCheckpointError, match=f"committed at record {newest.header.ledger_position}"):
        resume(tmp_path)


def test_a_checkpoint_of_an_older_version_names_no_digest_and_is_resumed(tmp_path: Path) -> None:
    make_run(tmp_path)
    checkpoints = CheckpointStore(tmp_path / "checkpoints", keep=1)
    newest = checkpoints.newest_valid()
    assert newest is not None
    header = type(newest.header)(1, newest.header.ledger_position, "", "0.1.0")
    with checkpoints.writer(header) as directory:
        (directory / "state").write_text("state")
    written = checkpoints.newest_valid()
    assert written is not None
    assert b"ledger_sha256" not in (written.directory / "manifest.json").read_bytes()
    assert read_manifest(written.directory).header == header  # type: ignore[union-attr]
    resume(tmp_path)
    assert audit(tmp_path, LIMITS).ok


@given(seed=st.integers(0, 2**32), moves=st.lists(st.tuples(st.booleans(), st.floats(0, 1)), max_size=6))
@settings(max_examples=20, deadline=None)
def test_no_later_work_and_no_rollback_to_it_changes_a_checkpoints_digest(
    seed: int, moves: list[tuple[bool, float]]
) -> None:
    transactions = history(seed, iterations=2)
    ends = [0]
    for transaction in transactions:
        ends.append(ends[-1] + len(transaction))
    with tempfile.TemporaryDirectory(dir=SCRATCH) as name, SqliteLedger(Path(name) / "ledger") as ledger:
        expected: dict[int, str] = {}
        lease = 0
        for is_kill, part in moves:
            attempt = ledger.begin_attempt(pid=1, host="h", workers={WORKER: 1.0}, now_s=float(lease))
            if is_kill and expected:
                ledger.rollback(max(expected), attempt)
            for transaction in transactions[ends.index(ledger.position()) :][: int(part * 30)]:
                lease += 1
                granted = Lease(LeaseId(lease), WORKER, 0, (RolloutId(f"r{lease}"),), 9.0)
                ledger.append([], [GrantedLease(granted, {}, 1.0)])
                write(ledger, [transaction])
                ledger.spend([GpuSpend(WORKER, Phase.ROLLOUT, 0.25, 1.0)], float(lease))
            if not is_kill:
                expected[ledger.position()] = ledger.digest_at(ledger.position())
        for position, digest in expected.items():
            with SqliteLedger(Path(name) / "ledger") as again:
                assert again.digest_at(position) == digest
                assert ledger.digest_at(position) == digest
