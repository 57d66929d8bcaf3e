"""Curves of a run: one JSON object a line, and the same numbers in TensorBoard and, if wanted, W&B.

Invariants: every line of ``metrics.jsonl`` is whole (a line cut by a kill is removed when the run resumes),
and the rows of iterations that a resumed run makes anew are removed first, so none is there twice.
TensorBoard and W&B are in ``store/sinks.py``.
"""

from __future__ import annotations

import errno
import json
import math
import os
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol, Self

from spotlight.store.files import write_atomically
from spotlight.store.run_directory import RunPaths
from spotlight.store.store_errors import StoreError, storage_error

ITERATION = "iteration"
SAMPLES_TRAINED = "samples_trained"
WALL_S = "wall_s"


@dataclass(frozen=True, slots=True)
class MetricsRow:
    """One line of ``metrics.jsonl``.

    Attributes:
        samples_trained: samples that entered optimizer steps so far.
        wall_s: seconds of work on the run so far, all attempts together.
        values: curves by name (``train/loss``); a value that is not finite is written as null.
    """

    iteration: int
    samples_trained: int
    wall_s: float
    values: Mapping[str, float]


class Sink(Protocol):
    """A further place for the curves."""

    def write(self, row: MetricsRow) -> None:
        """Take one row."""

    def flush(self) -> None:
        """Pass on what is buffered."""

    def close(self) -> None:
        """No more rows will come."""


class SinkFactory(Protocol):
    """Opens a sink; named in :data:`spotlight.registry.SINKS`. Usually the sink's class.

    It may offer ``check()``, called before any work: raise :class:`StoreError` where the sink cannot be used.
    """

    def __call__(self, paths: RunPaths, *, resume_at: int, **options: Any) -> Sink:
        """Open the sink of an attempt that makes the iterations from ``resume_at`` on.

        Args:
            options: the mapping below the sink's name in ``metrics.sinks``.
        """


class MetricsWriter:
    """Appends rows to ``metrics.jsonl`` and to further sinks. A context manager, or :meth:`close` it."""

    def __init__(self, paths: RunPaths, *, resume_at: int, sinks: tuple[Sink, ...] = ()) -> None:
        """Drop rows of iterations from ``resume_at`` on (0: all rows), and a line cut by a kill; then append.

        Raises:
            StoreError: a line in the middle is no row, or the file cannot be written.
        """
        self._path = paths.metrics
        self._sinks = sinks
        kept = [row for row in _rows(self._path) if row.iteration < resume_at]
        try:
            write_atomically(self._path, b"".join(_line(row) for row in kept))
            self._file = os.open(self._path, os.O_WRONLY | os.O_APPEND)
        except OSError as error:
            raise storage_error("cannot write the metrics", self._path, error) from error

    def write(self, row: MetricsRow) -> None:
        """Append a row; a kill right after loses nothing (a power cut may, up to the last :meth:`sync`).

        Raises:
            StoreError: it cannot be written, here or in a sink.
        """
        line = _line(row)
        try:
            if os.write(self._file, line) < len(line):
                raise OSError(errno.ENOSPC, "the row was written in part")
        except OSError as error:
            raise storage_error("cannot write the metrics", self._path, error) from error
        with self._telling():
            for sink in self._sinks:
                sink.write(row)

    def sync(self) -> None:
        """Force all rows to the disk: before a checkpoint is committed."""
        try:
            os.fsync(self._file)
        except OSError as error:
            raise storage_error("cannot write the metrics", self._path, error) from error
        with self._telling():
            for sink in self._sinks:
                sink.flush()

    def close(self) -> None:
        """Close all files; every sink is closed, also when one before it cannot be."""
        os.close(self._file)
        with self._telling(), ExitStack() as closing:
            for sink in self._sinks:
                closing.callback(sink.close)

    @contextmanager
    def _telling(self) -> Iterator[None]:
        """Tell a sink's failed write as ours: TensorBoard meets the same full disk."""
        try:
            yield
        except OSError as error:
            raise storage_error("cannot write the curves", self._path.parent, error) from error

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self.close()
        except StoreError:
            if error is None:  # else it is the first error that tells what happened
                raise


def read_metrics(run: Path) -> list[MetricsRow]:
    """All rows of a run, in order; a last line that a kill has cut is left out, null reads as NaN.

    Raises:
        StoreError: a line is no row (its number is named).
    """
    return list(_rows(RunPaths(run).metrics))


def _rows(path: Path) -> Iterator[MetricsRow]:
    if not path.exists():
        return
    *lines, _cut = path.read_bytes().split(b"\n")
    for number, line in enumerate(lines, 1):
        try:
            yield _parse(json.loads(line))
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise StoreError(
                f"{path}, line {number}: not a row of metrics ({error!r}): {line[:80]!r}. Delete that line."
            ) from error


def _parse(fields: dict[str, float | None]) -> MetricsRow:
    values = {name: math.nan if value is None else float(value) for name, value in fields.items()}
    iteration, samples, wall_s = (values.pop(name) for name in (ITERATION, SAMPLES_TRAINED, WALL_S))
    return MetricsRow(int(iteration), int(samples), wall_s, values)


def _line(row: MetricsRow) -> bytes:
    fields: dict[str, float | None] = {
        ITERATION: row.iteration,
        SAMPLES_TRAINED: row.samples_trained,
        WALL_S: row.wall_s,
    }
    fields |= {name: value if math.isfinite(value) else None for name, value in row.values.items()}
    return json.dumps(fields, allow_nan=False).encode() + b"\n"
