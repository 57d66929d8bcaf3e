from __future__ import annotations

import sqlite3
import tempfile
from collections import Counter
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from store_history import SCRATCH, WORKER, history, whole_ledger, write

from spotlight.scheduler.records import (
    REWARD,
    CommitRejected,
    PromptSeen,
    Record,
    RolloutIssued,
    SampleDropped,
    SampleEvaluated,
    SampleFinished,
    SampleScored,
    SampleTrained,
    StepApplied,
    VersionPublished,
)
from spotlight.scheduler.types import DropReason, Phase, PolicyVersion, Purpose, Rollout, RolloutId, WorkerId
from spotlight.store.ledger import ledger_queries as queries
from spotlight.store.ledger.ledger_queries import open_readonly
from spotlight.store.ledger.ledger_schema import RECORD_TABLES, Ending
from spotlight.store.ledger.sqlite_ledger import GpuSpend, SqliteLedger
from spotlight.store.store_errors import LedgerError
from spotlight_rewards.base.file_errors import StoreError
from spotlight_rewards.base.prompts import Prompt, PromptId

TRAIN = RolloutId("train")
EVAL = RolloutId("eval")
LATE = RolloutId("late")


def _rollout(rollout_id: RolloutId, purpose: Purpose) -> Rollout:
    return Rollout(rollout_id, purpose, 0, PromptId("p"), 0, 2**63 - 1, 8, PolicyVersion(0))


STARTED: list[Record] = [
    PromptSeen(Prompt(PromptId("p"), "a red circle", {})),
    RolloutIssued(_rollout(TRAIN, Purpose.TRAIN)),
    RolloutIssued(_rollout(EVAL, Purpose.EVAL)),
    SampleFinished(TRAIN, PolicyVersion(0), WORKER, 0),
    SampleScored(TRAIN, {REWARD: 0.5}),
]
STEP = StepApplied(PolicyVersion(1), 0, 0, 1)
STEP_2 = StepApplied(PolicyVersion(2), 0, 1, 1)
TRAINED = SampleTrained(TRAIN, PolicyVersion(1))
TRAINED_AGAIN = SampleTrained(TRAIN, PolicyVersion(2))
PUBLISHED = VersionPublished(PolicyVersion(1))


@pytest.fixture
def ledger(tmp_path: Path) -> Iterator[SqliteLedger]:
    with SqliteLedger(tmp_path / "ledger.sqlite") as opened:
        yield opened


@pytest.mark.parametrize(
    "unlawful",
    [
        pytest.param([SampleDropped(RolloutId("ghost"), DropReason.STALE, "")], id="outcome-never-issued"),
        pytest.param([SampleDropped(TRAIN, DropReason.STALE, ""), TRAINED, STEP], id="dropped-then-trained"),
        pytest.param([STEP, TRAINED, STEP_2, TRAINED_AGAIN], id="trained-twice"),
        pytest.param([TRAINED], id="trained-without-step"),
        pytest.param([STEP, SampleTrained(EVAL, PolicyVersion(1))], id="evaluation-trained"),
        pytest.param([SampleEvaluated(TRAIN)], id="train-rollout-evaluated"),
        pytest.param([SampleEvaluated(EVAL)], id="evaluated-unfinished"),
        pytest.param([SampleFinished(TRAIN, PolicyVersion(0), WORKER, 1)], id="finished-twice"),
        pytest.param([SampleFinished(EVAL, PolicyVersion(1), WORKER, 0)], id="made-by-another-version"),
        pytest.param([SampleScored(EVAL, {REWARD: 1.0})], id="scored-unfinished"),
        pytest.param([SampleScored(TRAIN, {REWARD: 1.0})], id="scored-twice"),
        pytest.param([SampleScored(TRAIN, {})], id="no-scores"),
        pytest.param([RolloutIssued(_rollout(TRAIN, Purpose.EVAL))], id="issued-twice"),
        pytest.param([PromptSeen(Prompt(PromptId("p"), "again", {}))], id="prompt-twice"),
        pytest.param([STEP, STEP], id="step-twice"),
        pytest.param([StepApplied(PolicyVersion(0), 0, 0, 1)], id="step-that-makes-version-0"),
        pytest.param([PUBLISHED, PUBLISHED], id="published-twice"),
        pytest.param([SampleDropped(EVAL, DropReason.NOT_CHOSEN, "")], id="evaluation-not-chosen"),
        pytest.param([RolloutIssued(_rollout(LATE, Purpose.TRAIN)),
                      SampleDropped(LATE, DropReason.NOT_CHOSEN, "")], id="not-chosen-unfinished"),
    ],
)  # fmt: skip
def test_unlawful_records_are_refused_whole(ledger: SqliteLedger, unlawful: list[Record]) -> None:
    write(ledger, [STARTED])
    before = (queries.digest(ledger.connection), ledger.position())
    with pytest.raises(LedgerError, match="record"):
        write(ledger, [[CommitRejected(None, "stale epoch"), *unlawful]])
    assert (queries.digest(ledger.connection), ledger.position()) == before
    assert queries.counts(ledger.connection).rejected == 0
    write(ledger, [[STEP, TRAINED]])
    assert queries.counts(ledger.connection).trained == 1


