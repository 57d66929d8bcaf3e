"""The curves of ``metrics.jsonl``, read once and then only what is added, and drawn with bounded points."""

from __future__ import annotations

import os
from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from sqlite3 import Connection
from threading import Lock
from typing import TypeAlias

from spotlight.store.ledger.course_changes import CourseChange, changes_by_iteration, read_course
from spotlight.store.metrics import (
    ITERATION,
    JUDGED,
    SAMPLES_TRAINED,
    STDERR,
    VALIDATION,
    WALL_S,
    MetricsRow,
    parse_row,
)
from spotlight_dashboard.figures import Json, finite, thinned
from spotlight_dashboard.metric_names import VALIDATION_GRADED
from spotlight_dashboard.run_folders import RunFolder
from spotlight_rewards.base.file_errors import StoreError
from spotlight_rewards.base.files import open_regular, read_regular

POINTS_MAX = 600
ALL_POINTS = 10**9
METRICS_BYTES_MAX = 512 << 20
"""A row of training has some 3 kB."""
_QUOTED_GRADED = f'"{VALIDATION_GRADED}"'.encode()
SpentDollars: TypeAlias = tuple[list[int], list[float]] | None
"""(iterations, dollars spent by the end of each); None without a ledger."""


@dataclass(frozen=True, slots=True)
class Booked:
    """What a run's ledger says about its curves.

    Attributes:
        spent: None where it was not asked for, too.
        course: what the run's configuration was changed to on the way, and whose fork it is.
    """

    spent: SpentDollars = None
    course: tuple[CourseChange, ...] = ()


@dataclass(slots=True)
class CurveColumns:
    """A run's metrics by column.

    Attributes:
        iteration, samples, wall_s: of each row.
        at, values: by metric: the rows that have it, and its values.
        skipped: lines that are no rows.
    """

    iteration: array[int] = field(default_factory=lambda: array("q"))
    samples: array[int] = field(default_factory=lambda: array("q"))
    wall_s: array[float] = field(default_factory=lambda: array("d"))
    at: dict[str, array[int]] = field(default_factory=dict)
    values: dict[str, array[float]] = field(default_factory=dict)
    skipped: int = 0

    def take(self, line: bytes) -> None:
        """Add a line of the file."""
        if (row := _row(line)) is None:
            self.skipped += 1
            return
        number = len(self.wall_s)
        self.iteration.append(row.iteration)
        self.samples.append(row.samples_trained)
        self.wall_s.append(row.wall_s)
        for name, value in row.values.items():
            self.at.setdefault(name, array("q")).append(number)
            self.values.setdefault(name, array("d")).append(value)


def _row(line: bytes) -> MetricsRow | None:
    """None if the line is no row."""
    try:
        return parse_row(line)
    except ValueError:
        return None


class CurveReader:
    """Follows one run's ``metrics.jsonl``."""

    def __init__(self, run: RunFolder) -> None:
        self._run = run
        self._lock = Lock()
        self._file = (0, 0)  # inode, bytes read
        self._last = b""  # line read
        self._columns = CurveColumns()

    @contextmanager
    def columns(self) -> Iterator[CurveColumns]:
        """All whole rows so far, which stay as they are within the block.

        A resumed run replaces the file, which is then read again. The new file may have the inode of one that
        was replaced before, so the last line read must still be where it was.
        """
        with self._lock:
            self._follow()
            yield self._columns

    def _follow(self) -> None:
        path = self._run.readable(self._run.paths.metrics)
        if path is None:
            self._start_over(0)
            return
        with open_regular(path) as file:
            status = os.fstat(file.fileno())
            if status.st_size > METRICS_BYTES_MAX:
                raise StoreError(
                    f"{path}: {status.st_size} bytes; expected at most {METRICS_BYTES_MAX} to draw. "
                    "No run writes so many: remove the file."
                )
            file.seek(self._file[1] - len(self._last))
            if status.st_ino != self._file[0] or file.read(len(self._last)) != self._last:
                self._start_over(status.st_ino)
                file.seek(0)
            whole, newline, _cut = file.read().rpartition(b"\n")
            if not newline:
                return
            lines = whole.split(b"\n")
            for line in lines:
                self._columns.take(line)
            self._file = (self._file[0], self._file[1] + len(whole) + len(newline))
            self._last = lines[-1] + newline

    def _start_over(self, inode: int) -> None:
        self._file, self._last, self._columns = (inode, 0), b"", CurveColumns()


def curve_names(columns: CurveColumns) -> Json:
    """The names of all metrics, with the last value of each and whether it has error bars."""
    names = sorted(name for name in columns.at if not name.endswith(STDERR))
    return {
        "names": [
            {
                "name": name,
                "last": finite(columns.values[name][-1]),
                "points": len(columns.at[name]),
                "stderr": f"{name}{STDERR}" in columns.at,
            }
            for name in names
        ],
        "rows": len(columns.wall_s),
        "skipped": columns.skipped,
    }


def curve(columns: CurveColumns, name: str, booked: Booked, points_max: int = POINTS_MAX) -> Json:
    """One metric on all four axes, thinned to about ``points_max``; empty if the run lacks it."""
    rows, values = columns.at.get(name, array("q")), columns.values.get(name, array("d"))
    kept = thinned(values, points_max)
    errors: dict[int, float] = {}
    if f"{name}{STDERR}" in columns.at:
        wanted = {rows[index] for index in kept}
        pairs = zip(columns.at[f"{name}{STDERR}"], columns.values[f"{name}{STDERR}"], strict=True)
        errors = {row: error for row, error in pairs if row in wanted}
    shown = [rows[index] for index in kept]
    return {
        "name": name,
        "points": len(rows),
        "iteration": [columns.iteration[row] for row in shown],
        "samples": [columns.samples[row] for row in shown],
        "hours": [finite(columns.wall_s[row] / 3600) for row in shown],
        "usd": _dollars(booked.spent, [columns.iteration[row] for row in shown], name.startswith(VALIDATION)),
        "y": [finite(values[index]) for index in kept],
        "stderr": [finite(errors.get(row)) for row in shown] if errors else None,
        "changes": list(_changes(columns, booked)),
    }


