"""Results of a finished run: exported weights, and a summary computed from disk."""

from __future__ import annotations

import logging
import math
import shutil
from collections.abc import Callable
from pathlib import Path

from spotlight.config.schema import RunConfig
from spotlight.models.family import ModelFamily
from spotlight.models.slots import WeightSlots
from spotlight.runtime.recorder import RunRecorder
from spotlight.scheduler.types import Purpose
from spotlight.store.images import drawn_iterations, write_comparison
from spotlight.store.ledger import ledger_queries as queries
from spotlight.store.metrics import (
    GRADED,
    STDERR,
    STRICT,
    VALIDATION,
    MetricsRow,
    is_validation,
    read_metrics,
)
from spotlight.store.run_directory import RunPaths
from spotlight.store.run_summary import RunSummary, SampleCounts, ValidationPoint, final_table, write_summary
from spotlight.store.store_errors import NothingToCompareError
from spotlight.training.lora_export import export_lora, export_merged
from spotlight.training.sharding import Ranks

log = logging.getLogger("spotlight")

LORA_FOLDER, MERGED_FOLDER = "lora", "merged"


def export_judged(config: RunConfig, family: ModelFamily, slots: WeightSlots, ranks: Ranks) -> Path | None:
    """Export the evaluated weights. Collective: every rank must call it.

    Returns:
        The adapter's file or pipeline directory on the main rank, else None.
    """
    root = config.runs_dir / config.name
    slot = config.evaluation.weights
    if config.learner.mode == "lora":
        return export_lora(family, slots, slot, root / LORA_FOLDER, ranks)
    if ranks.is_main:  # may exist from before ``iterations`` was raised
        shutil.rmtree(root / MERGED_FOLDER, ignore_errors=True)
    return export_merged(family, slots, slot, root / MERGED_FOLDER, ranks, replace=True)


def conclude_run(
    config: RunConfig, recorder: RunRecorder, weights: Path | None, account: Callable[[], None]
) -> None:
    """Draw the before-after comparison and write ``summary.json``, its own cost included.

    Args:
        weights: from :func:`export_judged`.
        account: bills the time so far.
    """
    compare(recorder.paths)
    recorder.kept.settle()
    account()
    summary = summarise_run(config, recorder, weights if config.learner.mode == "lora" else None)
    recorder.metrics.table(summary.iterations, final_table(summary))
    recorder.metrics.sync()  # a run with a summary is not taken up again
    write_summary(recorder.paths.summary, summary)


def summarise_run(config: RunConfig, recorder: RunRecorder, lora: Path | None) -> RunSummary:
    """Summarise a run from its ledger and metrics."""
    connection = recorder.ledger.connection
    counts = queries.counts(connection)
    validations = [row for row in read_metrics(recorder.paths.path) if is_validation(row)]
    last = validations[-1].values if validations else {}
    judged = STRICT if f"{VALIDATION}{STRICT}" in last else GRADED
    stderr = last.get(f"{VALIDATION}{judged}{STDERR}", math.inf)
    return RunSummary(
        iterations=config.iterations,
        validation=tuple(_point(row) for row in validations),
        validation_stderr=stderr if math.isfinite(stderr) else None,
        wall_s=recorder.wall_s,
        gpu_seconds_by_phase=queries.gpu_seconds_by_phase(connection),
        cost_usd=recorder.ledger.cost_usd(),
        samples=SampleCounts(
            issued=counts.issued.get(Purpose.TRAIN, 0), trained=counts.trained, dropped=counts.train_dropped
        ),
        lora=str(lora.relative_to(recorder.paths.path)) if lora else None,
        run_seed=config.run_seed,
    )


def compare(paths: RunPaths) -> None:
    """Draw the first evaluation beside the last, of what is left of them. Raises StoreError for the disk."""
    drawn = drawn_iterations(paths)
    if len(drawn) < 2:
        return
    since = "before" if drawn[0] == 0 else f"after {drawn[0]}"
    title = f"{since} and after {drawn[-1]} iterations"
    try:
        write_comparison(paths, before=drawn[0], after=drawn[-1], title=title)
    except NothingToCompareError as error:  # the weights are what counts
        log.warning("no picture of before and after: %s", error)


def _point(row: MetricsRow) -> ValidationPoint:
    return ValidationPoint(
        iteration=row.iteration,
        samples_trained=row.samples_trained,
        wall_s=row.wall_s,
        strict=row.values.get(f"{VALIDATION}{STRICT}"),
        graded=row.values[f"{VALIDATION}{GRADED}"],
    )
