"""Further places for the curves of a run: TensorBoard and Weights & Biases.

TensorBoard is written with its own event writer, without torch. On resume it is told to purge the iterations
that are made anew.
"""

from __future__ import annotations

import importlib
import time
import uuid
from pathlib import Path
from types import ModuleType

from tensorboard.compat.proto.event_pb2 import Event, SessionLog
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.summary.writer.event_file_writer import EventFileWriter

from spotlight.store.files import write_atomically
from spotlight.store.metrics import SAMPLES_TRAINED, WALL_S, MetricsRow
from spotlight.store.run_directory import RunPaths
from spotlight.store.store_errors import StoreError, storage_error


class TensorBoard:
    """Event files that ``tensorboard --logdir`` reads; the step is the iteration."""

    def __init__(self, paths: RunPaths, *, resume_at: int) -> None:
        """Begin a file.

        Raises:
            StoreError: the disk is full or not writable.
        """
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
        """Pass on what is buffered."""
        self._writer.flush()

    def close(self) -> None:
        """Close the event file."""
        self._writer.close()


def require_wandb() -> ModuleType:
    """The package wandb.

    Raises:
        StoreError: it is not installed.
    """
    try:
        return importlib.import_module("wandb")
    except ImportError as error:
        raise StoreError(
            "metrics.wandb is configured, but the package wandb is not installed. "
            "Install it with `pip install 'spotlight-rl[wandb]'`, or remove metrics.wandb."
        ) from error


class WeightsAndBiases:
    """A run on wandb.ai, or offline below the run directory, by wandb's own environment variables."""

    def __init__(self, paths: RunPaths, *, project: str, entity: str | None) -> None:
        """Start, or resume, the W&B run named after the run directory.

        Raises:
            StoreError: the package is not installed.
        """
        self._run = require_wandb().init(
            project=project,
            entity=entity,
            name=paths.path.name,
            id=_lasting_id(paths.path / "wandb-id"),
            resume="allow",
            dir=str(paths.path),
        )

    def write(self, row: MetricsRow) -> None:
        """Log the row; W&B drops rows of steps that it has already."""
        progress = {SAMPLES_TRAINED: row.samples_trained, WALL_S: row.wall_s}
        self._run.log({**row.values, **progress}, step=row.iteration)

    def flush(self) -> None:
        """W&B uploads in the background."""

    def close(self) -> None:
        """Finish the upload."""
        self._run.finish()


def _lasting_id(path: Path) -> str:
    """The run's id at W&B, made once: a run that was deleted and started anew is another one there."""
    if not path.exists():
        write_atomically(path, uuid.uuid4().hex.encode())
    return path.read_text()