def _changes(columns: CurveColumns, booked: Booked) -> Iterator[Json]:
    """What changed, and from where on: on each axis what the iterations before had come to."""
    changed = changes_by_iteration(booked.course)
    dollars = _dollars(booked.spent, list(changed), evaluated=True)
    for (iteration, words), usd in zip(changed.items(), dollars, strict=True):
        row = bisect_left(columns.iteration, iteration) - 1
        yield {
            "iteration": iteration,
            "samples": columns.samples[row] if row >= 0 else 0,
            "hours": finite(columns.wall_s[row] / 3600) if row >= 0 else 0.0,
            "usd": usd,
            "words": words,
        }


def read_booked(run: RunFolder, *, dollars: bool = True) -> Booked:
    """From a run's ledger, if there is one. Raises :class:`LedgerError` if it cannot be read."""
    if run.readable(run.paths.ledger) is None:
        return Booked()
    with run.reading_ledger() as connection:
        return Booked(spent_usd(connection) if dollars else None, read_course(connection))


def spent_usd(connection: Connection) -> tuple[list[int], list[float]]:
    """(iterations, dollars spent by the end of each), ascending, lost work included.

    The bills at the first position at or past an iteration's last step are those that pay for it.
    """
    steps = connection.execute(
        "SELECT MAX(seq), iteration FROM optimizer_steps GROUP BY iteration ORDER BY iteration"
    ).fetchall()
    dollars: list[float] = []
    spent, paid_at = 0.0, None
    bills = connection.execute("SELECT position, phase, seconds * price_usd_h FROM gpu_seconds ORDER BY id")
    for position, phase, dollars_h in bills:
        if paid_at is not None and position != paid_at:
            while len(dollars) < len(steps) and steps[len(dollars)][0] <= paid_at:
                dollars.append(spent / 3600)
            paid_at = None
        # A lost second's position may be that of records undone since, which others have taken.
        if phase != "lost" and len(dollars) < len(steps) and steps[len(dollars)][0] <= position:
            paid_at = position
        spent += dollars_h
    dollars += [spent / 3600] * (len(steps) - len(dollars))
    return [iteration for _, iteration in steps], dollars


def validation_rows(run: RunFolder, points_max: int = 300) -> list[Json]:
    """The validations (``graded``, ``strict`` and their errors), thinned; other rows are not parsed."""
    path = run.readable(run.paths.metrics)
    content = read_regular(path, METRICS_BYTES_MAX) if path is not None else b""
    read = (_row(line) for line in content.split(b"\n")[:-1] if _QUOTED_GRADED in line)
    rows = [row for row in read if row is not None and VALIDATION_GRADED in row.values]
    return [
        {
            "iteration": rows[at].iteration,
            "hours": rows[at].wall_s / 3600,
            **{
                name: finite(rows[at].values.get(f"{VALIDATION}{name}"))
                for name in (*JUDGED, *(f"{name}{STDERR}" for name in JUDGED))
            },
        }
        for at in thinned([row.values[VALIDATION_GRADED] for row in rows], points_max)
    ]


def damaged_lines(run: RunFolder) -> list[int]:
    """Numbers of the whole lines of ``metrics.jsonl`` that are no rows, which a run does not go on with."""
    path = run.readable(run.paths.metrics)
    lines = read_regular(path, METRICS_BYTES_MAX).split(b"\n")[:-1] if path is not None else []
    return [at for at, line in enumerate(lines, start=1) if b"\0" not in line and _row(line) is None]


def recent_rows(run: RunFolder, rows_max: int, bytes_max: int = 1 << 18) -> list[dict[str, float | None]]:
    """The newest whole rows of training, the oldest first, from the file's last ``bytes_max`` bytes."""
    found: list[dict[str, float | None]] = []
    for line in _newest_lines(run, bytes_max):
        if (row := _row(line)) is None or VALIDATION_GRADED in row.values:
            continue
        counts = {ITERATION: row.iteration, SAMPLES_TRAINED: row.samples_trained, WALL_S: row.wall_s}
        found.append({name: finite(value) for name, value in {**row.values, **counts}.items()})
        if len(found) == rows_max:
            break
    return found[::-1]


def newest_values(run: RunFolder, bytes_max: int = 1 << 20) -> dict[str, float]:
    """By metric its newest value, of the rows in the file's last ``bytes_max`` bytes."""
    found: dict[str, float] = {}
    for line in _newest_lines(run, bytes_max):
        if (row := _row(line)) is not None:
            found = {**row.values, **found}
    return found


def _newest_lines(run: RunFolder, bytes_max: int) -> Iterator[bytes]:
    """Whole lines of the end of ``metrics.jsonl``, the newest first; the oldest may lack its beginning."""
    path = run.readable(run.paths.metrics)
    if path is None:
        return
    with open_regular(path) as file:
        file.seek(max(0, os.fstat(file.fileno()).st_size - bytes_max))
        yield from reversed(file.read().split(b"\n")[:-1])


def _dollars(spent: SpentDollars, iterations: Sequence[int], evaluated: bool) -> list[float | None]:
    if spent is None:
        return [None] * len(iterations)
    done, dollars = spent
    # An evaluation at iteration n comes before training it.
    places = [bisect_right(done, iteration - 1 if evaluated else iteration) for iteration in iterations]
    return [finite(dollars[place - 1]) if place else 0.0 for place in places]
