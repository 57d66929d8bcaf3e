"""The durable ledger in SQLite: the controller's records, the GPU-seconds they cost, and incidents.

Invariants:

- Records are numbered 1, 2, 3, ... without gaps. ``ledger_schema.py`` refuses rows that break the accounting.
- :meth:`SqliteLedger.append` is atomic; on return the records are on disk (WAL, ``synchronous=FULL``).
- Single writer: the holder of the run directory's lock (``store/run_directory.py``).
- A lock that another program holds on the file is waited for, however long (``ledger_file.py``).

To resume from a checkpoint at position p, :meth:`begin_attempt` closes the dead attempt, :meth:`rollback`
removes the records after p, then the controller replays them under the same numbers.
"""

from __future__ import annotations

import json
import logging
import sqlite3
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from operator import attrgetter
from pathlib import Path
from typing import Self, TypeAlias, assert_never

from spotlight.scheduler.records import (
    CommitRejected,
    PromptSeen,
    Record,
    RolloutIssued,
    SampleDropped,
    SampleEvaluated,
    SampleExplored,
    SampleFinished,
    SampleScored,
    SampleTrained,
    StepApplied,
    VersionPublished,
)
from spotlight.scheduler.types import Filler, Lease, Phase, Rollout, RolloutId, WorkerId
from spotlight.store.ledger import ledger_queries as queries
from spotlight.store.ledger.course_changes import CourseChange, course_words
from spotlight.store.ledger.ledger_digest import RunningDigest
from spotlight.store.ledger.ledger_file import LedgerFile
from spotlight.store.ledger.ledger_schema import CUT, RECORD_TABLES, Ending, Incident, RolloutOutcome
from spotlight.store.run_directory import ABSENT
from spotlight.store.store_errors import LedgerError
from spotlight_rewards.base.prompts import PromptId

_Values: TypeAlias = tuple[str | int | float | None, ...]

_OUTCOME = (
    "INSERT INTO outcomes (seq, rollout, purpose, kind, optimizer_step, reason, detail) "
    "VALUES (?1, ?2, COALESCE((SELECT purpose FROM rollouts WHERE id = ?2), 'never issued'), ?3, ?4, ?5, ?6)"
)


log = logging.getLogger("spotlight")


@dataclass(frozen=True, slots=True)
class GpuSpend:
    """Seconds one worker's GPU spent in one phase, and the price at that time."""

    worker: WorkerId
    phase: Phase
    seconds: float
    price_usd_h: float


@dataclass(frozen=True, slots=True)
class GrantedLease:
    """A lease at ``granted_at``, seconds since the epoch; ``resume``: steps other than 0 to begin at."""

    lease: Lease
    resume: Mapping[RolloutId, int]
    granted_at: float


