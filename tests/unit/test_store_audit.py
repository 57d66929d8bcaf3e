from __future__ import annotations

import sqlite3
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from store_history import GROUP_SIZE, SCRATCH, WORKER, history, write

from spotlight.runtime.recorder import RunRecorder
from spotlight.scheduler.types import Phase
from spotlight.store import checkpoints
from spotlight.store.checkpoints import CheckpointStore
from spotlight.store.ledger import ledger_audit
from spotlight.store.ledger.audit_checks import CHECKS
from spotlight.store.ledger.ledger_audit import AuditLimits, AuditReport, audit
from spotlight.store.ledger.ledger_schema import RECORD_TABLES, Ending
from spotlight.store.ledger.sqlite_ledger import GpuSpend, SqliteLedger
from spotlight.store.manifest import CheckpointHeader
from spotlight.store.store_errors import LedgerError


@pytest.fixture
def tmp_path() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(dir=SCRATCH) as name:
        yield Path(name)


LIMITS = AuditLimits(group_size=GROUP_SIZE, train_samples=GROUP_SIZE)


def make_run(run: Path, seed: int = 1, appends: int | None = None, ending: Ending = Ending.FINISHED) -> None:
    """A run of one attempt: a whole history, or its first appends, with a checkpoint in the middle."""
    (run / "checkpoints").mkdir(parents=True)
    transactions = history(seed, iterations=3)[:appends]
    with SqliteLedger(run / "ledger.sqlite") as ledger:
        ledger.begin_attempt(pid=1, host="h", workers={WORKER: 1.0}, now_s=1000.0)
        for number, transaction in enumerate(transactions):
            write(ledger, [transaction])
            ledger.spend([GpuSpend(WORKER, Phase.ROLLOUT, 0.25, 1.0)], 1000.0 + (number + 1) / 4)
            if number == len(transactions) // 2:
                position = ledger.position()
                header = CheckpointHeader(1, position, "", "", ledger.digest_at(position))
                with CheckpointStore(run / "checkpoints", keep=2).writer(header) as directory:
                    (directory / "state").write_text("state")
                ledger.record_checkpoint(position, 1)
        ledger.end_attempt(ending, 1000.0 + len(transactions) / 4)


def broken(report: AuditReport) -> set[str]:
    return {violation.check for violation in report.violations}


@given(seed=st.integers(0, 2**32), part=st.floats(0, 1))
@settings(max_examples=20, deadline=None)
def test_a_lawful_run_passes_at_every_moment(seed: int, part: float) -> None:
    with tempfile.TemporaryDirectory(dir=SCRATCH) as name:
        appends = int(part * len(history(seed, 3)))
        make_run(Path(name) / "run", seed, appends, Ending.STOPPED)
        report = audit(Path(name) / "run", LIMITS)
        assert report.violations == ()
        assert not report.finished
        make_run(Path(name) / "whole", seed)
        report = audit(Path(name) / "whole", LIMITS)
        assert report.violations == ()
        assert report.finished
        assert report.ok
        assert sum(report.counts.in_flight.values()) == 0
        assert report.checkpoint_position is not None
        assert 0 < report.checkpoint_position < report.position