def test_pages_need_no_scan_also_of_a_ledger_from_before_its_indexes(tmp_path: Path) -> None:
    path = tmp_path / "ledger.sqlite"
    SqliteLedger(path).close()
    with closing(sqlite3.connect(path)) as connection:
        named = connection.execute(
            "SELECT name FROM sqlite_master WHERE type = 'index' AND name LIKE '%/_by/_%' ESCAPE '/'"
        )
        for (name,) in named.fetchall():
            connection.execute(f"DROP INDEX {name}")
        connection.commit()
    with closing(sqlite3.connect(path)) as connection:
        assert "_by_" not in _plan(connection, "SELECT MIN(position) FROM leases")
    SqliteLedger(path).close()
    with closing(sqlite3.connect(path)) as connection:
        for query in (
            "SELECT MAX(lease) FROM leases WHERE attempt = (SELECT MAX(attempt) FROM leases)",
            "SELECT MIN(position) FROM leases",
            "SELECT MIN(position) FROM gpu_seconds WHERE phase = 'training' AND position >= 7",
            "SELECT worker FROM gpu_seconds WHERE phase = 'training' AND position = 7",
        ):
            assert "_by_" in _plan(connection, query), query


def _plan(connection: sqlite3.Connection, query: str) -> str:
    return "\n".join(row[3] for row in connection.execute(f"EXPLAIN QUERY PLAN {query}"))


def test_an_older_ledger_keeps_its_outcomes_and_takes_samples_left_out_by_choice(tmp_path: Path) -> None:
    path = tmp_path / "ledger.sqlite"
    with SqliteLedger(path) as ledger:
        write(ledger, [STARTED, [RolloutIssued(_rollout(LATE, Purpose.TRAIN))]])
        write(ledger, [[SampleDropped(LATE, DropReason.STALE, "its holder is gone")]])
        digest = queries.digest(ledger.connection)
    listed = "'not_chosen', 'silent_group'"
    with closing(sqlite3.connect(path)) as connection:
        # Version 4 knew neither reason.
        connection.execute("PRAGMA writable_schema = ON")
        for known, before in ((f"{listed}, ", ""), (f" OR reason IN ({listed})", "")):
            statement = "UPDATE sqlite_master SET sql = replace(sql, ?, ?) WHERE name = 'outcomes'"
            connection.execute(statement, (known, before))
        for later in ("leases", "kept_previews", "prompt_files", "checkpoints", "course_changes"):
            connection.execute(f"DROP TABLE {later}")
        connection.execute("PRAGMA user_version = 4")
        connection.commit()
    left_out = SampleDropped(TRAIN, DropReason.NOT_CHOSEN, "others of its group are trained")
    with SqliteLedger(path) as ledger:
        assert queries.digest(ledger.connection) == digest
        write(ledger, [[left_out]])
        assert queries.counts(ledger.connection).train_dropped == {
            DropReason.STALE: 1,
            DropReason.NOT_CHOSEN: 1,
        }
        with pytest.raises(LedgerError, match="UNIQUE"):
            write(ledger, [[left_out]])
    with closing(sqlite3.connect(path)) as connection, pytest.raises(sqlite3.Error, match="insert-only"):
        connection.execute("UPDATE outcomes SET reason = 'stale'")


