"""Trackio: a local database, without a server or an account."""

from __future__ import annotations

import importlib
import io
import math
import os
from collections.abc import Mapping, Sequence
from contextlib import redirect_stdout
from pathlib import Path
from tempfile import TemporaryDirectory
from types import ModuleType
from typing import Any

from spotlight.store.images import drawn_iterations
from spotlight.store.metrics import SAMPLES_TRAINED, WALL_S, FinalTable, MetricsRow, read_metrics
from spotlight.store.picture_names import TRAINING
from spotlight.store.run_directory import RunPaths
from spotlight.store.shown_media import ShownMedia, shown_media
from spotlight_rewards.base.file_errors import StoreError
from spotlight_rewards.base.files import lasting_id

_ELSEWHERE = ("TRACKIO_SPACE_ID", "TRACKIO_SERVER_URL")
_ID = "spotlight_id"


def require_trackio() -> ModuleType:
    """Import trackio.

    Raises:
        StoreError: it is not installed, or its variables lead to a server.
    """
    if found := [name for name in _ELSEWHERE if os.environ.get(name)]:
        raise StoreError(
            f"metrics.sinks.trackio: {found[0]} is set; expected Trackio's local database, whose rows a "
            "resumed run can replace. Unset it, and publish the project afterwards with `trackio sync`."
        )
    try:
        return importlib.import_module("trackio")
    except ImportError as error:
        raise StoreError(
            "metrics.sinks.trackio is configured, but the package trackio cannot be imported "
            f"({error}). Install it with `pip install 'spotlight-rl[trackio]'`, or remove it."
        ) from error


class Trackio:
    """A run in a project of Trackio, named after the run directory.

    Trackio writes in the background and keeps what it has, so an attempt that was killed leaves too much of
    it or too little: a run that repeats iterations is written again from the run directory, and the old one
    is deleted.
    """

    def __init__(self, paths: RunPaths, *, resume_at: int = 0, project: str = "spotlight") -> None:
        """Open the project. Raises :class:`StoreError`."""
        self._trackio, self._paths, self._project = require_trackio(), paths, project
        self._open(resume_at)

    def _open(self, resume_at: int) -> None:
        paths, own = self._paths, lasting_id(self._paths.path / "trackio-id")
        with redirect_stdout(io.StringIO()):  # how to open Trackio's dashboard
            self._delete(own)
            self._run = self._trackio.init(
                project=self._project,
                name=paths.path.name,
                config={_ID: own},
                embed=False,
                auto_log_gpu=False,
                auto_log_cpu=False,
            )
        for row in read_metrics(paths.path):
            if row.iteration < resume_at:
                self.write(row)
        for iteration in drawn_iterations(paths):
            if iteration < resume_at:
                self.pictures(iteration)
        for iteration in drawn_iterations(paths, TRAINING):
            if iteration < resume_at:
                self.training_pictures(iteration, shown_media(paths, iteration, TRAINING))

    @staticmethod
    def check() -> None:
        """Raise :class:`StoreError` if the package is missing, or would log elsewhere."""
        require_trackio()

    def write(self, row: MetricsRow) -> None:
        values = {name: value for name, value in row.values.items() if math.isfinite(value)}
        self._log({**values, SAMPLES_TRAINED: row.samples_trained, WALL_S: row.wall_s}, row.iteration)

    def pictures(self, iteration: int) -> None:
        self.training_pictures(iteration, shown_media(self._paths, iteration))

    def training_pictures(self, iteration: int, shown: Sequence[ShownMedia]) -> None:
        kinds = {"png": self._trackio.Image, "jpeg": self._trackio.Image, "gif": self._trackio.Video}
        with TemporaryDirectory() as folder:
            media = {
                each.tag: kinds[each.kind](each.write_to(Path(folder)), caption=each.caption)
                for each in shown
            }
            if media:
                self._log(media, iteration)  # copies the files

    def table(self, iteration: int, table: FinalTable) -> None:
        rows = [list(row) for row in table.rows]
        self._log({"summary": self._trackio.Table(columns=list(table.columns), data=rows)}, iteration)

    def rewind(self, iteration: int) -> None:
        """Write the run again, without what it had from an iteration on."""
        self.close()
        self._open(iteration)

    def flush(self) -> None:
        """Do nothing: Trackio writes in the background."""

    def close(self) -> None:
        with redirect_stdout(io.StringIO()):
            self._run.finish()

    def _log(self, values: Mapping[str, Any], iteration: int) -> None:
        self._run.log(dict(values), step=iteration)

    def _delete(self, own: str) -> None:
        """Delete this run directory's run of an earlier attempt, not others of its name."""
        try:
            runs = list(self._trackio.Api().runs(self._project))
        except ValueError:  # no such project yet
            return
        for run in runs:
            if run.name == self._paths.path.name and (run.config or {}).get(_ID) == own:
                run.delete()