TAMPERING = {
    "numbering": "UPDATE versions SET seq = seq + 100000 WHERE version > 0",
    "one-outcome": "INSERT INTO outcomes SELECT * FROM outcomes WHERE kind = 'trained' LIMIT 1",
    "issued": "DELETE FROM rollouts WHERE id = (SELECT rollout FROM outcomes WHERE kind = 'evaluated')",
    "in-flight": "DELETE FROM outcomes WHERE kind = 'dropped'",
    "order": "UPDATE samples SET seq = seq + 100000 WHERE rollout = (SELECT rollout FROM samples LIMIT 1)",
    "used-for-its-purpose": "UPDATE outcomes SET kind = 'trained' WHERE kind = 'evaluated'",
    "used-was-finished": "DELETE FROM samples",
    "used-was-rewarded": "UPDATE rewards SET value = 9e999 WHERE name = 'reward'",
    "stopped-early": "UPDATE outcomes SET kind = 'dropped', reason = 'stopped_early' WHERE kind = 'trained'",
    "trained-once": "INSERT INTO optimizer_steps SELECT * FROM optimizer_steps WHERE version = 1",
    "version": "UPDATE rollouts SET version = version + 1",
    "published": "DELETE FROM versions",
    "step-size": "UPDATE optimizer_steps SET samples = samples + 1 WHERE version = 2",
    "step-numbers": "UPDATE optimizer_steps SET version = version + 1 WHERE version = 6",
    "group-size": "DELETE FROM rollouts WHERE purpose = 'train' AND member = 0 AND iteration = 1",
    "train-samples": "UPDATE outcomes SET kind = 'dropped', reason = 'not_chosen' WHERE kind = 'trained'",
    "silent": "UPDATE outcomes SET kind = 'dropped', reason = 'silent_group' WHERE kind = 'trained'",
    "staleness": "UPDATE samples SET version = version - 1 WHERE version > 0",
    "attempts": "INSERT INTO attempts VALUES (0, 1, 'h', 1.0, 2.0, NULL, NULL)",
    "integrity": "UPDATE rollouts SET prompt = 'nowhere'",
    "billing": "UPDATE gpu_seconds SET seconds = seconds * 1.02",
    "filled": "INSERT INTO filled_seconds VALUES (NULL, 1, 0, 0, 'training', 1e6)",
    "leased": "INSERT INTO leases VALUES ('another', 1, 1, 0, 1000.0, 'worker-0', 0, 0)",
    "same-ledger": "UPDATE rollouts SET seed = seed + 1 WHERE id = (SELECT id FROM rollouts LIMIT 1)",
    "checkpoint": "DELETE FROM versions WHERE seq > 0; DELETE FROM rollouts; DELETE FROM samples; "
    "DELETE FROM rewards; DELETE FROM outcomes; DELETE FROM optimizer_steps; DELETE FROM rejected",
}


def loosen(connection: sqlite3.Connection) -> None:
    """Take every constraint off the tables of records."""
    connection.execute("PRAGMA foreign_keys = OFF")
    for table in RECORD_TABLES:
        if table in {"outcomes", "optimizer_steps"}:
            connection.execute(f"CREATE TABLE loose AS SELECT * FROM {table}")
            connection.execute(f"DROP TABLE {table}")
            connection.execute(f"ALTER TABLE loose RENAME TO {table}")
        else:
            connection.execute(f"DROP TRIGGER {table}_insert_only")


def test_every_check_has_its_tampering() -> None:
    assert set(TAMPERING) == {check.name for check in CHECKS} | {
        "integrity",
        "billing",
        "filled",
        "leased",
        "same-ledger",
        "checkpoint",
    }


@pytest.mark.parametrize("check", TAMPERING)
def test_every_tampering_is_found_and_named(tmp_path: Path, check: str) -> None:
    make_run(tmp_path)
    connection = sqlite3.connect(tmp_path / "ledger.sqlite")
    loosen(connection)
    connection.execute("PRAGMA ignore_check_constraints = ON")
    connection.executescript(TAMPERING[check])
    assert connection.total_changes > 0
    connection.commit()
    connection.close()
    report = audit(tmp_path, LIMITS)
    assert not report.ok
    assert check in broken(report)
    (violation,) = (each for each in report.violations if each.check == check)
    assert violation.ids


@pytest.mark.parametrize("moment", ["during the recount", "while it is verified"])
def test_a_checkpoint_committed_meanwhile_breaks_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, moment: str
) -> None:
    make_run(tmp_path, appends=12, ending=Ending.STOPPED)
    module, name = (ledger_audit, "_attempts") if moment == "during the recount" else (checkpoints, "verify")
    original = getattr(module, name)

    def meanwhile(argument: object) -> object:
        monkeypatch.setattr(module, name, original)
        with SqliteLedger(tmp_path / "ledger.sqlite") as ledger:
            write(ledger, history(1, iterations=3)[12:])
            header = CheckpointHeader(2, ledger.position(), config_digest="", package_version="")
            with CheckpointStore(tmp_path / "checkpoints", keep=1).writer(header) as directory:
                (directory / "state").write_text("later")
        return original(argument)

    monkeypatch.setattr(module, name, meanwhile)
    report = audit(tmp_path, LIMITS)
    assert getattr(module, name) is original
    assert "checkpoint" not in broken(report)
    assert report.checkpoint_position is not None


def test_loosening_alone_breaks_nothing(tmp_path: Path) -> None:
    make_run(tmp_path)
    connection = sqlite3.connect(tmp_path / "ledger.sqlite")
    loosen(connection)
    connection.close()
    assert broken(audit(tmp_path, LIMITS)) <= {"integrity"}