@pytest.mark.parametrize("number", [0, 1, 7, 12])
def test_a_gap_or_repetition_in_the_numbers_is_refused(ledger: SqliteLedger, number: int) -> None:
    write(ledger, [STARTED])
    with pytest.raises(LedgerError, match=f"record {number} where 6 was expected"):
        ledger.append([(number, CommitRejected(None, "stale epoch"))])


def test_record_tables_refuse_updates(tmp_path: Path) -> None:
    whole_ledger(tmp_path, seed=1, iterations=3).close()
    connection = sqlite3.connect(tmp_path / "ledger.sqlite")
    for table in RECORD_TABLES:
        assert connection.execute(f"SELECT COUNT(*) FROM {table}").fetchone()[0] > 0
        with pytest.raises(sqlite3.IntegrityError, match="insert-only"):
            connection.execute(f"UPDATE {table} SET seq = seq")
    connection.close()


@given(seed=st.integers(0, 2**32), iterations=st.integers(1, 3), cuts=st.lists(st.floats(0, 1), max_size=3))
@settings(max_examples=25, deadline=None)
def test_rollback_and_replay_leave_no_trace(seed: int, iterations: int, cuts: list[float]) -> None:
    """An interrupted run (any number of times, at any append) has the ledger of an uninterrupted one."""
    transactions = history(seed, iterations)
    with tempfile.TemporaryDirectory(dir=SCRATCH) as name:
        with whole_ledger(Path(name) / "straight", seed, iterations) as straight:
            expected = (
                queries.digest(straight.connection),
                queries.counts(straight.connection),
                straight.position(),
            )
        path = Path(name) / "ledger.sqlite"
        for attempt, cut in enumerate(cuts, 1):
            with SqliteLedger(path) as ledger:
                assert ledger.begin_attempt(pid=1, host="h", workers={WORKER: 1.0}, now_s=attempt) == attempt
                kept = int(cut * len(transactions))
                position = sum(len(transaction) for transaction in transactions[:kept])
                position = min(position, ledger.position())
                lengths = [0]
                for transaction in transactions:
                    lengths.append(lengths[-1] + len(transaction))
                ledger.rollback(position, attempt)
                write(ledger, transactions[lengths.index(position) : kept + 1])
        with SqliteLedger(path) as ledger:
            done = 0
            while sum(len(t) for t in transactions[:done]) < ledger.position():
                done += 1
            write(ledger, transactions[done:])
            assert (
                queries.digest(ledger.connection),
                queries.counts(ledger.connection),
                ledger.position(),
            ) == expected


@given(seed=st.integers(0, 2**32))
@settings(max_examples=15, deadline=None)
def test_counts_are_those_of_the_records(seed: int) -> None:
    records = [record for transaction in history(seed, 2) for record in transaction]
    kinds = Counter(type(record) for record in records)
    drops = Counter(record.reason for record in records if isinstance(record, SampleDropped))
    with tempfile.TemporaryDirectory(dir=SCRATCH) as name, whole_ledger(Path(name), seed, 2) as ledger:
        counts = queries.counts(ledger.connection)
    assert sum(counts.issued.values()) == kinds[RolloutIssued]
    assert (counts.trained, counts.evaluated) == (kinds[SampleTrained], kinds[SampleEvaluated])
    assert (counts.finished, counts.optimizer_steps) == (kinds[SampleFinished], kinds[StepApplied])
    assert (counts.rejected, counts.versions) == (kinds[CommitRejected], kinds[VersionPublished])
    assert counts.dropped == drops
    for purpose, kind in ((Purpose.TRAIN, counts.trained), (Purpose.EVAL, counts.evaluated)):
        dropped = sum(
            1 for r in records if isinstance(r, SampleDropped) and r.rollout.startswith(purpose.value)
        )
        assert counts.issued[purpose] == kind + dropped + counts.in_flight[purpose]


