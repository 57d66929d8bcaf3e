"""The demo's learning curve over several run seeds, and where its time goes.

    python -m benchmarks.demo_seeds --json demo_seeds.json
    python -m benchmarks.demo_seeds --seeds 3 iterations=20 learner.learning_rate=5e-4
    python -m benchmarks.demo_seeds --runs-dir runs/preempted fleet.driver=ray \\
        fleet.spot.trace=minute fleet.drain_margin_s=2
    python -m benchmarks.demo_seeds --seeds 1 --config examples/testbed-full.yaml \\
        --config examples/testbed-flow-grpo.yaml 'data.tags=[counting]' iterations=30

Runs the embedded default of ``spotlight train``, or each configuration named, once a seed, one after the
other, through the real command (a run that is there already is not repeated). Prints the validation of
every evaluation, the gain of each run against the noise of its two evaluations (their standard errors,
taken as independent), and the seconds of an iteration by phase; of runs on nodes that vanish also how many
did, what that cost, and what share of the time the head takes. Extra arguments are overrides for all runs.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.console import Console
from rich.table import Table

from benchmarks._measure import machine
from spotlight.report.record import RunRecord, read_run
from spotlight.store.run_summary import read_summary

SECONDS = "seconds/"


@dataclass(frozen=True, slots=True)
class SeedResult:
    """One run.

    Attributes:
        name: of the run.
        iterations: of every evaluation.
        strict: mean strict score at each.
        graded: mean graded score at each.
        stderr: standard error of the last strict score.
        gain: strict score after minus before.
        noise: standard error of that difference.
        wall_s: whole run, set-up included.
        phase_s: median seconds of an iteration by phase.
        preemptions: spot nodes taken.
        lost_s: worker seconds of work lost.
        drain_s: how long each noticed node took to stop its work.
        head_share: seconds that the head spent on events, its books included, over the run's.
    """

    name: str
    run_seed: int
    iterations: tuple[int, ...]
    strict: tuple[float, ...]
    graded: tuple[float, ...]
    stderr: float
    gain: float
    noise: float
    wall_s: float
    cost_usd: float
    phase_s: dict[str, float]
    preemptions: int
    lost_s: float
    drain_s: tuple[float, ...]
    head_share: float


def main(
    overrides: Annotated[list[str] | None, typer.Argument(help="key=value for all runs.")] = None,
    seeds: Annotated[int, typer.Option(help="Run seeds 0, 1, ...")] = 3,
    config: Annotated[list[Path] | None, typer.Option(help="Compare these configurations instead.")] = None,
    runs_dir: Annotated[Path, typer.Option(help="Where the runs are kept.")] = Path("runs/demo-seeds"),
    json_file: Annotated[Path | None, typer.Option("--json", help="Write the figures here.")] = None,
) -> None:
    """Run the demo once a seed and compare."""
    configs: list[Path | None] = [*config] if config else [None]
    results = [run(each, seed, runs_dir, overrides or []) for each in configs for seed in range(seeds)]
    console = Console()
    console.print(curve_table(results))
    console.print(phase_table(results))
    if json_file is not None:
        record = {
            "machine": machine(torch.device("cpu")),
            "overrides": overrides or [],
            "runs": [asdict(result) for result in results],
        }
        json_file.write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")


def run(config: Path | None, seed: int, runs_dir: Path, overrides: Sequence[str]) -> SeedResult:
    """Train one seed through the command line and read what it left."""
    name = f"{config.stem}-{seed}" if config else f"seed-{seed}"
    command = [
        *(sys.executable, "-m", "spotlight.cli", "train", *([str(config)] if config else []), "--plain"),
        *(f"name={name}", f"run_seed={seed}", f"runs_dir={runs_dir}"),
        *overrides,
    ]
    subprocess.run(command, check=True)
    directory = runs_dir / name
    return collect(name, seed, read_run(directory), read_summary(directory / "summary.json").wall_s)


def collect(name: str, seed: int, run: RunRecord, wall_s: float) -> SeedResult:
    """The figures of a finished run."""
    change = run.change("strict")
    phases = sorted({name for row in run.rows for name in row.values if name.startswith(SECONDS)})
    return SeedResult(
        name=name,
        run_seed=seed,
        iterations=tuple(point.iteration for point in run.validations),
        strict=tuple(point.scores["strict"].mean for point in run.validations),
        graded=tuple(point.scores["graded"].mean for point in run.validations),
        stderr=change.after.stderr,
        gain=change.margin,
        noise=change.noise,
        wall_s=wall_s,
        cost_usd=run.history.cost_usd,
        phase_s={
            name.removeprefix(SECONDS): statistics.median(row.values.get(name, 0.0) for row in run.rows)
            for name in phases
        },
        preemptions=run.history.preemptions,
        lost_s=run.history.lost_s,
        drain_s=tuple(row.values["fleet/drain_s"] for row in run.rows if "fleet/drain_s" in row.values),
        head_share=sum(row.values.get("head/handling_s", 0.0) for row in run.rows) / wall_s,
    )


def curve_table(results: Sequence[SeedResult]) -> Table:
    """Strict (graded) score by iteration, a column a seed."""
    table = Table(title="Held-out validation: strict (graded)")
    table.add_column("iteration", justify="right")
    for result in results:
        table.add_column(result.name, justify="right")
    for iteration in sorted({iteration for result in results for iteration in result.iterations}):
        table.add_row(str(iteration), *(score_cell(result, iteration) for result in results))
    table.add_section()
    table.add_row("standard error", *(f"{result.stderr:.3f}" for result in results))
    table.add_row("gain", *(f"{result.gain:+.3f} ± {result.noise:.3f}" for result in results))
    table.add_row("gain / noise", *(f"{result.gain / result.noise:.0f}" for result in results))
    table.add_row("wall, s", *(f"{result.wall_s:.0f}" for result in results))
    if any(result.preemptions for result in results):
        table.add_row("preemptions", *(str(result.preemptions) for result in results))
        table.add_row("work lost, s", *(f"{result.lost_s:.1f}" for result in results))
        table.add_row("slowest drain, s", *(f"{max(result.drain_s, default=0):.2f}" for result in results))
        table.add_row("head's share", *(f"{result.head_share:.2%}" for result in results))
    table.add_row("cost, USD", *(f"{result.cost_usd:.4f}" for result in results))
    return table


def score_cell(result: SeedResult, iteration: int) -> str:
    """Strict (graded) score of an evaluation; nothing where the run had none."""
    if iteration not in result.iterations:
        return ""
    index = result.iterations.index(iteration)
    return f"{result.strict[index]:.3f} ({result.graded[index]:.3f})"


def phase_table(results: Sequence[SeedResult]) -> Table:
    """Median seconds of an iteration by phase (those without an evaluation have none)."""
    table = Table(title="Seconds of an iteration by phase (median)")
    table.add_column("phase")
    for result in results:
        table.add_column(result.name, justify="right")
    for phase in sorted({phase for result in results for phase in result.phase_s}):
        table.add_row(phase, *(f"{result.phase_s.get(phase, 0.0):.2f}" for result in results))
    return table


if __name__ == "__main__":
    typer.run(main)
