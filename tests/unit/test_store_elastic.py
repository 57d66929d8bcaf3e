"""The account of a cluster: workers that come and go, what befell it, and how that is recorded."""

from __future__ import annotations

import sqlite3
import tempfile
from bisect import bisect_left
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from store_history import SCRATCH, history, write

from spotlight.scheduler.records import Record, SampleScored, VersionPublished
from spotlight.scheduler.types import Filler, Lease, LeaseId, Phase, PolicyVersion, RolloutId, WorkerId
from spotlight.store.ledger import ledger_queries as queries
from spotlight.store.ledger.history import read_history
from spotlight.store.ledger.ledger_audit import AuditLimits, audit
from spotlight.store.ledger.ledger_schema import SCHEMA_VERSION, Ending, Incident
from spotlight.store.ledger.sqlite_ledger import GpuSpend, GrantedLease, SqliteLedger
from spotlight.store.store_errors import LedgerError

T0 = 1000.0
TOLD_S = 25
"""Last second that a killed head recorded."""


@pytest.fixture
def run() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(dir=SCRATCH) as name:
        yield make(Path(name))


def make(parent: Path) -> Path:
    (parent / "run" / "checkpoints").mkdir(parents=True)
    return parent / "run"


def begin(ledger: SqliteLedger, now_s: float = T0) -> int:
    return ledger.begin_attempt(pid=1, host="h", workers={}, now_s=now_s)


def spend(ledger: SqliteLedger, worker: str, seconds: float, now_s: float, price: float = 3600.0) -> None:
    ledger.spend([GpuSpend(WorkerId(worker), Phase.ROLLOUT, seconds, price)], now_s)


@given(
    lives=st.lists(st.tuples(st.integers(0, 20), st.integers(0, 20)), max_size=8),
    late_s=st.integers(0, 5),
    killed=st.booleans(),
)
@settings(max_examples=40)
def test_bills_add_up_whoever_comes_and_goes(lives: list[tuple[int, int]], late_s: int, killed: bool) -> None:
    """Each worker is billed from its first second to after its last; a killed head tells neither."""
    end_s = TOLD_S + late_s
    with tempfile.TemporaryDirectory(dir=SCRATCH) as name:
        run = make(Path(name))
        with SqliteLedger(run / "ledger.sqlite") as ledger:
            begin(ledger)
            for second in range(end_s + 1):
                now_s = T0 + second
                for number, (first, length) in enumerate(lives):
                    worker = WorkerId(f"w{number}")
                    if second == first:
                        ledger.start_billing({worker: 3600.0}, now_s)
                    if first < second <= first + length and not (killed and second > TOLD_S):
                        spend(ledger, worker, 1.0, now_s)
                    if second == first + length:
                        ledger.stop_billing([worker], now_s)
            if killed:
                ledger.spend([], T0 + end_s)
            else:
                ledger.end_attempt(Ending.FINISHED, T0 + end_s)
        with SqliteLedger(run / "ledger.sqlite") as ledger:
            begin(ledger, T0 + 100)
            ledger.end_attempt(Ending.FINISHED, T0 + 100)
        report = audit(run, AuditLimits())
        assert report.ok, report.violations
        bill = report.attempts[0]
        there_s = sum(max(0, min(first + length, end_s) - first) for first, length in lives)
        assert bill.ended is (Ending.KILLED if killed else Ending.FINISHED)
        assert bill.billed_s == pytest.approx(there_s)
        assert bill.accounted_s == pytest.approx(there_s)
        assert report.cost_usd == pytest.approx(there_s)


def test_a_killed_attempt_bills_nobody_beyond_when_it_was_last_seen(run: Path) -> None:
    with SqliteLedger(run / "ledger.sqlite") as ledger:
        begin(ledger)
        ledger.start_billing({WorkerId("stays"): 1.0, WorkerId("went"): 1.0}, T0 + 10)
        spend(ledger, "went", 5.0, T0 + 15)
        ledger.stop_billing([WorkerId("went")], T0 + 16)
        ledger.spend([], T0 + 30)
    with SqliteLedger(run / "ledger.sqlite") as ledger:
        begin(ledger, T0 + 500)
        assert queries.gpu_seconds_by_phase(ledger.connection) == {
            **dict.fromkeys(Phase, 0.0),
            Phase.ROLLOUT: 5.0,
            Phase.LOST: 21.0,  # 20 of who stayed, 1 of who went
        }