@pytest.mark.parametrize(
    ("change", "differs"),
    [
        (SampleFinished(EVAL, PolicyVersion(0), WorkerId("another"), 7), False),
        (SampleDropped(EVAL, DropReason.ROLLOUT_FAILED, "out of memory"), True),
    ],
)
def test_digest_covers_decisions_and_not_places(tmp_path: Path, change: Record, differs: bool) -> None:
    usual = SampleFinished(EVAL, PolicyVersion(0), WORKER, 0)
    digests = []
    for name, record in (("a", usual), ("b", change)):
        with SqliteLedger(tmp_path / name) as ledger:
            write(ledger, [STARTED, [record]])
            digests.append(queries.digest(ledger.connection))
    assert (digests[0] != digests[1]) is differs


def test_digest_covers_every_last_bit_of_a_score(tmp_path: Path) -> None:
    digests = set()
    for name, value in (("a", 0.1), ("b", 0.1 + 2**-56), ("c", float("nan")), ("d", float("inf"))):
        with SqliteLedger(tmp_path / name) as ledger:
            write(ledger, [STARTED[:-1], [SampleScored(TRAIN, {REWARD: value})]])
            digests.add(queries.digest(ledger.connection))
    assert len(digests) == 4


def test_lost_seconds_keep_what_they_were_spent_on(tmp_path: Path) -> None:
    path = tmp_path / "ledger.sqlite"
    other = WorkerId("worker-1")
    with SqliteLedger(path) as ledger:
        ledger.begin_attempt(pid=1, host="h", workers={WORKER: 3.6, other: 3.6}, now_s=100.0)
        write(ledger, [STARTED])
        checkpoint = ledger.position()
        ledger.spend([GpuSpend(worker, Phase.ROLLOUT, 4.0, 3.6) for worker in (WORKER, other)], 104.0)
        write(ledger, [[STEP, TRAINED]])
        ledger.spend([GpuSpend(worker, Phase.TRAINING, 2.0, 7.2) for worker in (WORKER, other)], 106.0)
        ledger.spend([GpuSpend(WORKER, Phase.IDLE, 1.5, 3.6)], 107.5)
    with SqliteLedger(path) as ledger:  # the first attempt never ended: it was killed
        attempt = ledger.begin_attempt(pid=2, host="h", workers={WORKER: 3.6}, now_s=200.0)
        ledger.spend([GpuSpend(WORKER, Phase.SETUP, 1.0, 3.6)], 201.0)
        assert ledger.rollback(checkpoint, attempt) == 2
        ledger.end_attempt(Ending.STOPPED, 201.0)
        spent = queries.gpu_seconds_by_phase(ledger.connection)
        assert spent[Phase.ROLLOUT] == 8.0
        assert spent[Phase.TRAINING] == 0.0
        assert spent[Phase.SETUP] == 1.0
        assert spent[Phase.LOST] == 4.0 + 1.5 + 1.5  # training, idle, and worker-1's time in no phase
        assert sum(spent.values()) == 2 * 7.5 + 1.0
        assert ledger.cost_usd() == pytest.approx((8 + 1.5 + 1.5 + 1) * 0.001 + 4 * 0.002)
    connection = sqlite3.connect(path)
    was = dict(
        connection.execute("SELECT was_phase, SUM(seconds) FROM gpu_seconds WHERE phase = 'lost' GROUP BY 1")
    )
    assert was == {"training": 4.0, "idle": 1.5, None: 1.5}
    assert connection.execute("SELECT ended FROM attempts ORDER BY number").fetchall() == [
        ("killed",),
        ("stopped",),
    ]
    connection.close()