def test_limits_of_the_configuration_are_checked(tmp_path: Path) -> None:
    make_run(tmp_path)
    assert broken(audit(tmp_path, AuditLimits(group_size=GROUP_SIZE + 1))) == {"group-size"}
    assert audit(tmp_path, AuditLimits(group_size=None, staleness_max=1)).ok
    connection = sqlite3.connect(tmp_path / "ledger.sqlite")
    loosen(connection)
    connection.execute(
        """
        WITH chosen AS (SELECT rollout,
            ROW_NUMBER() OVER (PARTITION BY rtrim(rollout, '0123456789r')) AS place
            FROM outcomes WHERE kind = 'trained' OR reason = 'uneven_batch')
        UPDATE outcomes SET kind = 'dropped', reason = 'not_chosen'
            WHERE rollout IN (SELECT rollout FROM chosen WHERE place > 2)
        """
    )
    connection.commit()
    connection.close()
    for samples, healthy in ((None, True), (2, True), (GROUP_SIZE, False)):
        found = broken(audit(tmp_path, AuditLimits(GROUP_SIZE, 0, samples)))
        assert ("train-samples" not in found) == healthy, samples


def test_a_killed_attempt_is_billed_until_it_was_last_seen(tmp_path: Path) -> None:
    make_run(tmp_path, ending=Ending.STOPPED)
    with SqliteLedger(tmp_path / "ledger.sqlite") as ledger:
        ledger.begin_attempt(pid=2, host="h", workers={WORKER: 1.0}, now_s=5000.0)
        ledger.spend([GpuSpend(WORKER, Phase.SETUP, 3.0, 1.0)], 5003.0)
        ledger.spend([], 5004.0)
        assert broken(audit(tmp_path, LIMITS)) == {"billing"}  # a second is in no phase, while it works
    with SqliteLedger(tmp_path / "ledger.sqlite") as ledger:
        ledger.begin_attempt(pid=3, host="h", workers={WORKER: 1.0}, now_s=6000.0)
        ledger.end_attempt(Ending.FINISHED, 6000.0)
    report = audit(tmp_path, LIMITS)
    assert report.ok
    assert [bill.ended for bill in report.attempts] == [Ending.STOPPED, Ending.KILLED, Ending.FINISHED]
    assert report.attempts[1].billed_s == report.attempts[1].accounted_s == 4.0
    assert report.gpu_seconds_by_phase[Phase.LOST] == 1.0


def test_a_time_of_day_that_is_set_meanwhile_changes_no_bill(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_run(tmp_path, ending=Ending.STOPPED)
    with SqliteLedger(tmp_path / "ledger.sqlite") as ledger:
        ledger.begin_attempt(pid=2, host="h", workers={WORKER: 1.0}, now_s=5000.0)
        parts: Any = (
            None,
            {},
            None,
            None,
            ledger,
            None,
            None,
            {WORKER: 1.0},
            None,
            1,
            16.0,
            None,
            0.0,
            5000.0,
        )
        recorder = RunRecorder(*parts)
        for time_of_day_s in (5060.0, 5120.0 + 3600.0):
            monkeypatch.setattr(time, "time", lambda now_s=time_of_day_s: now_s)
            recorder.spend({Phase.ROLLOUT: 40.0, Phase.IDLE: 20.0})
        ledger.end_attempt(Ending.FINISHED)
    report = audit(tmp_path, LIMITS)
    assert report.ok, report.violations
    assert report.attempts[1].billed_s == report.attempts[1].accounted_s == recorder.wall_s == 120.0


def test_a_damaged_checkpoint_is_named(tmp_path: Path) -> None:
    make_run(tmp_path)
    (state,) = (tmp_path / "checkpoints").rglob("state")
    state.write_text("stale")
    report = audit(tmp_path, LIMITS)
    assert broken(report) == {"checkpoint"}
    assert "/state: expected sha256" in report.violations[0].ids[0]


def test_a_missing_or_unreadable_ledger_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(LedgerError, match="no ledger here"):
        audit(tmp_path, LIMITS)
    make_run(tmp_path)
    path = tmp_path / "ledger.sqlite"
    content = path.read_bytes()
    path.write_bytes(content[:4096] + b"\xff" * (len(content) - 4096))
    with pytest.raises(LedgerError, match=r"ledger\.sqlite: damaged"):
        audit(tmp_path, LIMITS)