def test_seconds_that_were_not_reported_are_found(run: Path) -> None:
    with SqliteLedger(run / "ledger.sqlite") as ledger:
        begin(ledger)
        ledger.start_billing({WorkerId("w"): 1.0}, T0)
        spend(ledger, "w", 40.0, T0 + 100)
        ledger.stop_billing([WorkerId("w")], T0 + 100)
        ledger.end_attempt(Ending.FINISHED, T0 + 200)
    assert [violation.check for violation in audit(run, AuditLimits()).violations] == ["billing"]


def test_a_worker_starts_being_billed_once_and_is_billed_only_then(run: Path) -> None:
    with SqliteLedger(run / "ledger.sqlite") as ledger:
        with pytest.raises(LedgerError, match="begin_attempt first"):
            ledger.start_billing({WorkerId("w"): 1.0}, T0)
        begin(ledger)
        ledger.start_billing({WorkerId("w"): 1.0}, T0)
        with pytest.raises(LedgerError, match="workers that join attempt 1"):
            ledger.start_billing({WorkerId("w"): 2.0}, T0 + 1)
        with pytest.raises(LedgerError, match="GPU seconds of attempt 1"):
            spend(ledger, "stranger", 1.0, T0 + 1)
        ledger.stop_billing([WorkerId("w")], T0 - 5)  # a clock that was set back
        ledger.end_attempt(Ending.FINISHED, T0 + 1)


J, N, C, L, R = (
    Incident.NODE_JOINED,
    Incident.NODE_NOTICED,
    Incident.NOTICE_CANCELLED,
    Incident.NODE_LOST,
    Incident.NODE_RETURNED,
)


@pytest.mark.parametrize(
    ("story", "expected"),
    [
        ([], (0, 0)),
        ([J], (0, 0)),
        ([J, L], (1, 0)),
        ([J, N, L], (1, 1)),
        ([J, N, N, L], (1, 1)),
        ([J, N, C, L], (1, 0)),
        ([J, N, C, N, L], (1, 1)),
        ([J, N, L, J, L], (2, 1)),
        ([J, N, L, J, N, L], (2, 2)),
        ([J, N, J, L], (1, 0)),
        ([J, N], (0, 0)),
        ([J, N, R, L], (0, 0)),
        ([J, N, R, C, L], (1, 0)),
        ([J, N, R, L, J, N, L], (1, 1)),
    ],
)
def test_preemptions_are_counted_with_what_was_announced(
    run: Path, story: list[Incident], expected: tuple[int, int]
) -> None:
    with SqliteLedger(run / "ledger.sqlite") as ledger:
        begin(ledger)
        for at_s, kind in enumerate(story):
            # Another spot node's notice, and a reserved node's whole story, are none of its own.
            ledger.record_incident(N, "other", spot=True, detail="", now_s=T0 + at_s)
            ledger.record_incident(kind, "reserved", spot=False, detail="", now_s=T0 + at_s)
            ledger.record_incident(kind, "s", spot=True, detail="why", now_s=T0 + at_s)
        ledger.end_attempt(Ending.FINISHED, T0 + 100)
    history = read_history(run)
    assert (history.preemptions, history.noticed) == expected
    for kind in set(story):
        assert history.incidents[kind, False] == story.count(kind)


def test_a_notice_of_an_attempt_before_is_none_of_this_one(run: Path) -> None:
    for story in ([J, N], [L]):
        with SqliteLedger(run / "ledger.sqlite") as ledger:
            begin(ledger)
            for kind in story:
                ledger.record_incident(kind, "s", spot=True, detail="", now_s=T0)
            ledger.end_attempt(Ending.FINISHED, T0)
    history = read_history(run)
    assert (history.preemptions, history.noticed) == (1, 0)


def test_incidents_survive_a_rollback_and_need_an_attempt(run: Path) -> None:
    with SqliteLedger(run / "ledger.sqlite") as ledger:
        with pytest.raises(LedgerError, match="begin_attempt first"):
            ledger.record_incident(L, "s", spot=True, detail="", now_s=T0)
        number = begin(ledger)
        ledger.record_incident(L, "s", spot=True, detail="", now_s=T0)
        ledger.rollback(0, number)
        ledger.end_attempt(Ending.FINISHED, T0)
    assert read_history(run).preemptions == 1


