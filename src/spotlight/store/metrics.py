"""A run's metrics: one JSON object per line, copied to TensorBoard and other trackers (``sinks.py``).

Invariants: every line is complete, and no iteration appears twice: resuming removes a truncated line and the
rows of iterations that it repeats.
"""

from __future__ import annotations

import errno
import json
import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, Self

from spotlight.store.run_directory import RunPaths
from spotlight.store.shown_media import ShownMedia
from spotlight_rewards.base.file_errors import StoreError, storage_errors
from spotlight_rewards.base.files import open_regular, write_atomically

ITERATION = "iteration"
SAMPLES_TRAINED = "samples_trained"
WALL_S = "wall_s"
VALIDATION = "validation/"
"""Prefix of the curves of an evaluation on held-out prompts."""
STRICT, GRADED = JUDGED = "strict", "graded"
"""Curves of the score a run is judged by: pass or fail, if the rewards have that, and the trained one."""
STDERR = "_stderr"
"""Ending of the curve of a curve's standard error."""
_COUNT_MAX = 2**53


@dataclass(frozen=True, slots=True)
class MetricsRow:
    """One line of ``metrics.jsonl``.

    Attributes:
        samples_trained: used in optimizer steps so far.
        wall_s: seconds of work so far, all attempts together.
        values: by metric name (``train/loss``); non-finite values are written as null.
    """

    iteration: int
    samples_trained: int
    wall_s: float
    values: Mapping[str, float]


def is_validation(row: MetricsRow) -> bool:
    """Whether it is of an evaluation on held-out prompts, not of training."""
    return f"{VALIDATION}{GRADED}" in row.values


@dataclass(frozen=True, slots=True)
class Mean:
    """A mean score and its standard error, treating images as independent; NaN: unknown."""

    mean: float
    stderr: float


def best_iterations(rows: Iterable[MetricsRow], curve: str | None = None) -> list[int]:
    """Iterations whose weights were validated, the best first and of equal ones the later.

    Args:
        curve: name without :data:`VALIDATION`; default: that which the run is judged by.
    """
    rows = list(rows)
    names = [curve] if curve else [STRICT, GRADED]
    for name in names:
        key = f"{VALIDATION}{name}"
        # An iteration has a row of its validation and one of its training, which says nothing of the first.
        found = {row.iteration: row.values[key] for row in rows if key in row.values}
        if known := {iteration: value for iteration, value in found.items() if math.isfinite(value)}:
            return sorted(known, key=lambda iteration: (known[iteration], iteration), reverse=True)
    return []


@dataclass(frozen=True, slots=True)
class FinalTable:
    """What came of a run, as texts."""

    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


class Sink(Protocol):
    """An additional destination for metrics.

    It may also have ``pictures(iteration)``, called when an evaluation's pictures are stored
    (``shown_media.py``), ``training_pictures(iteration, shown)``, for those of training groups,
    ``table(iteration, table)``, for the :class:`FinalTable` at the end, and ``rewind(iteration)``, called
    when a run goes on from an earlier iteration without being started again.
    A resumed run, too, repeats iterations: a sink must not show them twice.
    """

    def write(self, row: MetricsRow) -> None:
        """Write one row."""

    def flush(self) -> None:
        """Write out buffered rows."""

    def close(self) -> None:
        """Close; no more rows follow."""


class SinkFactory(Protocol):
    """Opens a sink of :data:`spotlight.registry.SINKS`; usually the sink's class.

    An optional ``check()`` is called before any work; it raises :class:`StoreError` if the sink is unusable.
    """

    def __call__(self, paths: RunPaths, *, resume_at: int, **options: Any) -> Sink:
        """Open the sink for iterations from ``resume_at``; ``options`` come from ``metrics.sinks``."""