class SqliteLedger:
    """The sole writer of ``ledger.sqlite``. Use as a context manager, or :meth:`close` it.

    Attributes:
        connection: for :mod:`~spotlight.store.ledger.ledger_queries`.
    """

    def __init__(
        self,
        path: Path,
        note: Callable[[str], None] = log.warning,
        keep_alive: Callable[[], None] = lambda: None,
    ) -> None:
        """Open or create the ledger.

        Args:
            note: told once when a lock is waited for, and when it is free.
            keep_alive: called about once a second while a lock is waited for.

        Raises:
            LedgerError: not a ledger of this version.
            StoreError: the file cannot be created or written.
        """
        self._path, self.file = path, LedgerFile(path, note, keep_alive)
        self.connection = self.file.connection
        with self.file.opened():
            self._position = queries.position(self.connection)
            self._cost_usd = queries.cost_usd(self.connection)
        self._attempt: int | None = None
        self._digest = RunningDigest()

    def append(self, records: Sequence[tuple[int, Record]], granted: Sequence[GrantedLease] = ()) -> None:
        """Write numbered records, and leases granted meanwhile, in one transaction.

        On return they are on disk. A lease that is there already (its grant was resent) stays as it is.

        Raises:
            LedgerError: the numbers do not continue :meth:`position`, or the records break the accounting.
            StoreError: the disk is full or not writable.
        """
        if not records and not granted:
            return
        expected = self._position + 1
        numbers = f"records {expected} to {self._position + len(records)}"
        with self.file.transaction(f"{numbers} (a step and the samples it trained go together)"):
            for number, record in records:
                if number != expected:
                    raise LedgerError(
                        f"{self._path}: record {number} where {expected} was expected: "
                        f"{record!r}. Roll the ledger back to the controller's position first."
                    )
                self._insert(number, record)
                expected += 1
            if granted:
                self._insert_leases(granted, expected - 1)
        self._position = expected - 1

    def _insert(self, number: int, record: Record) -> None:
        try:
            for statement, values in _rows(number, record):
                self.connection.execute(statement, values)
        except sqlite3.IntegrityError as error:
            raise LedgerError(
                f"{self._path}: record {number} breaks the accounting: {error}: {record!r}"
            ) from error

    def _insert_leases(self, granted: Sequence[GrantedLease], position: int) -> None:
        attempt = self._current_attempt()
        self.connection.executemany(
            "INSERT INTO leases (rollout, attempt, lease, position, at, worker, epoch, from_step) "
            "VALUES (?, ?, ?, ?, ?, ?, ?, ?) ON CONFLICT (rollout, attempt, lease) DO NOTHING",
            [
                (rollout, attempt, lease.id, position, each.granted_at, lease.worker, lease.epoch, step)
                for each in granted
                for lease in (each.lease,)
                for rollout in lease.rollouts
                for step in (each.resume.get(rollout, 0),)
            ],
        )

    def position(self) -> int:
        """Number of the last record; 0 in an empty ledger."""
        return self._position

    def begin_attempt(self, *, pid: int, host: str, workers: Mapping[WorkerId, float], now_s: float) -> int:
        """Begin billing this process (workers at USD per hour, from ``now_s`` since the epoch).

        Attempts that died end as ``killed`` at their last billing entry; worker time without a phase is lost.

        Returns:
            The attempt's number, from 1.
        """
        with self.file.transaction("the account of a new attempt"):
            self._close_dead_attempts()
            count = self.connection.execute("SELECT COALESCE(MAX(number), 0) FROM attempts").fetchone()[0]
            number = int(count) + 1
            begun = {"number": number, "pid": pid, "host": host, "started_at": now_s, "seen_at": now_s}
            self.file.insert_all("attempts", [begun])
            self.file.insert_all("attempt_workers", _joined(number, workers, now_s))
        self._attempt = number
        self._cost_usd = queries.cost_usd(self.connection)
        return number

    def _close_dead_attempts(self) -> None:
        self.connection.execute(
            """
            WITH spent AS MATERIALIZED (  -- one scan of the table, not one for each worker
                SELECT attempt, worker, SUM(seconds) AS accounted FROM gpu_seconds
                WHERE attempt IN (SELECT number FROM attempts WHERE ended IS NULL) GROUP BY attempt, worker)
            INSERT INTO gpu_seconds (attempt, worker, position, phase, was_phase, seconds, price_usd_h)
            SELECT attempt, worker, :position, 'lost', NULL, unaccounted, price_usd_h FROM (
                SELECT known.attempt, known.worker, price_usd_h,
                    COALESCE(left_at, seen_at) - joined_at - COALESCE(accounted, 0) AS unaccounted
                FROM attempt_workers AS known JOIN attempts ON attempts.number = known.attempt
                LEFT JOIN spent ON spent.attempt = known.attempt AND spent.worker = known.worker
                WHERE ended IS NULL)
            WHERE unaccounted > 0
            """,
            {"position": self._position},
        )
        self.connection.execute(
            "UPDATE attempts SET ended = ?, ended_at = seen_at WHERE ended IS NULL", (Ending.KILLED,)
        )

    def start_billing(self, workers: Mapping[WorkerId, float], now_s: float) -> None:
        """Start billing workers (USD per hour) from ``now_s``, seconds since the epoch."""
        attempt = self._current_attempt()
        with self.file.transaction(f"workers that join attempt {attempt}"):
            self.file.insert_all("attempt_workers", _joined(attempt, workers, now_s))

    def stop_billing(self, workers: Iterable[WorkerId], now_s: float) -> None:
        """Stop billing workers; all seconds up to ``now_s`` need a phase."""
        attempt = self._current_attempt()
        with self.file.transaction(f"workers that leave attempt {attempt}"):
            self.connection.executemany(
                "UPDATE attempt_workers SET left_at = MAX(joined_at, ?) WHERE attempt = ? AND worker = ?",
                [(now_s, attempt, worker) for worker in workers],
            )

    def record_incident(self, kind: Incident, subject: str, *, spot: bool, detail: str, now_s: float) -> None:
        """Record an incident of a node, a worker or the learner."""
        row = {"at": now_s, "kind": kind, "subject": subject, "spot": spot, "detail": detail}
        self._record(f"an incident of attempt {self._attempt}", "incidents", [row])

    def spend(self, spends: Sequence[GpuSpend], now_s: float) -> None:
        """Bill GPU-seconds, and mark the attempt alive at ``now_s``.

        Call it after appending the work's records, and right before and after a checkpoint, so that a
        rollback to it finds exactly the seconds lost.
        """
        attempt = self._current_attempt()
        with self.file.transaction(f"the GPU seconds of attempt {attempt}"):
            here = {"attempt": attempt, "position": self._position}
            self.file.insert_all("gpu_seconds", [here | asdict(spend) for spend in spends])
            self.connection.execute(
                "UPDATE attempts SET seen_at = MAX(seen_at, ?) WHERE number = ?", (now_s, attempt)
            )
        self._cost_usd += sum(spend.seconds * spend.price_usd_h for spend in spends) / 3600

    def fill(self, iteration: int, filled_s: Mapping[Filler, float]) -> None:
        """Record what filled otherwise idle GPU-seconds; they are billed in their phases too.

        Call it after appending the records of that work.
        """
        here = {"position": self._position, "iteration": iteration}
        rows = [{**here, "filler": filler, "seconds": seconds} for filler, seconds in filled_s.items()]
        self._record(f"what filled GPUs in iteration {iteration}", "filled_seconds", rows)

    def record_scorers(self, scored_by: Mapping[str, str]) -> None:
        """Record what gives the current attempt's scores, by reward. Call it after the rollback."""
        here = {"position": self._position}
        rows = [{**here, "reward": reward, "scored_by": scorer} for reward, scorer in scored_by.items()]
        self._record(f"what scores in attempt {self._attempt}", "scorers", rows)

    def record_prompts(self, prompts: Mapping[str, Sequence[PromptId]]) -> None:
        """Record the prompts of the run's files, by key. Call it after the rollback."""
        here = {"position": self._position}
        rows = [{**here, "key": key, "prompts": json.dumps(ids)} for key, ids in prompts.items()]
        self._record(f"the prompts of attempt {self._attempt}", "prompt_files", rows)

    def record_course(
        self, position: int, iteration: int, changes: Mapping[str, tuple[object, object]], now_s: float
    ) -> list[str]:
        """Record what differs from ``iteration``, whose first record follows ``position``, on.

        Changes recorded there or later are forgotten: they were not trained with, or are undone.

        Args:
            changes: former and new value by key; :data:`~spotlight.store.run_directory.ABSENT`: none.

        Returns:
            The changes in words.
        """
        attempt = self._current_attempt()
        recorded = [CourseChange(iteration, position, key, was, now) for key, (was, now) in changes.items()]
        with self.file.transaction(f"what changes from iteration {iteration} on"):
            self.connection.execute("DELETE FROM course_changes WHERE position >= ?", (position,))
            for change in recorded:
                both = {"was": change.was, "now": change.now}.items()
                texts = {name: None if value == ABSENT else json.dumps(value) for name, value in both}
                where = {"attempt": attempt, "position": position, "iteration": iteration}
                self.file.insert_all("course_changes", [{**where, "key": change.key, **texts}])
                said = {"kind": Incident.COURSE_CHANGED, "subject": change.key, "detail": change.words}
                self.file.insert_all("incidents", [{"attempt": attempt, "at": now_s, "spot": 0, **said}])
        return course_words(recorded)

    def end_attempt(self, ending: Ending, now_s: float = 0.0) -> None:
        """Stop billing at the last entry or ``now_s``, whichever is later; all seconds need a phase."""
        attempt = self._current_attempt()
        with self.file.transaction(f"the end of attempt {attempt}"):
            self.connection.execute(
                "UPDATE attempts SET ended = ?1, ended_at = MAX(seen_at, ?2), seen_at = MAX(seen_at, ?2) "
                "WHERE number = ?3",
                (ending, now_s, attempt),
            )
        self._attempt = None

    def _current_attempt(self) -> int:
        if self._attempt is None:
            raise LedgerError(f"{self._path}: no attempt is open; call begin_attempt first.")
        return self._attempt

    def rollback(self, position: int, attempt: int) -> int:
        """Delete the records after ``position`` (a checkpoint's); mark the GPU-seconds they cost as lost.

        Args:
            attempt: the current one; it loses only training, billed for a checkpoint never committed.

        Returns:
            The number of records deleted.

        Raises:
            LedgerError: ``position`` is beyond the ledger, or inside one append.
        """
        forgotten = self._position - position
        if position < 0 or forgotten < 0:
            raise LedgerError(
                f"{self._path}: cannot roll back to record {position}: the ledger ends at {self._position}. "
                "The checkpoint belongs to another ledger; restore both from the same copy of the run."
            )
        with self.file.transaction(
            f"a rollback to record {position} (it must not part what was appended together)"
        ):
            for table in reversed(RECORD_TABLES):
                self.connection.execute(f"DELETE FROM {table} WHERE seq > ?", (position,))
            self.connection.execute(
                "UPDATE gpu_seconds SET was_phase = phase, phase = 'lost' "
                "WHERE position > ? AND (attempt <> ? OR phase = 'training') AND phase <> 'lost'",
                (position, attempt),
            )
            self.connection.execute("DELETE FROM filled_seconds WHERE position > ?", (position,))
            self.connection.execute(
                "DELETE FROM prompt_files WHERE position >= ? AND attempt <> ?", (position, attempt)
            )
            self.connection.execute(
                "UPDATE gpu_seconds SET position = ?1 WHERE position > ?1 AND attempt = ?2",
                (position, attempt),
            )
            both = {"from_position": self._position, "to_position": position}
            self.file.insert_all("rollbacks", [{"attempt": attempt, **both}])
        self._position = position
        self._digest.forget_after(position)
        return forgotten

    def cut_after(self, position: int) -> None:
        """Leave the records up to a checkpoint and the work on them: in a copy, which a fork goes on from."""
        (self._attempt,) = self.connection.execute(
            "SELECT COALESCE((SELECT attempt FROM checkpoints WHERE position = ?1 ORDER BY id DESC LIMIT 1), "
            "(SELECT MAX(attempt) FROM gpu_seconds WHERE position <= ?1))",
            (position,),
        ).fetchone()
        with self.file.transaction(f"what is left of a run's ledger at record {position}"):
            for statement in CUT:
                self.connection.execute(statement, {"position": position, "attempt": self._attempt})
        self._position = position
        self._digest.forget_after(0)

    def digest_at(self, position: int) -> str:
        """The digest that a checkpoint at ``position`` names; see ``ledger_digest.py``."""
        with self.file.reading():
            return self._digest.at(self.connection, position)

    def record_checkpoint(self, position: int, iteration: int) -> None:
        """Record that a checkpoint was committed."""
        row = {"position": position, "iteration": iteration}
        self._record(f"the checkpoint at record {position}", "checkpoints", [row])

    def require_sound(self) -> None:
        """Read the whole file. Raises LedgerError if it is damaged."""
        with self.file.reading():
            damages = queries.file_damages(self.connection)
        if damages:
            raise queries.damaged(self._path, "; ".join(damages[:3]))

    def cost_usd(self) -> float:
        """Cost of all GPU-seconds, lost ones included. Constant time: it is asked for every few seconds."""
        return self._cost_usd

    def close(self) -> None:
        """Close the database; nothing is buffered."""
        self.connection.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _record(self, what: str, table: str, rows: Iterable[Mapping[str, object]]) -> None:
        """Insert rows of the current attempt."""
        attempt = self._current_attempt()
        with self.file.transaction(what):
            self.file.insert_all(table, [{"attempt": attempt, **row} for row in rows])


