"""Offline audit: recount a run from its ledger's rows; ``audit_checks.py`` lists the checks.

Every issued rollout has one outcome, every billed GPU-second a phase, the database file is sound, and the
newest checkpoint is intact and within the ledger.
"""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Iterable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path

from spotlight.scheduler.types import Filler, Phase
from spotlight.store.checkpoints import Checkpoint, CheckpointStore
from spotlight.store.ledger import ledger_queries as queries
from spotlight.store.ledger.audit_checks import CHECKS
from spotlight.store.ledger.course_changes import CourseChange, course_words, read_course
from spotlight.store.ledger.ledger_digest import RunningDigest
from spotlight.store.ledger.ledger_schema import Ending
from spotlight.store.run_directory import ABSENT, RunPaths, is_confidential
from spotlight.store.store_errors import DamagedCheckpointError

BILLING_TOLERANCE = 0.01
"""Allowed relative difference between an attempt's billed seconds and the sum over its phases."""
BILLING_SLACK_S = 0.05
"""Minimum absolute tolerance, seconds per worker: the clock is read twice."""

_WORK = (Phase.TRAINING, Phase.ROLLOUT, Phase.EVALUATION, Phase.EXPLORATION, Phase.LOST)
"""Phases that filled seconds are billed in; rollouts cut short are billed as lost, but count as filled."""


@dataclass(frozen=True, slots=True)
class AuditLimits:
    """Limits set by the configuration.

    Attributes:
        group_size: None requires only that an iteration's groups have equal size.
        train_samples: trained of each group, if all were scored; None requires only that it is equally many.
        staleness_max: policy versions from generating a sample to the iteration that trains on it.
        leaves: the configuration's dotted keys; empty: not known.
    """

    group_size: int | None = None
    staleness_max: int = 0
    train_samples: int | None = None
    leaves: Mapping[str, object] = field(default_factory=dict)

    @classmethod
    def configured(cls, leaves: Mapping[str, object]) -> AuditLimits:
        """Of a configuration by dotted key; what has no number is not known."""
        group_size, updates, trained = (
            value if isinstance(value, int) else None
            for key in ("rollout.group_size", "learner.updates_per_batch", "algorithm.train_samples")
            for value in (leaves.get(key),)
        )
        # Rollouts started early lag by one published version, which is one iteration's optimizer steps.
        early = leaves.get("pipeline.next_share") not in (None, ABSENT, 0)
        return cls(group_size, (updates or 1) if early else 0, trained or group_size, leaves)

    def by_iteration(self, course: Sequence[CourseChange]) -> str:
        """JSON for the checks: these limits, after those from before each change of the run's course."""
        leaves, limits = dict(self.leaves), [self._row(None)]
        if self.leaves:
            for change in reversed(course):
                leaves[change.key] = change.was
                if limits[0]["until"] == change.iteration:
                    limits.pop(0)
                limits.insert(0, AuditLimits.configured(leaves)._row(change.iteration))
        return json.dumps(limits)

    def _row(self, until: int | None) -> dict[str, int | None]:
        return {
            "until": until,
            "group_size": self.group_size,
            "train_samples": self.train_samples,
            "staleness_max": self.staleness_max,
        }


@dataclass(frozen=True, slots=True)
class Violation:
    """A violated check; ``ids`` lists all affected rollouts, steps, attempts or files."""

    check: str
    broken: str
    ids: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class AttemptBill:
    """GPU-seconds of one attempt: billed (start to end, all workers), accounted for (over phases)."""

    attempt: int
    ended: Ending | None
    workers: int
    billed_s: float
    accounted_s: float

    @property
    def slack_s(self) -> float:
        """Allowed absolute difference, in seconds."""
        return max(BILLING_TOLERANCE * self.billed_s, BILLING_SLACK_S * self.workers)

    @property
    def is_honest(self) -> bool:
        """Whether billed and accounted seconds agree within the tolerance."""
        return abs(self.billed_s - self.accounted_s) <= self.slack_s


@dataclass(frozen=True, slots=True)
class AuditReport:
    """Result of an audit.

    Attributes:
        finished: whether the run finished; if not, rollouts may be in flight.
        position: number of the ledger's last record.
        checkpoint_position: of the newest intact checkpoint; None without one.
        filled_s: GPU-seconds of otherwise idle time.
        scorers: what gave the scores, by reward that says it; several if it changed between attempts.
        course: what changed on the way, in words, by iteration.
        checks: names of all checks made.
    """

    finished: bool
    position: int
    checkpoint_position: int | None
    digest: str
    counts: queries.LedgerCounts
    attempts: tuple[AttemptBill, ...]
    gpu_seconds_by_phase: Mapping[Phase, float]
    filled_s: Mapping[Filler, float]
    scorers: Mapping[str, tuple[str, ...]]
    course: tuple[str, ...]
    cost_usd: float
    checks: tuple[str, ...]
    violations: tuple[Violation, ...]

    @property
    def ok(self) -> bool:
        return not self.violations


