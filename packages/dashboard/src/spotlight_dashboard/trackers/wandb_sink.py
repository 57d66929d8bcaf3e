"""Weights & Biases, online or offline."""

from __future__ import annotations

import importlib
import os
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from types import ModuleType
from typing import Any

from spotlight.store.images import drawn_iterations
from spotlight.store.metrics import (
    SAMPLES_TRAINED,
    VALIDATION,
    WALL_S,
    FinalTable,
    MetricsRow,
    read_metrics,
)
from spotlight.store.picture_names import TRAINING
from spotlight.store.run_directory import RunPaths
from spotlight.store.shown_media import ShownMedia, shown_media
from spotlight_rewards.base.file_errors import StoreError
from spotlight_rewards.base.files import lasting_id, open_regular

_OF_TRAINING = "training pictures"


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
    """A run on wandb.ai or offline, controlled by wandb's environment variables.

    What was logged stays with W&B whatever happens here, so the run directory remembers it, one line each in
    ``wandb-logged``: a run that repeats iterations logs what is missing there, where "there" is this id in
    this project, online or offline.
    """

    def __init__(self, paths: RunPaths, *, resume_at: int = 0, project: str, entity: str | None) -> None:
        """Start or resume the W&B run named after the run directory. Raises :class:`StoreError`."""
        self._wandb = require_wandb()
        self._paths, self._id = paths, lasting_id(paths.path / "wandb-id")
        self._run = self._wandb.init(
            project=project,
            entity=entity,
            name=paths.path.name,
            id=self._id,
            resume="allow",
            dir=str(paths.path),
        )
        self._remembered = paths.path / "wandb-logged"
        self._logged = set[str]()
        if self._remembered.exists():
            with open_regular(self._remembered) as file:
                self._logged.update(file.read().decode("utf-8", "replace").split("\n"))
        mode = "offline" if self._run.offline else "disabled" if self._run.disabled else "online"
        self._there = f"{self._run.entity or entity}/{self._run.project} {mode} {self._id}"
        self._log_missing(resume_at)

    @staticmethod
    def check() -> None:
        """Raise :class:`StoreError` if the package is missing."""
        require_wandb()

    def write(self, row: MetricsRow) -> None:
        """Log the row, unless an earlier attempt did."""
        progress = {SAMPLES_TRAINED: row.samples_trained, WALL_S: row.wall_s}
        kind = "validation" if any(name.startswith(VALIDATION) for name in row.values) else "row"
        self._log(kind, row.iteration, {**row.values, **progress})

    def pictures(self, iteration: int) -> None:
        if self._entry("pictures", iteration) not in self._logged:  # reading them takes a while
            self._show("pictures", iteration, shown_media(self._paths, iteration))

    def training_pictures(self, iteration: int, shown: Sequence[ShownMedia]) -> None:
        self._show(_OF_TRAINING, iteration, shown)

    def _show(self, kind: str, iteration: int, shown: Sequence[ShownMedia]) -> None:
        with TemporaryDirectory() as folder:
            media = {
                each.tag: (
                    self._wandb.Video(each.write_to(Path(folder)), caption=each.caption, format="gif")
                    if each.kind == "gif"
                    else self._wandb.Image(each.write_to(Path(folder)), caption=each.caption)
                )
                for each in shown
            }
            self._log(kind, iteration, media)  # copies the files

    def table(self, iteration: int, table: FinalTable) -> None:
        rows = [list(row) for row in table.rows]
        self._log("table", iteration, {"summary": self._wandb.Table(columns=list(table.columns), data=rows)})

    def flush(self) -> None:
        """Do nothing: W&B uploads in the background."""

    def close(self) -> None:
        self._run.finish()

    def _log_missing(self, resume_at: int) -> None:
        rows = defaultdict[int, list[MetricsRow]](list)
        for row in read_metrics(self._paths.path):
            rows[row.iteration].append(row)
        drawn = set(drawn_iterations(self._paths))
        trained = set(drawn_iterations(self._paths, TRAINING))
        for iteration in sorted({*rows, *drawn, *trained}):  # W&B drops what comes for an earlier step
            if iteration < resume_at:
                for row in rows[iteration]:
                    self.write(row)
                if iteration in drawn:
                    self.pictures(iteration)
                if iteration in trained and self._entry(_OF_TRAINING, iteration) not in self._logged:
                    self.training_pictures(iteration, shown_media(self._paths, iteration, TRAINING))

    def _entry(self, kind: str, iteration: int) -> str:
        return f"{self._there} {kind} {iteration}"

    def _log(self, kind: str, iteration: int, values: Mapping[str, Any]) -> None:
        entry = self._entry(kind, iteration)
        if not values or entry in self._logged:
            return
        self._run.log(dict(values), step=iteration)
        self._logged.add(entry)
        with self._remembered.open("a", encoding="utf-8") as file:
            file.write(f"\n{entry}")  # not at the end of a line that was cut off
            file.flush()
            os.fsync(file.fileno())
