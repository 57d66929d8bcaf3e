"""A run's history (attempts, rollbacks, losses), read from the ledger, safe beside a running writer."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from sqlite3 import Connection

from spotlight.scheduler.types import Filler, Phase
from spotlight.store.ledger import ledger_queries as queries
from spotlight.store.ledger.course_changes import CourseChange, read_course
from spotlight.store.ledger.ledger_schema import Ending, Incident
from spotlight.store.run_directory import RunPaths


@dataclass(frozen=True, slots=True)
class AttemptRecord:
    """One process that worked on the run; ``ended`` is None while it runs, or if it died last."""

    number: int
    pid: int
    host: str
    started_at: float
    seen_at: float
    ended: Ending | None

    @property
    def is_alive(self) -> bool:
        """Whether its process exists; on another host, assumed true."""
        if self.ended is not None:
            return False
        if self.host != socket.gethostname():
            return True
        try:
            os.kill(self.pid, 0)
        except PermissionError:
            return True
        except (ProcessLookupError, OverflowError):
            return False
        return self.pid > 0  # others name groups of processes


@dataclass(frozen=True, slots=True)
class History:
    """A run's past.

    Attributes:
        undone: ledger records rolled back by resumes.
        gpu_seconds_by_phase: every phase is present.
        preemptions: preempted spot nodes, ``noticed`` of them with notice.
        prices_usd_h: distinct prices per worker-hour, ascending.
        filled_s: GPU-seconds of otherwise idle time.
        incidents: counts by (kind, whether it hit a spot node).
        course: what the configuration was changed to on the way, and what the run was forked from.
    """

    attempts: tuple[AttemptRecord, ...]
    undone: int
    gpu_seconds_by_phase: Mapping[Phase, float]
    iterations: int
    counts: queries.LedgerCounts
    cost_usd: float
    preemptions: int
    noticed: int
    prices_usd_h: tuple[float, ...]
    filled_s: Mapping[Filler, float]
    incidents: Mapping[tuple[Incident, bool], int]
    course: tuple[CourseChange, ...]

    @property
    def lost_s(self) -> float:
        """GPU-seconds of lost work."""
        return self.gpu_seconds_by_phase[Phase.LOST]

    @property
    def interruptions(self) -> int:
        """Attempts before the last that did not finish."""
        return sum(attempt.ended is not Ending.FINISHED for attempt in self.attempts[:-1])

    @property
    def state(self) -> str:
        return state_of(self.attempts)

    @property
    def forked_from(self) -> str:
        """``demo at 12``, the run that this one began from; empty: it began by itself."""
        forks = [change for change in self.course if change.key == "name"]
        return f"{forks[-1].was} at {forks[-1].iteration}" if forks else ""


def state_of(attempts: Sequence[AttemptRecord]) -> str:
    """``running``, ``finished``, ``stopped``, ``failed``, ``killed``; ``new`` before any attempt."""
    if not attempts:
        return "new"
    last = attempts[-1]
    if last.ended is not None:
        return last.ended.value
    return "running" if last.is_alive else Ending.KILLED.value


def read_attempts(connection: Connection) -> tuple[AttemptRecord, ...]:
    """All attempts, the oldest first."""
    return tuple(
        AttemptRecord(number, pid, host, started_at, seen_at, Ending(ended) if ended else None)
        for number, pid, host, started_at, seen_at, ended in connection.execute(
            "SELECT number, pid, host, started_at, seen_at, ended FROM attempts ORDER BY number"
        )
    )


def read_history(run: Path, within_s: float | None = None) -> History:
    """Read a run's history, ``within_s`` as :func:`.ledger_queries.open_readonly` has it.

    Raises:
        LedgerError: there is no ledger, or its version is not supported.
    """
    with (
        closing(queries.open_readonly(RunPaths(run).ledger, within_s)) as connection,
        queries.consistent_reading(connection),
    ):
        attempts = read_attempts(connection)
        undone = connection.execute(
            "SELECT COALESCE(SUM(from_position - to_position), 0) FROM rollbacks"
        ).fetchone()[0]
        preemptions, noticed = queries.preemptions(connection)
        return History(
            attempts=attempts,
            undone=int(undone),
            gpu_seconds_by_phase=queries.gpu_seconds_by_phase(connection),
            iterations=queries.iterations(connection),
            counts=queries.counts(connection),
            cost_usd=queries.cost_usd(connection),
            preemptions=preemptions,
            noticed=noticed,
            prices_usd_h=queries.prices_usd_h(connection),
            filled_s=queries.filled_s(connection),
            incidents=queries.incidents(connection),
            course=read_course(connection),
        )