def audit(run: Path, limits: AuditLimits, within_s: float | None = None) -> AuditReport:
    """Audit a run directory, also while the run is working.

    Args:
        within_s: of the ledger's queries, as :func:`.ledger_queries.open_readonly` has it.

    Raises:
        LedgerError: there is no ledger, or it cannot be read in full.
        StoreError: the run replaced its checkpoints faster than they can be read.
    """
    paths = RunPaths(run)
    with closing(queries.open_readonly(paths.ledger, within_s)) as connection:
        # Before the ledger's snapshot, which would not hold the records of a checkpoint written during it.
        newest = _newest_checkpoint(paths)
        try:
            return _audit(connection, newest, limits)
        except sqlite3.DatabaseError as error:
            if queries.ran_out_of_time(error):
                raise
            raise queries.damaged(paths.ledger, f"cannot be read to its end: {error}") from error


def _audit(
    connection: sqlite3.Connection, newest: tuple[Checkpoint | None, tuple[str, ...]], limits: AuditLimits
) -> AuditReport:
    with queries.consistent_reading(connection):
        broken_file = _integrity(connection)
        attempts = _attempts(connection)
        finished = bool(attempts) and attempts[-1].ended is Ending.FINISHED
        course = read_course(connection)
        parameters = {"finished": finished, "limits": limits.by_iteration(course)}
        found = [
            Violation(check.name, check.broken, _ids(connection.execute(check.query, parameters)))
            for check in CHECKS
        ]
        position = queries.position(connection)
        committed = None if finished else queries.furthest_checkpoint(connection)
        checkpoint_position, broken_checkpoint = _checkpoint(*newest, position, committed)
        dishonest = tuple(str(bill.attempt) for bill in attempts if not bill.is_honest)
        found += [
            broken_file,
            Violation("billing", "attempts whose billed GPU seconds are not the sum over phases", dishonest),
            _filled(connection, attempts, checkpoint_position or 0),
            _leased(connection),
            _kept(connection),
            _course(course, queries.position(connection), limits.leaves),
            broken_checkpoint,
            _same_ledger(connection, newest[0]),
        ]
        return AuditReport(
            finished=finished,
            position=position,
            checkpoint_position=checkpoint_position,
            digest=queries.digest(connection),
            counts=queries.counts(connection),
            attempts=attempts,
            gpu_seconds_by_phase=queries.gpu_seconds_by_phase(connection),
            filled_s=queries.filled_s(connection),
            scorers=queries.scorers(connection),
            course=tuple(course_words(course)),
            cost_usd=queries.cost_usd(connection),
            checks=tuple(violation.check for violation in found),
            violations=tuple(violation for violation in found if violation.ids),
        )


def _ids(rows: Iterable[Sequence[object]]) -> tuple[str, ...]:
    return tuple(str(row[0]) for row in rows)


def _integrity(connection: sqlite3.Connection) -> Violation:
    damages = queries.file_damages(connection)
    orphans = [f"{table} row {row}" for table, row, _, _ in connection.execute("PRAGMA foreign_key_check")]
    return Violation(
        "integrity", "the ledger's file is damaged, or rows refer to nothing", (*damages, *orphans)
    )


def _attempts(connection: sqlite3.Connection) -> tuple[AttemptBill, ...]:
    rows = connection.execute(
        """
        SELECT number, ended, (SELECT COUNT(*) FROM attempt_workers WHERE attempt = number),
            (SELECT TOTAL(MAX(0.0, COALESCE(left_at, ended_at, seen_at) - joined_at)) FROM attempt_workers
                WHERE attempt = number),
            (SELECT TOTAL(seconds) FROM gpu_seconds WHERE attempt = number)
        FROM attempts ORDER BY number
        """
    )
    return tuple(
        AttemptBill(number, Ending(ended) if ended else None, workers, billed_s, accounted_s)
        for number, ended, workers, billed_s, accounted_s in rows
    )


def _filled(connection: sqlite3.Connection, bills: tuple[AttemptBill, ...], position: int) -> Violation:
    """Check that seconds filled before the newest checkpoint (record ``position``) were billed as work.

    Later ones may still be rolled back.
    """
    ids = []
    for bill in bills:
        filled = queries.filled_s(connection, bill.attempt, position)
        spent = queries.gpu_seconds_by_phase(connection, bill.attempt)
        training = filled.get(Filler.TRAINING, 0.0) - spent[Phase.TRAINING]
        everything = sum(filled.values()) - sum(spent[phase] for phase in _WORK)
        if max(training, everything) > bill.slack_s:
            ids.append(str(bill.attempt))
    return Violation(
        "filled",
        "attempts in which more GPU seconds were filled, by training or in all, than worked",
        tuple(ids),
    )