class MetricsWriter:
    """Appends rows to ``metrics.jsonl`` and the sinks. Use as a context manager, or :meth:`close` it."""

    def __init__(self, paths: RunPaths, *, resume_at: int, sinks: tuple[Sink, ...] = ()) -> None:
        """Drop rows from iteration ``resume_at`` on and a truncated last line. Raises StoreError."""
        self._path = paths.metrics
        self._sinks = sinks
        self._cut(resume_at)

    def rewind(self, iteration: int) -> None:
        """Drop rows from an iteration on, which is done again, also in sinks that can. Raises StoreError."""
        before = self._file
        self._cut(iteration)  # may raise: then the old file stays open, and is closed once
        os.close(before)
        self._show("rewind", iteration)

    def _cut(self, iteration: int) -> None:
        kept = [row for row in _rows(self._path) if row.iteration < iteration]
        with storage_errors("cannot write the metrics", self._path):
            write_atomically(self._path, b"".join(_line(row) for row in kept))
            self._file = os.open(self._path, os.O_WRONLY | os.O_APPEND)

    def write(self, row: MetricsRow) -> None:
        """Append a row. It survives a kill; a power loss may lose rows since the last :meth:`sync`.

        Raises StoreError.
        """
        line = _line(row)
        with storage_errors("cannot write the metrics", self._path):
            if os.write(self._file, line) < len(line):
                raise OSError(errno.ENOSPC, "the row was written in part")
        with self._sink_errors():
            for sink in self._sinks:
                sink.write(row)

    def pictures(self, iteration: int) -> None:
        """Show an evaluation's pictures, which are stored, to the sinks that take them. Raises StoreError."""
        self._show("pictures", iteration)

    def training_pictures(self, iteration: int, shown: Sequence[ShownMedia]) -> None:
        """Show those of training groups, which are stored, to the sinks that take them. Raises StoreError."""
        self._show("training_pictures", iteration, shown)

    def table(self, iteration: int, table: FinalTable) -> None:
        """Show the final table to the sinks that take it. Raises StoreError."""
        self._show("table", iteration, table)

    def _show(self, what: str, *shown: object) -> None:
        with self._sink_errors():
            for sink in self._sinks:
                take: Callable[..., None] | None = getattr(sink, what, None)
                if take is not None:
                    take(*shown)

    def sync(self) -> None:
        """Force all rows to disk, before a checkpoint is committed."""
        with storage_errors("cannot write the metrics", self._path):
            os.fsync(self._file)
        with self._sink_errors():
            for sink in self._sinks:
                sink.flush()

    def close(self) -> None:
        """Close the file and every sink, even if one fails."""
        os.close(self._file)
        with self._sink_errors(), ExitStack() as closing:
            for sink in self._sinks:
                closing.callback(sink.close)

    def _sink_errors(self) -> AbstractContextManager[None]:
        return storage_errors("cannot write the curves", self._path.parent)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, _kind: object, error: object, _trace: object) -> None:
        # After another error, that is the one worth reporting.
        with suppress(StoreError) if error is not None else nullcontext():
            self.close()


def read_metrics(run: Path) -> list[MetricsRow]:
    """All rows of a run; skips a truncated last line, null becomes NaN. Raises StoreError."""
    return list(_rows(RunPaths(run).metrics))


def _rows(path: Path) -> Iterator[MetricsRow]:
    if not path.exists():
        return
    try:
        with open_regular(path) as file:
            *lines, _cut = file.read().split(b"\n")
    except OSError as error:
        raise StoreError(f"{path} cannot be read: {error.strerror}. Put the run's own file there.") from error
    for number, line in enumerate(lines, 1):
        if b"\0" in line:
            continue  # a power cut lost a row after the last sync, which a resume writes again
        try:
            yield parse_row(line)
        except ValueError as error:
            raise StoreError(f"{path}, line {number}: {error}: {line[:80]!r}. Delete that line.") from error


def parse_row(line: bytes) -> MetricsRow:
    """A line of the file, without its end. Raises ValueError."""
    try:
        fields: dict[str, float | None] = json.loads(line)
        values = {name: math.nan if value is None else float(value) for name, value in fields.items()}
        counts = {name: values.pop(name) for name in (ITERATION, SAMPLES_TRAINED, WALL_S)}
        for name, each in counts.items():
            if not (math.isfinite(each) if name == WALL_S else 0 <= each <= _COUNT_MAX):
                raise ValueError(f"{name} is {each:g}; expected seconds, or a number from 0 to 2**53")
        return MetricsRow(int(counts[ITERATION]), int(counts[SAMPLES_TRAINED]), counts[WALL_S], values)
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError) as error:
        raise ValueError(f"not a row of metrics ({type(error).__name__}: {error})") from error


def _line(row: MetricsRow) -> bytes:
    fields: dict[str, float | None] = {
        ITERATION: row.iteration,
        SAMPLES_TRAINED: row.samples_trained,
        WALL_S: row.wall_s,
    }
    fields |= {name: value if math.isfinite(value) else None for name, value in row.values.items()}
    return json.dumps(fields, allow_nan=False).encode() + b"\n"
