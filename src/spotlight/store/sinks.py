"""Experiment trackers: TensorBoard, Weights & Biases, and registered ones.

TensorBoard uses its own event writer, without torch. A resumed run purges the iterations that it repeats.
"""

from __future__ import annotations

import importlib
import inspect
import time
import uuid
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

from tensorboard.compat.proto.event_pb2 import Event, SessionLog
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.summary.writer.event_file_writer import EventFileWriter

from spotlight.registry import SINKS
from spotlight.store.files import write_atomically
from spotlight.store.metrics import SAMPLES_TRAINED, WALL_S, MetricsRow, Sink
from spotlight.store.run_directory import RunPaths
from spotlight.store.store_errors import StoreError, storage_error

Options = Mapping[str, Mapping[str, Any]]
"""Options by sink name."""


def check_sinks(chosen: Options) -> None:
    """Check before any work that the sinks can be opened.

    Raises:
        RegistryError: unknown sink.
        StoreError: unknown option, or missing package.
    """
    for name, options in chosen.items():
        factory = SINKS.load(name)
        signature = inspect.signature(factory)
        try:
            signature.bind(None, resume_at=0, **options)
        except TypeError as error:
            taken = [key for key in signature.parameters if key not in {"paths", "resume_at"}]
            raise StoreError(
                f"metrics.sinks.{name} is {dict(options)!r} ({error}); expected "
                f"{', '.join(taken) or 'no options'}. Correct its options."
            ) from None
        if check := getattr(factory, "check", None):
            check()


def open_sinks(chosen: Options, paths: RunPaths, *, resume_at: int) -> tuple[Sink, ...]:
    """Open an attempt's sinks, already checked by :func:`check_sinks`. Raises :class:`StoreError`."""
    return tuple(SINKS.load(name)(paths, resume_at=resume_at, **options) for name, options in chosen.items())


class TensorBoard:
    """Event files for ``tensorboard --logdir``; the step is the iteration."""

    def __init__(self, paths: RunPaths, *, resume_at: int) -> None:
        """Open an event file. Raises :class:`StoreError` if the disk is full or not writable."""
        purge = SessionLog(status=SessionLog.START)
        try:
            self._writer = EventFileWriter(str(paths.tensorboard))
            self._writer.add_event(Event(wall_time=time.time(), step=resume_at, session_log=purge))
        except OSError as error:
            raise storage_error("cannot write the curves", paths.tensorboard, error) from error

    def write(self, row: MetricsRow) -> None:
        """Write each value as a scalar."""
        values = [Summary.Value(tag=name, simple_value=value) for name, value in row.values.items()]
        self._writer.add_event(
            Event(wall_time=time.time(), step=row.iteration, summary=Summary(value=values))
        )

    def flush(self) -> None:
        """Write out buffered events."""
        self._writer.flush()

    def close(self) -> None:
        """Close the event file."""
        self._writer.close()


def require_wandb() -> ModuleType:
    """Import wandb. Raises :class:`StoreError` if it is not installed."""
    try:
        return importlib.import_module("wandb")
    except ImportError as error:
        raise StoreError(
            "metrics.wandb is configured, but the package wandb is not installed. "
            "Install it with `pip install 'spotlight-rl[wandb]'`, or remove metrics.wandb."
        ) from error


class WeightsAndBiases:
    """A run on wandb.ai or offline, controlled by wandb's environment variables."""

    def __init__(self, paths: RunPaths, *, resume_at: int = 0, project: str, entity: str | None) -> None:
        """Start or resume the W&B run named after the run directory. Raises :class:`StoreError`."""
        self._run = require_wandb().init(
            project=project,
            entity=entity,
            name=paths.path.name,
            id=_lasting_id(paths.path / "wandb-id"),
            resume="allow",
            dir=str(paths.path),
        )

    @staticmethod
    def check() -> None:
        """Raise :class:`StoreError` if the package is missing."""
        require_wandb()

    def write(self, row: MetricsRow) -> None:
        """Log the row; W&B drops rows of steps that it already has."""
        progress = {SAMPLES_TRAINED: row.samples_trained, WALL_S: row.wall_s}
        self._run.log({**row.values, **progress}, step=row.iteration)

    def flush(self) -> None:
        """Do nothing: W&B uploads in the background."""

    def close(self) -> None:
        """Finish the upload."""
        self._run.finish()


def _lasting_id(path: Path) -> str:
    """Stored once, so that a deleted and restarted run gets a new W&B id."""
    if not path.exists():
        write_atomically(path, uuid.uuid4().hex.encode())
    return path.read_text()
