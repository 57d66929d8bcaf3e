"""The pace of a run by that of another in its ``runs_dir``, of the same model on the same machines.

An iteration takes as long as its forwards, of which a backward counts as two; so does an evaluation.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

from spotlight.config.load import load_dump
from spotlight.config.schema import RunConfig
from spotlight.dry_run.run_plan import count_passes
from spotlight.report.wording import count
from spotlight.scheduler.types import Purpose
from spotlight.store.ledger.ledger_queries import open_readonly
from spotlight.store.run_directory import RunPaths
from spotlight.store.run_estimate import RunPace, read_so_far
from spotlight_rewards.base.errors import UserError

_NEWEST = 20
"""Runs that are looked at."""
_ERROR = 0.15
"""Of a run that does the same: twice what one is off beside other work (docs/howto/simulate-and-plan.md)."""
_ERROR_PER_DOUBLING = 0.1
"""Assumed, where it does twice or half as much."""


def like_runs_pace(config: RunConfig, ranks: int, pictures: int) -> RunPace | None:
    """By the newest run that is like this one, itself on another course included; None: there is none.

    Args:
        pictures: of an evaluation.
    """
    for directory in newest_runs(config.runs_dir):
        try:
            before = load_dump(RunPaths(directory).config)
            if _machines(before) != _machines(config) or _model(before) != _model(config):
                continue
            _, pace = read_so_far(directory)
            ranks_then = _ranks(directory)
        except (UserError, OSError):
            continue  # damaged, or of another version: nothing to learn from
        if pace is not None and (config.fleet.driver == "ray" or ranks_then == ranks):
            return _scaled(config, before, pace, directory, pictures)
    return None


def newest_runs(runs: Path) -> Iterator[Path]:
    """Directories of runs that have begun, the newest first."""
    found = [path for path in runs.glob("*/metrics.jsonl") if (path.parent / "ledger.sqlite").is_file()]
    yield from (path.parent for path in sorted(found, key=_changed_at, reverse=True)[:_NEWEST])


def _changed_at(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except OSError:
        return 0.0


def _machines(config: RunConfig) -> object:
    """What the run is on; of a fleet whose size follows a target, that it does."""
    return config.fleet.model_dump(mode="json"), config.pipeline.model_dump(mode="json")


def _model(config: RunConfig) -> object:
    """What decides how long a forward takes."""
    rollout, learner = config.rollout, config.learner
    shape = rollout.height, rollout.width, rollout.frames, rollout.batch_size
    trained = learner.mode, learner.recompute, learner.shard, learner.autocast, learner.micro_batch_size
    rewards = tuple((reward.name, reward.device) for reward in config.rewards)
    return config.model.model_dump(mode="json"), shape, trained, rewards


def _ranks(directory: Path) -> int:
    """Workers of the newest attempt."""
    with closing(open_readonly(RunPaths(directory).ledger)) as connection:
        newest = "SELECT COUNT(*) FROM attempt_workers WHERE attempt = (SELECT MAX(number) FROM attempts)"
        return int(connection.execute(newest).fetchone()[0])


def _held_out(directory: Path) -> int:
    """Held-out prompts of its evaluations."""
    query = f"SELECT COUNT(DISTINCT prompt) FROM rollouts WHERE purpose = '{Purpose.EVAL}'"
    with closing(open_readonly(RunPaths(directory).ledger)) as connection:
        return int(connection.execute(query).fetchone()[0])


def _scaled(config: RunConfig, before: RunConfig, pace: RunPace, directory: Path, pictures: int) -> RunPace:
    forwards, had = _forwards(config, pictures), _forwards(before, 0)
    judged = count_passes(before, _held_out(directory) * before.evaluation.images_per_prompt).evaluation
    judging = count_passes(config, pictures).evaluation
    times = forwards / had
    error = _ERROR + _ERROR_PER_DOUBLING * abs(math.log2(times))
    day = datetime.fromtimestamp(_changed_at(RunPaths(directory).metrics), UTC).date().isoformat()
    return replace(
        pace,
        iteration_s=pace.iteration_s * times,
        # Where none was made, by the forwards of an iteration.
        evaluation_s=pace.evaluation_s * judging / judged if judged else pace.iteration_s * judging / had,
        least=max(0.0, min(pace.least, 1 - error)),
        most=max(pace.most, 1 + error),
        rests_on=f"calibration: the run {directory.name} of {day} took {pace.iteration_s:.3g} s for "
        f"{count(had)} forwards, an iteration here has {count(forwards)}",
    )


def _forwards(config: RunConfig, pictures: int) -> int:
    passes = count_passes(config, pictures)
    return passes.forwards + 2 * passes.backward