def _leased(connection: sqlite3.Connection) -> Violation:
    """Check that samples finished since leases are recorded were made under one of theirs."""
    ids: tuple[str, ...] = ()
    if queries.has_table(connection, "leases"):
        rows = connection.execute(
            f"""
            SELECT rollout FROM samples WHERE seq > (SELECT MIN(position) FROM leases) AND NOT EXISTS (
                SELECT 1 FROM leases WHERE leases.rollout = {queries.made_as(connection)}
                    AND leases.worker = samples.worker AND leases.epoch = samples.epoch)
            """
        )
        ids = _ids(rows)
    return Violation("leased", "samples finished by a worker that no lease gave their rollout to", ids)


def _kept(connection: sqlite3.Connection) -> Violation:
    """Check that samples kept from previews are what their rollouts would have made."""
    ids: tuple[str, ...] = ()
    if queries.has_table(connection, "kept_previews"):
        rows = connection.execute(
            """
            SELECT kept.rollout FROM kept_previews AS kept
            JOIN rollouts AS made ON made.id = kept.rollout
            JOIN rollouts AS preview ON preview.id = kept.preview
            LEFT JOIN outcomes ON outcomes.rollout = kept.preview
            WHERE (made.purpose, preview.purpose) IS NOT ('train', 'explore')
                OR outcomes.kind IS NOT 'explored'
                OR (made.iteration, made.prompt, made.seed, made.steps, made.version)
                IS NOT (preview.iteration, preview.prompt, preview.seed, preview.steps, preview.version)
                OR EXISTS (SELECT 1 FROM rewards AS one LEFT JOIN rewards AS other
                    ON other.rollout = kept.preview AND other.name = one.name
                    WHERE one.rollout = kept.rollout AND one.value IS NOT other.value)
            """
        )
        ids = _ids(rows)
    return Violation("kept", "samples kept from a preview that is not their rollout's", ids)


def _course(course: Sequence[CourseChange], position: int, leaves: Mapping[str, object]) -> Violation:
    """Check that changes of the course follow from each other, and lead to the run's configuration.

    A process that dies after it recorded a change, before an iteration began with it, did not make it.
    """
    made = [change for change in course if change.position < position]
    last: dict[str, object] = {}
    ids = []
    for change in made:
        if last.get(change.key, change.was) != change.was:
            ids.append(f"{change.key} at iteration {change.iteration}")
        last[change.key] = change.now
    stated = {key: now for key, now in last.items() if not is_confidential(key)}
    ids += [f"{key} in config.yaml" for key, now in stated.items() if leaves.get(key, now) != now]
    return Violation("course", "changes of keys that do not lead to the run's configuration", tuple(ids))


def _newest_checkpoint(paths: RunPaths) -> tuple[Checkpoint | None, tuple[str, ...]]:
    """The newest intact checkpoint and the damage met."""
    if not paths.checkpoints.is_dir():
        return None, ()
    try:
        checkpoint = CheckpointStore(paths.checkpoints, keep=1).read_newest(lambda newest: newest)
    except (DamagedCheckpointError, FileNotFoundError) as error:
        return None, (str(error),)
    return checkpoint, () if checkpoint is None else tuple(map(str, checkpoint.damages))


def _checkpoint(
    checkpoint: Checkpoint | None, damages: tuple[str, ...], position: int, committed: int | None
) -> tuple[int | None, Violation]:
    broken = "checkpoints that are damaged or missing, or further than the ledger"
    if checkpoint is None:
        if committed is not None and not damages:
            damages = (f"none is here, but one was committed at record {committed}",)
        return None, Violation("checkpoint", broken, damages)
    reached = checkpoint.header.ledger_position
    if reached > position:
        name = checkpoint.directory.name
        damages = (*damages, f"{name} stands at record {reached}, the ledger ends at {position}")
    return reached, Violation("checkpoint", broken, damages)


def _same_ledger(connection: sqlite3.Connection, checkpoint: Checkpoint | None) -> Violation:
    """Check that the ledger is still what the newest checkpoint was written with."""
    ids: tuple[str, ...] = ()
    if checkpoint is not None and (expected := checkpoint.header.ledger_sha256):
        found = RunningDigest().at(connection, checkpoint.header.ledger_position)
        if found != expected:
            ids = (f"{checkpoint.directory.name} names the digest {expected}, the ledger has {found}",)
    return Violation(
        "same-ledger", "checkpoints that were written with another ledger, or another state", ids
    )