def test_closing_a_killed_attempt_reads_its_bills_once_however_many_workers(tmp_path: Path) -> None:
    """Counted in statements of SQLite's machine: a scan of the bills for each worker took 40 s of a day's."""
    bills, few, many = 2000, 10, 200
    effort = {}
    for count in (few, many):
        with SqliteLedger(tmp_path / f"{count}.sqlite") as ledger:
            workers = [WorkerId(f"worker-{number}") for number in range(count)]
            ledger.begin_attempt(pid=1, host="h", workers=dict.fromkeys(workers, 1.0), now_s=0.0)
            ledger.spend([GpuSpend(workers[n % count], Phase.IDLE, 1.0, 1.0) for n in range(bills)], 300.0)
            steps = []
            ledger.connection.set_progress_handler(lambda counted=steps: counted.append(1), 100)
            ledger.begin_attempt(pid=2, host="h", workers={}, now_s=400.0)
            assert sum(queries.gpu_seconds_by_phase(ledger.connection).values()) == pytest.approx(
                300.0 * count
            )
            effort[count] = len(steps)
    assert effort[many] < 3 * effort[few], effort


def test_seconds_of_an_unknown_worker_are_refused(ledger: SqliteLedger) -> None:
    with pytest.raises(LedgerError, match="begin_attempt"):
        ledger.spend([], 1.0)
    ledger.begin_attempt(pid=1, host="h", workers={WORKER: 1.0}, now_s=0.0)
    with pytest.raises(LedgerError, match="GPU seconds"):
        ledger.spend([GpuSpend(WorkerId("ghost"), Phase.IDLE, 1.0, 1.0)], 1.0)


def test_rollback_must_not_part_what_was_appended_together(ledger: SqliteLedger) -> None:
    attempt = ledger.begin_attempt(pid=1, host="h", workers={}, now_s=0.0)
    write(ledger, [STARTED, [TRAINED, STEP]])
    digest = queries.digest(ledger.connection)
    for position, message in ((6, "must not part"), (8, "the ledger ends at 7"), (-1, "cannot roll back")):
        with pytest.raises(LedgerError, match=message):
            ledger.rollback(position, attempt)
    assert (ledger.position(), queries.digest(ledger.connection)) == (7, digest)


def test_prompts_that_nothing_was_kept_of_are_no_longer_the_runs(ledger: SqliteLedger) -> None:
    first, other = {"data.train": ["a"]}, {"data.train": ["b"]}
    for prompts in (first, other, first):  # the second attempt is killed before its checkpoint
        attempt = ledger.begin_attempt(pid=1, host="h", workers={}, now_s=0.0)
        position = min(ledger.position(), len(STARTED))
        ledger.rollback(position, attempt)
        if queries.prompts_at(ledger.connection, position) != prompts:
            ledger.record_prompts(prompts)
        write(ledger, [[TRAINED, STEP]] if position else [STARTED])
    ledger.rollback(position, attempt)  # within an attempt, whose prompts stay
    assert queries.prompts_at(ledger.connection, ledger.position() + 1) == first


def test_readers_see_the_ledger_while_it_is_written(tmp_path: Path) -> None:
    with whole_ledger(tmp_path, seed=3, iterations=1) as ledger:
        reader = open_readonly(tmp_path / "ledger.sqlite")
        with pytest.raises(sqlite3.OperationalError, match="readonly"):
            reader.execute("DELETE FROM prompts")
        write(ledger, [[CommitRejected(None, "stale epoch")]])
        assert reader.execute("SELECT COUNT(*) FROM rejected WHERE rollout IS NULL").fetchone()[0] == 1
        reader.close()


def test_a_foreign_or_missing_file_is_named(tmp_path: Path) -> None:
    path = tmp_path / "ledger.sqlite"
    with pytest.raises(LedgerError, match=r"ledger\.sqlite: no ledger here"):
        open_readonly(path)
    path.write_bytes(b"not a database, and long enough to have a header " * 4)
    for open_it in (SqliteLedger, open_readonly):
        with pytest.raises(LedgerError, match="cannot be read as a SQLite database"):
            open_it(path)
    path.unlink()
    connection = sqlite3.connect(path)
    connection.execute("CREATE TABLE another (x)")
    connection.close()
    for open_it in (SqliteLedger, open_readonly):
        with pytest.raises(LedgerError, match="no ledger of this Spotlight"):
            open_it(path)
    with pytest.raises(StoreError, match="missing"):
        SqliteLedger(tmp_path / "missing" / "ledger.sqlite")
