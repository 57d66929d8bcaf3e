"""What a sweep prints: runs to come with their estimated cost, and runs with what they ended with."""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table

from spotlight_plan.sweep_file import SweepRun
from spotlight_rewards.base.errors import UserError

if TYPE_CHECKING:
    from spotlight.config.schema import RunConfig
    from spotlight.dry_run.run_plan import RunPlan

_BACKWARD = 2
"""Forwards that a backward costs."""


@dataclass(frozen=True, slots=True)
class Speed:
    """What a run was measured to take.

    Attributes:
        pixels_s: denoised per second: forwards, a backward being two, times pixels.
        usd_s: all its machines together.
    """

    run: str
    pixels_s: float
    usd_s: float


def iteration_pixels(config: RunConfig, plan: RunPlan) -> float:
    """Forwards of an iteration, a backward being two, times pixels. Evaluation is not in it."""
    return (plan.passes.forwards + _BACKWARD * plan.passes.backward) * _pixels(config)


def run_pixels(config: RunConfig, plan: RunPlan) -> float:
    """Of what a run has left to do, evaluations and all."""
    left = max(0, config.iterations - plan.trained) / config.iterations
    whole = config.iterations * iteration_pixels(config, plan)
    return left * (whole + plan.evaluations * plan.passes.evaluation * _pixels(config))


def _pixels(config: RunConfig) -> int:
    return config.rollout.height * config.rollout.width * config.rollout.frames


def measured_speed(directory: Path) -> Speed | None:
    """Of a run that has trained three iterations or more."""
    from spotlight.dry_run.run_plan import make_plan
    from spotlight.report.record import read_run
    from spotlight.store.run_estimate import read_so_far

    try:
        config, (_, pace) = read_run(directory).config, read_so_far(directory)
        plan = make_plan(config)
    except UserError:
        return None
    if pace is None or not pace.iteration_s:
        return None
    return Speed(directory.name, iteration_pixels(config, plan) / pace.iteration_s, pace.usd_s)


def print_runs(
    console: Console, runs: Sequence[tuple[SweepRun, RunConfig, RunPlan]], speed: Speed | None, together: int
) -> None:
    """Each run with what is left of it, and what that costs at a measured speed."""
    from spotlight.report.wording import count, duration, money

    table = _table(("run", *_keys([run for run, *_ in runs]), "samples", "state", "time", "cost"))
    total_s = 0.0
    for run, config, plan in runs:
        seconds = None if speed is None else run_pixels(config, plan) / speed.pixels_s
        total_s += seconds or 0.0
        done = f"{plan.trained} of {config.iterations} iterations" if plan.trained else "new"
        table.add_row(
            run.name,
            *_values(run, [each for each, *_ in runs]),
            count(plan.samples * config.iterations),
            "finished" if plan.trained >= config.iterations else done,
            *("unknown", "unknown") if seconds is None or speed is None
            else (duration(seconds), money(seconds * speed.usd_s)),
        )  # fmt: skip
    console.print(table)
    if speed is None:
        told = "Time and cost are known once a run of the sweep has begun; or name one: --measured RUN."
    else:
        usd = money(total_s * speed.usd_s)
        told = (
            f"Left: {duration(total_s / together)} with {together} at a time, {usd}; estimated from what "
            f"{speed.run} took for a forward."
        )
    console.print(told, soft_wrap=True)


def print_outcomes(console: Console, runs: Sequence[tuple[SweepRun, str]], runs_dir: Path) -> None:
    """Each run with its state, and its last validation, time and cost."""
    from spotlight.report.record import read_run
    from spotlight.report.wording import duration, money, score
    from spotlight.store.metrics import JUDGED

    table = _table(("run", *_keys([run for run, _ in runs]), *JUDGED, "time", "cost", "state"))
    for run, state in runs:
        cells = ["-"] * (len(JUDGED) + 2)
        with suppress(UserError):  # of a run that is not begun, or whose files are damaged
            record = read_run(runs_dir / run.name)
            last = record.validations[-1].scores if record.validations else {}
            means = [score(last[name].mean, last[name].stderr) if name in last else "-" for name in JUDGED]
            cells = [*means, duration(record.wall_s), money(record.history.cost_usd)]
        table.add_row(run.name, *_values(run, [each for each, _ in runs]), *cells, state)
    console.print(table)


def _table(headers: Sequence[str]) -> Table:
    table = Table(box=None, pad_edge=False)
    for header in headers:
        table.add_column(header, overflow="fold")
    return table


def _keys(runs: Sequence[SweepRun]) -> list[str]:
    return list(dict.fromkeys(key for run in runs for key in run.settings))


def _values(run: SweepRun, runs: Sequence[SweepRun]) -> list[str]:
    given = (run.settings.get(key) for key in _keys(runs))
    return ["-" if each is None else each if isinstance(each, str) else json.dumps(each) for each in given]