def test_prices_are_those_that_were_paid(run: Path) -> None:
    with SqliteLedger(run / "ledger.sqlite") as ledger:
        begin(ledger)
        ledger.start_billing({WorkerId("a"): 3.0, WorkerId("b"): 1.0, WorkerId("c"): 9.0}, T0)
        spend(ledger, "a", 1.0, T0 + 1, price=3.0)
        spend(ledger, "b", 1.0, T0 + 1, price=1.0)
        spend(ledger, "b", 1.0, T0 + 2, price=1.0)
        spend(ledger, "c", 0.0, T0 + 2, price=9.0)
    assert read_history(run).prices_usd_h == (1.0, 3.0)


def test_what_filled_idle_time_adds_up_without_what_is_undone(run: Path) -> None:
    with SqliteLedger(run / "ledger.sqlite") as ledger:
        begin(ledger)
        ledger.fill(0, {Filler.NEXT: 2.0, Filler.TRAINING: 1.5})
        ledger.fill(1, {Filler.NEXT: 3.0})
        ledger.append([(1, VersionPublished(PolicyVersion(0)))])
        ledger.fill(2, {Filler.NEXT: 50.0})
        ledger.rollback(0, 1)
    with SqliteLedger(run / "ledger.sqlite") as ledger:
        begin(ledger)
        ledger.fill(1, {Filler.NEXT: 0.5})
        ledger.fill(2, {})
        with pytest.raises(LedgerError, match="what filled GPUs in iteration 3"):
            ledger.fill(3, {Filler.NEXT: -1.0})
    filled = {Filler.TRAINING: 1.5, Filler.NEXT: 5.5}
    assert read_history(run).filled_s == filled
    assert audit(run, AuditLimits()).filled_s == filled


def with_detail(record: Record) -> Record:
    """A score with a second curve of the reward ``strict``, and one of a reward whose name begins alike."""
    if not isinstance(record, SampleScored):
        return record
    return replace(record, scores={**record.scores, "strict/graded/2": 0.5, "stric/graded": 0.5})


@given(
    seed=st.integers(0, 99),
    attempts=st.lists(st.tuples(st.integers(1, 60), st.integers(0, 60), st.sampled_from("ab")), max_size=6),
)
@settings(max_examples=40)
def test_every_score_has_what_gave_it_whatever_is_undone(
    seed: int, attempts: list[tuple[int, int, str]]
) -> None:
    """Each attempt undoes so many transactions, writes others, and is scored by a model of this name."""
    planned, ends, models = history(seed, iterations=3), [0], [""]
    with tempfile.TemporaryDirectory(dir=SCRATCH) as name:
        run = make(Path(name))
        with SqliteLedger(run / "ledger.sqlite") as ledger:
            for writes, undone, model in attempts:
                number = begin(ledger)
                kept = max(len(ends) - undone, 1)
                del ends[kept:], models[kept:]
                ledger.rollback(ends[-1], number)
                ledger.record_scorers({"strict": model})
                for transaction in planned[kept - 1 : kept - 1 + writes]:
                    write(ledger, [[with_detail(each) for each in transaction]])
                    ends.append(ledger.position())
                    models.append(model)
        with closing(sqlite3.connect(run / "ledger.sqlite")) as connection:
            found = connection.execute(
                "SELECT seq, scored_by FROM scores JOIN rewards "
                "ON rewards.rollout = scores.rollout AND name = reward WHERE name LIKE 'strict%'"
            ).fetchall()
            scored = connection.execute("SELECT COUNT(*) FROM scores WHERE scored_by IS NOT NULL").fetchone()[
                0
            ]
        assert scored == len(found)
        for seq, scorer in found:
            assert scorer == models[bisect_left(ends, seq)]
        assert set(audit(run, AuditLimits()).scorers) == ({"strict"} if attempts else set())


ADDED = {
    2: "DROP TABLE kept_previews; DROP TABLE leases; DROP VIEW scores; DROP TABLE scorers;"
    " DROP TABLE filled_seconds",
    3: "DROP TABLE kept_previews; DROP TABLE leases; DROP VIEW scores; DROP TABLE scorers",
    4: "DROP TABLE kept_previews; DROP TABLE leases",
    6: "DROP TABLE kept_previews; DROP TABLE leases",
    7: "DROP TABLE kept_previews",
    8: "DROP TABLE kept_previews",
    9: "",
    11: "",
}