_COLUMNS = attrgetter(*Rollout.__slots__)
"""A rollout's fields, which are in the order of its table's columns."""


def _joined(attempt: int, workers: Mapping[WorkerId, float], now_s: float) -> list[dict[str, object]]:
    since = {"attempt": attempt, "joined_at": now_s}
    return [{**since, "worker": worker, "price_usd_h": price} for worker, price in workers.items()]


def _rows(number: int, record: Record) -> Iterator[tuple[str, _Values]]:
    match record:
        case PromptSeen(prompt):
            metadata = json.dumps(dict(prompt.metadata), sort_keys=True, ensure_ascii=False)
            yield "INSERT INTO prompts VALUES (?, ?, ?, ?)", (number, prompt.id, prompt.text, metadata)
        case RolloutIssued(rollout):
            yield "INSERT INTO rollouts VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)", (number, *_COLUMNS(rollout))
        case SampleFinished(rollout_id, version, worker, epoch, preview):
            yield "INSERT INTO samples VALUES (?, ?, ?, ?, ?)", (number, rollout_id, version, worker, epoch)
            if preview is not None:
                yield "INSERT INTO kept_previews VALUES (?, ?)", (rollout_id, preview)
        case SampleScored(rollout_id, scores):
            if not scores:
                raise LedgerError(
                    f"record {number} has no scores: {record!r}; drop the sample with a reason instead."
                )
            for name, value in scores.items():
                yield "INSERT INTO rewards VALUES (?, ?, ?, ?)", (number, rollout_id, name, float(value))
        case SampleTrained(rollout_id, step):
            yield _OUTCOME, (number, rollout_id, RolloutOutcome.TRAINED, step, None, None)
        case SampleDropped(rollout_id, reason, detail):
            yield _OUTCOME, (number, rollout_id, RolloutOutcome.DROPPED, None, reason, detail)
        case SampleEvaluated(rollout_id):
            yield _OUTCOME, (number, rollout_id, RolloutOutcome.EVALUATED, None, None, None)
        case SampleExplored(rollout_id):
            yield _OUTCOME, (number, rollout_id, RolloutOutcome.EXPLORED, None, None, None)
        case StepApplied(version, iteration, update, samples, loss, grad_norm):
            yield (
                "INSERT INTO optimizer_steps VALUES (?, ?, ?, ?, ?, ?, ?)",
                (number, version, iteration, update, samples, loss, grad_norm),
            )
        case VersionPublished(version):
            yield "INSERT INTO versions VALUES (?, ?)", (number, version)
        case CommitRejected(rollout_or_none, reason_text):
            yield "INSERT INTO rejected VALUES (?, ?, ?)", (number, rollout_or_none, reason_text)
        case _:
            assert_never(record)
