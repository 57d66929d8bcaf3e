"""What a whole run takes: seconds of work and dollars, from what is spent and the pace of what is left.

``estimate.json`` holds what was said when the run began, or last changed its course. What is measured does
not change it, so that both can be shown beside each other. Pure but for the files.
"""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Iterable, Mapping
from contextlib import closing
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path

from pydantic import FiniteFloat, TypeAdapter

from spotlight.scheduler.types import Phase
from spotlight.store.ledger import ledger_queries as queries
from spotlight.store.ledger.course_changes import read_course
from spotlight.store.metrics import MetricsRow, is_validation, read_metrics
from spotlight.store.run_directory import RunPaths
from spotlight_rewards.base.file_errors import storage_errors
from spotlight_rewards.base.files import read_regular, write_atomically

MEASURED_MIN = 3
"""Iterations after which a run's own count: the first contains the start, and two more show a spread."""
_RECENT = 20
_OF_PACE = ("model", "rollout", "rewards", "algorithm", "learner", "exploration", "pipeline", "evaluation")
_OF_NO_PACE = (
    "learner.learning_rate",
    "learner.ema",
    "learner.betas",
    "learner.weight",
    "evaluation.every",
)


@dataclass(frozen=True, slots=True)
class Span:
    """A figure with the bounds that it is expected between."""

    least: FiniteFloat
    likely: FiniteFloat
    most: FiniteFloat


@dataclass(frozen=True, slots=True)
class RunPace:
    """How fast a run gets on.

    Attributes:
        start_s: once, before the first iteration and evaluation.
        evaluation_s: of one, beside the iterations.
        usd_s: of all machines together.
        least, most: factors that bound the seconds.
        rests_on: as a sentence goes on after "it rests on".
    """

    start_s: float
    iteration_s: float
    evaluation_s: float
    usd_s: float
    least: float
    most: float
    rests_on: str


@dataclass(frozen=True, slots=True)
class SpentSoFar:
    """What a run has taken so far; ``work_s``: of all attempts together."""

    iterations: int = 0
    evaluations: int = 0
    work_s: float = 0.0
    usd: float = 0.0


@dataclass(frozen=True, slots=True)
class RunEstimate:
    """What a run takes from its beginning to its end.

    Attributes:
        iterations, evaluations: of the whole run.
        after: iterations that were trained when this was said.
    """

    iterations: int
    evaluations: int
    after: int
    work_s: Span
    usd: Span
    rests_on: str


def estimated(
    pace: RunPace, spent: SpentSoFar, iterations: int, evaluations: int, *, starts: bool = False
) -> RunEstimate:
    """What is spent, and what is left at a pace; ``starts``: that begins with a start."""
    left_s = max(0, iterations - spent.iterations) * pace.iteration_s
    left_s += max(0, evaluations - spent.evaluations) * pace.evaluation_s
    left_s += pace.start_s if starts and left_s else 0.0
    each_s = [left_s * factor for factor in (pace.least, 1.0, pace.most)]
    work_s = Span(*(spent.work_s + seconds for seconds in each_s))
    usd = Span(*(spent.usd + seconds * pace.usd_s for seconds in each_s))
    return RunEstimate(iterations, evaluations, spent.iterations, work_s, usd, pace.rests_on)


def measured_pace(
    rows: Iterable[MetricsRow], since: int, spent: SpentSoFar, seconds_by_phase: Mapping[Phase, float]
) -> RunPace | None:
    """Of the run's own last iterations, which include what preemptions cost; None: fewer than three are done.

    Args:
        rows: all of the run's.
        since: the iteration from which on the run is made as it is now.
        seconds_by_phase: of the workers; how far the first evaluation was the start, if it is the only one.
    """
    known = [row for row in rows if row.iteration >= since and math.isfinite(row.wall_s)]
    trained = [row for row in known if not is_validation(row)]
    if len(trained) < MEASURED_MIN or spent.work_s <= 0:
        return None
    took = [(after, max(0.0, after.wall_s - before.wall_s)) for before, after in pairwise(known)]
    warm = [seconds for row, seconds in took if not is_validation(row) and row is not trained[0]]
    evaluations = [seconds for row, seconds in took if is_validation(row)]
    first_s = known[0].wall_s if is_validation(known[0]) and known[0].iteration == 0 else 0.0
    share = _evaluation_share(seconds_by_phase)
    evaluation_s = statistics.mean(evaluations[-_RECENT:]) if evaluations else first_s * share
    recent = warm[-_RECENT:]
    iteration_s = statistics.mean(recent)
    error = 2 * statistics.stdev(recent) / math.sqrt(len(recent)) / iteration_s if iteration_s else 0.0
    numbered = f"iterations {trained[-1].iteration + 2 - len(recent)} to {trained[-1].iteration + 1}"
    return RunPace(
        start_s=max(0.0, known[0].wall_s - (evaluation_s if first_s else iteration_s)),
        iteration_s=iteration_s,
        evaluation_s=evaluation_s,
        usd_s=spent.usd / spent.work_s,
        least=max(0.0, 1 - error),
        most=1 + error,
        rests_on=f"measured rows: {numbered} of this run took {iteration_s:.3g} s each",
    )


def _evaluation_share(seconds: Mapping[Phase, float]) -> float:
    evaluating, starting = seconds.get(Phase.EVALUATION, 0.0), seconds.get(Phase.SETUP, 0.0)
    return evaluating / (evaluating + starting) if evaluating else 0.0


def changes_pace(keys: Iterable[str]) -> bool:
    """Whether a change of these keys, dotted, may change how long an iteration takes."""
    return any(key.startswith(_OF_PACE) and not key.startswith(_OF_NO_PACE) for key in keys)


# -- the files -----------------------------------------------------------------------------------------------


def read_so_far(run: Path) -> tuple[SpentSoFar, RunPace | None]:
    """What a run has taken, and its :func:`measured_pace`. Safe beside a running process.

    Raises:
        LedgerError, StoreError: ledger or metrics cannot be read.
    """
    paths, rows = RunPaths(run), read_metrics(run)
    with closing(queries.open_readonly(paths.ledger)) as connection, queries.consistent_reading(connection):
        spent = SpentSoFar(
            iterations=queries.iterations(connection),
            evaluations=sum(map(is_validation, rows)),
            work_s=queries.worked_s(connection),
            usd=queries.cost_usd(connection),
        )
        seconds = queries.gpu_seconds_by_phase(connection)
        steady = [each.iteration for each in read_course(connection) if changes_pace([each.key])]
    return spent, measured_pace(rows, max(steady, default=0), spent, seconds)


def write_estimate(path: Path, estimate: RunEstimate) -> None:
    """Write atomically. Raises StoreError."""
    content = json.dumps(asdict(estimate), indent=2, allow_nan=False) + "\n"
    with storage_errors("cannot write the estimate", path):
        write_atomically(path, content.encode())


def read_estimate(path: Path) -> RunEstimate | None:
    """What was said when the run began; None: nothing, or it is damaged: nothing else rests on it."""
    try:
        return _ESTIMATE.validate_json(read_regular(path, _BYTES_MAX))
    except (OSError, ValueError):
        return None


_BYTES_MAX = 1 << 16
_ESTIMATE = TypeAdapter(RunEstimate)