@pytest.mark.parametrize("version", ADDED)
def test_a_ledger_of_a_version_before_is_read_as_it_is_and_upgraded_to_be_written(
    run: Path, version: int
) -> None:
    with SqliteLedger(run / "ledger.sqlite") as ledger:
        begin(ledger)
    with closing(sqlite3.connect(run / "ledger.sqlite")) as connection:
        connection.executescript(
            f"DROP TABLE checkpoints; DROP TABLE course_changes; DROP TABLE prompt_files; {ADDED[version]};"
            f"PRAGMA user_version = {version};"
        )
    before = read_history(run)
    assert before.filled_s == {}
    assert audit(run, AuditLimits()).scorers == {}
    with SqliteLedger(run / "ledger.sqlite") as ledger:
        begin(ledger)
        ledger.fill(0, {Filler.NEXT: 1.0})
        ledger.record_scorers({"geneval": "a detector"})
        ledger.record_incident(Incident.NODE_DRAINED, "spot-1", spot=True, detail="", now_s=T0)
        ledger.append([], [granted(1, "spot-1/0")])
    after = read_history(run)
    assert after.filled_s == {Filler.NEXT: 1.0}
    assert audit(run, AuditLimits()).scorers == {"geneval": ("a detector",)}
    assert after.attempts[0].started_at == before.attempts[0].started_at


def granted(number: int, worker: str, **steps: int) -> GrantedLease:
    lease = Lease(LeaseId(number), WorkerId(worker), number + 5, (RolloutId("a"), RolloutId("b")), 0.0)
    return GrantedLease(lease, {RolloutId(name): step for name, step in steps.items()}, T0 + number)


def test_leases_are_written_with_the_records_and_outlast_them(run: Path) -> None:
    published = (1, VersionPublished(PolicyVersion(0)))
    with SqliteLedger(run / "ledger.sqlite") as ledger:
        first = begin(ledger)
        ledger.append([published], [granted(1, "spot-1/0")])
        ledger.append([], [granted(1, "spot-1/0")])  # the grant was resent
        with pytest.raises(LedgerError):
            ledger.append([published], [granted(2, "spot-2/0")])
        ledger.append([], [granted(2, "spot-2/0", b=3)])
        assert ledger.rollback(0, first) == 1
        second = begin(ledger)
        ledger.append([published], [granted(2, "spot-3/0")])
    with closing(sqlite3.connect(run / "ledger.sqlite")) as connection:
        rows = connection.execute(
            "SELECT attempt, lease, position, at, worker, epoch, from_step FROM leases"
            " WHERE rollout = 'b' ORDER BY at, attempt"
        ).fetchall()
    assert rows == [
        (first, 1, 1, T0 + 1, "spot-1/0", 6, 0),
        (first, 2, 1, T0 + 2, "spot-2/0", 7, 3),
        (second, 2, 1, T0 + 2, "spot-3/0", 7, 0),
    ]


def test_the_view_of_scores_is_brought_up_to_date(run: Path) -> None:
    for before in ("DROP VIEW scores", "DROP VIEW scores; CREATE VIEW scores AS SELECT name FROM rewards"):
        SqliteLedger(run / "ledger.sqlite").close()
        with closing(sqlite3.connect(run / "ledger.sqlite")) as connection:
            connection.executescript(before)
        SqliteLedger(run / "ledger.sqlite").close()
        with closing(sqlite3.connect(run / "ledger.sqlite")) as connection:
            assert connection.execute("SELECT scored_by FROM scores").fetchall() == []
            written = connection.execute("PRAGMA schema_version").fetchone()
            SqliteLedger(run / "ledger.sqlite").close()
            assert connection.execute("PRAGMA schema_version").fetchone() == written


def test_a_ledger_of_another_version_is_refused_by_name(run: Path) -> None:
    SqliteLedger(run / "ledger.sqlite").close()
    with closing(sqlite3.connect(run / "ledger.sqlite")) as connection:
        connection.execute("PRAGMA user_version = 1")
    with pytest.raises(LedgerError, match=rf"1\), expected \(\d+, {SCHEMA_VERSION}\)"):
        SqliteLedger(run / "ledger.sqlite")
    with pytest.raises(LedgerError, match="start a run of another name"):
        read_history(run)
