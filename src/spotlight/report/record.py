"""A run as reports see it: read once from its directory, immutable."""

from __future__ import annotations

import math
from collections.abc import Mapping
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

from spotlight.config.load import load_dump
from spotlight.config.schema import RunConfig
from spotlight.store.ledger import ledger_queries as queries
from spotlight.store.ledger.history import History, read_history
from spotlight.store.metrics import JUDGED, STDERR, VALIDATION, Mean, MetricsRow, is_validation, read_metrics
from spotlight.store.run_directory import RunPaths
from spotlight.store.run_estimate import RunEstimate, estimated, read_estimate, read_so_far


@dataclass(frozen=True, slots=True)
class ValidationRow:
    """Scores on held-out prompts at one point of the run, by curve: ``graded``, ``tag/counting``, ..."""

    iteration: int
    samples_trained: int
    wall_s: float
    scores: Mapping[str, Mean]


@dataclass(frozen=True, slots=True)
class ValidationChange:
    """First versus last validation of one curve.

    Attributes:
        noise: standard error of the difference, treating the evaluations as independent: sqrt(stderr_before²
            + stderr_after²). They share prompts and seeds, so the true error is smaller and the margin in
            units of ``noise`` is understated.
    """

    before: Mean
    after: Mean

    @property
    def margin(self) -> float:
        return self.after.mean - self.before.mean

    @property
    def noise(self) -> float:
        return math.hypot(self.before.stderr, self.after.stderr)

    @property
    def margin_in_noise(self) -> float:
        """The margin in units of ``noise``; NaN if that is 0 or unknown."""
        return self.margin / self.noise if 0 < self.noise < math.inf else math.nan


@dataclass(frozen=True, slots=True)
class RunRecord:
    """The content of a run directory.

    Attributes:
        rows: of trained iterations.
        estimate: what was said when the run began, or last changed its course; None: nothing was known.
        corrected: the same by what its own rows say; None before three of them.
        example_prompt: see :func:`~spotlight.store.ledger.ledger_queries.example_prompt`.
        weights: folder of the LoRA or merged pipeline; None before export.
    """

    paths: RunPaths
    config: RunConfig
    history: History
    validations: tuple[ValidationRow, ...]
    rows: tuple[MetricsRow, ...]
    estimate: RunEstimate | None
    corrected: RunEstimate | None
    example_prompt: str | None
    weights: Path | None

    @property
    def curves(self) -> tuple[str, ...]:
        """``strict`` and ``graded``, as far as all validations have them."""
        found = [set(row.scores) for row in self.validations]
        return tuple(name for name in JUDGED if found and name in set.intersection(*found))

    @property
    def since(self) -> str:
        """Short description of what the first validation evaluated."""
        first = self.validations[0].iteration
        return "before" if first == 0 else f"after {first}"

    def change(self, curve: str) -> ValidationChange:
        """From the first to the last validation. Raises IndexError without validations."""
        return ValidationChange(self.validations[0].scores[curve], self.validations[-1].scores[curve])

    @property
    def best(self) -> ValidationRow | None:
        """The best validation of the judged curve, if it is better than the last."""
        judged, last = self.curves[0], self.validations[-1]
        best = max(self.validations, key=lambda row: (row.scores[judged].mean, row.iteration))
        return best if best.scores[judged].mean > last.scores[judged].mean else None

    @property
    def wall_s(self) -> float:
        """Seconds of work of one worker, all attempts together."""
        validated = [row.wall_s for row in self.validations]
        return max([*validated, *(row.wall_s for row in self.rows)], default=0.0)


def read_run(directory: Path) -> RunRecord:
    """Read a run directory, safe beside a running process.

    Raises:
        StoreError: not a run directory, or unreadable.
        ConfigError: configuration of another version.
    """
    paths = RunPaths(directory)
    paths.require_run()
    rows = read_metrics(directory)
    with closing(queries.open_readonly(paths.ledger)) as connection:
        prompt = queries.example_prompt(connection)
    config, (spent, pace) = load_dump(paths.config, installed=False), read_so_far(directory)
    weights = (directory / "lora", directory / "merged")
    return RunRecord(
        paths=paths,
        config=config,
        history=read_history(directory),
        validations=tuple(_validation(row) for row in rows if is_validation(row)),
        rows=tuple(row for row in rows if not is_validation(row)),
        estimate=read_estimate(paths.estimate),
        corrected=None
        if pace is None
        else estimated(pace, spent, config.iterations, config.evaluation.count(config.iterations)),
        example_prompt=prompt,
        weights=next((folder for folder in weights if folder.is_dir()), None),
    )


def _validation(row: MetricsRow) -> ValidationRow:
    values = {name.removeprefix(VALIDATION): value for name, value in row.values.items()}
    scores = {
        name: Mean(value, values.get(f"{name}{STDERR}", math.nan))
        for name, value in values.items()
        if not name.endswith(STDERR)
    }
    return ValidationRow(row.iteration, row.samples_trained, row.wall_s, scores)
