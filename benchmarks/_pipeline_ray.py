"""The pipeline on the real Ray driver: CPU slots of this machine, the tiny testbed, two FSDP ranks.

One switch after the other is added, then each is on alone; and as many slots as there are train and roll out
in turn, each all of them (*colocated*). Every mode is run with several run seeds. Told are samples trained a
second over the iterations after the first (which has the evaluation of the start, and warms up), the
validation score at the end with its standard error, how many validations on the way lie outside twice the
standard error around the synchronous ones, and which mode had the same losses to all digits.

Slots share this machine's cores, so each is made to take its time asleep (``_paced/sitecustomize.py``):
otherwise slots that overlap would only slow each other down. The ceiling beside each mode follows from the
seconds measured in the synchronous runs, G of generation and T of training an iteration: (G + T)/max(G, T),
where each half keeps to its slots; where the learner's slots generate too, G + T over the shortest iteration
that leaves no slot idle.
"""

from __future__ import annotations

import math
import os
import statistics
import subprocess
import sys
from collections.abc import Sequence
from contextlib import closing
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

from spotlight.config.load import load_config
from spotlight.report.record import read_run
from spotlight.store.ledger import ledger_queries as queries
from spotlight.store.run_directory import RunPaths
from spotlight.store.run_summary import read_summary
from spotlight_rewards.base.file_errors import StoreError

RANKS = 2
ROLLOUT_SLOTS = 2
STEP_S, TRAIN_S = 0.040, 0.200
"""Seconds that a slot takes for a denoising step of a sample, and for training one, besides computing."""
SETTINGS = (
    "iterations=10",
    "rollout.prompts_per_iteration=4",
    "rollout.group_size=8",
    "rollout.batch_size=8",
    "rollout.steps=8",
    "algorithm.advantage.std=group",
    "algorithm.train_timesteps=2",
    "learner.micro_batch_size=4",
    "learner.warmup_steps=0",
    "learner.decay_iterations=null",
    "learner.learning_rate=1e-3",
    "evaluation.every=5",
    "evaluation.steps=8",
    "evaluation.prompts=8",
    "evaluation.images_per_prompt=8",
    "evaluation.grid_prompts=2",
    "evaluation.grid_images=2",
    "metrics.tensorboard=false",
    "fleet.driver=ray",
    f"fleet.learner_ranks={RANKS}",
    "fleet.spot.nodes=0",
    f"fleet.local={{rollout_slots: {ROLLOUT_SLOTS}, threads: 1}}",
)
"""Generation and training of an iteration take about as long: 4 x 8 samples, 8 steps or 2 timesteps each."""
SWITCHES = (
    ("GAP", ("pipeline={axis: generation, slice_size: 4, baseline: slice}",)),
    ("TSP", ("learner.timesteps_per_pass=2",)),
    ("TAG", ("pipeline.trainers_generate=true", "pipeline.switch_s=0.05")),
    ("TCSS", ("pipeline.next_share=0.5",)),
    ("exploration", ("exploration={where: idle, seeds_per_prompt: 12, steps: 8}",)),
)
"""In the order in which they are added, and alone."""
SYNCHRONOUS, COLOCATED = "synchronous", "colocated"
SLOTS = ROLLOUT_SLOTS + RANKS
TOGETHER = (
    f"fleet.learner_ranks={SLOTS}",
    "fleet.local={rollout_slots: 0, threads: 1}",
    "pipeline={trainers_generate: true, switch_s: 0.05}",
)
"""Nobody else rolls out, and nothing is trained before all is there: the slots do one after the other."""
SECONDS = "seconds/"


@dataclass(frozen=True, slots=True)
class Mode:
    """What is switched on. ``trainers``: the learner's slots, of which there are ``ranks``, generate too."""

    name: str
    overrides: tuple[str, ...]
    trainers: bool
    ranks: int = RANKS


@dataclass(frozen=True, slots=True)
class RayRun:
    """One finished run.

    Attributes:
        samples_per_s: trained, from the end of the first iteration to that of the last.
        generation_s: seconds of all slots on train rollouts, an iteration (median).
        training_s: seconds of all ranks on training, an iteration (median).
        idle_share: of all slots' seconds, over the iterations after the first.
        validations: strict scores, first to last.
        losses: of the iterations.
        early: samples made by the version before that of their iteration.
        by_trainers: samples made by the learner's slots.
        explored: previews scored.
    """

    mode: str
    run_seed: int
    samples_per_s: float
    generation_s: float
    training_s: float
    idle_share: float
    validations: tuple[float, ...]
    losses: tuple[float, ...]
    early: int
    by_trainers: int
    explored: int
    wall_s: float


def modes() -> tuple[Mode, ...]:
    """Synchronous, with one switch more each (``+TSP``), with one alone (``TSP``), and colocated."""
    found, overrides, trainers = [Mode(SYNCHRONOUS, (), False)], (), False
    for name, more in SWITCHES:
        overrides, trainers = (*overrides, *more), trainers or name == "TAG"
        found.append(Mode(f"+{name}", overrides, trainers))
    alone = [Mode(name, more, name == "TAG") for name, more in SWITCHES[1:]]
    return (*found, *alone, Mode(COLOCATED, TOGETHER, True, SLOTS))


def run_ray(
    runs_dir: Path, seeds: int = 3, only: Sequence[str] = (), overrides: Sequence[str] = ()
) -> dict[str, object]:
    """Run every mode with every seed, or read those that are there; returns all figures, JSON-able.

    Args:
        only: names of modes; none: all.
        overrides: of all runs.
    """
    chosen = [mode for mode in modes() if not only or mode.name in only]
    runs = [run(mode, seed, runs_dir, overrides) for seed in range(seeds) for mode in chosen]
    show_ray(runs)
    return {
        "settings": [*SETTINGS, *overrides],
        "pace": {"step_s": STEP_S, "train_s": TRAIN_S},
        "modes": summarise(runs),
        "runs": [asdict(one) for one in runs],
    }


def run(mode: Mode, seed: int, runs_dir: Path, overrides: Sequence[str]) -> RayRun:
    """Train through the command line, unless that run is finished, and read what it left."""
    name = f"{mode.name.replace('+', 'with-')}-{seed}"
    directory = runs_dir / name
    keys = [
        f"name={name}",
        f"run_seed={seed}",
        f"runs_dir={runs_dir}",
        *SETTINGS,
        *mode.overrides,
        *overrides,
    ]
    try:
        read_summary(directory / "summary.json")
    except StoreError:
        command = (sys.executable, "-m", "spotlight.cli", "train", "--plain", *keys)
        subprocess.run(command, check=True, env=paced_environment())
    if load_config(RunPaths(directory).config) != load_config(None, keys):
        raise SystemExit(f"{directory}: made with other settings; remove it, or take another --runs-dir.")
    return collect(mode.name, seed, directory)


def paced_environment() -> dict[str, str]:
    """That of a run whose slots take their time."""
    folder = str(Path(__file__).with_name("_paced"))
    found = os.environ.get("PYTHONPATH")
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([folder, found] if found else [folder]),
        "SPOTLIGHT_PACED_STEP_S": str(STEP_S),
        "SPOTLIGHT_PACED_TRAIN_S": str(TRAIN_S),
        "OMP_NUM_THREADS": "1",
    }


def collect(mode: str, seed: int, directory: Path) -> RayRun:
    """The figures of a finished run."""
    record = read_run(directory)
    first, *later = record.rows
    last = later[-1]
    seconds = [
        {name.removeprefix(SECONDS): value for name, value in row.values.items() if name.startswith(SECONDS)}
        for row in later
    ]
    spent = sum(sum(row.values()) for row in seconds)
    counts = _counts(directory)
    return RayRun(
        mode=mode,
        run_seed=seed,
        samples_per_s=(last.samples_trained - first.samples_trained) / (last.wall_s - first.wall_s),
        generation_s=statistics.median(row.get("rollout", 0.0) for row in seconds),
        training_s=statistics.median(row.get("training", 0.0) for row in seconds),
        idle_share=sum(row.get("idle", 0.0) for row in seconds) / spent,
        validations=tuple(row.scores["strict"].mean for row in record.validations),
        losses=tuple(row.values["train/loss"] for row in record.rows),
        early=counts["early"],
        by_trainers=counts["by_trainers"],
        explored=counts["explored"],
        wall_s=read_summary(directory / "summary.json").wall_s,
    )


_COUNTED = {
    "early": "SELECT COUNT(*) FROM rollouts JOIN outcomes ON outcomes.rollout = id"
    " WHERE kind = 'trained' AND rollouts.version < iteration",
    "by_trainers": "SELECT COUNT(*) FROM samples JOIN rollouts ON id = rollout"
    " WHERE purpose = 'train' AND worker NOT LIKE '%/rollout/%'",
    "explored": "SELECT COUNT(*) FROM outcomes WHERE kind = 'explored'",
}
"""One optimizer step an iteration: a rollout's version is the number of its iteration, unless it is early."""


def _counts(directory: Path) -> dict[str, int]:
    with closing(queries.open_readonly(RunPaths(directory).ledger)) as connection:
        return {name: int(connection.execute(query).fetchone()[0]) for name, query in _COUNTED.items()}


# -- figures -----------------------------------------------------------------------------------------------


def ceiling(generation_s: float, training_s: float, trainers: bool, ranks: int = RANKS) -> float:
    """Best throughput of any overlap over the synchronous one.

    Args:
        generation_s: seconds of all slots an iteration.
        training_s: seconds of all ranks an iteration.
        trainers: ranks generate while they do not train.
        ranks: of the slots, those that train.
    """
    generation, training = generation_s / ROLLOUT_SLOTS, training_s / RANKS
    shortest = max(generation, training)
    if trainers:
        shortest = max(training_s / ranks, (generation_s + training_s) / SLOTS)
    return (generation + training) / shortest


def summarise(runs: Sequence[RayRun]) -> list[dict[str, object]]:
    """Every mode over its seeds; ratios are of the synchronous run of the same seed."""
    base = {one.run_seed: one for one in runs if one.mode == SYNCHRONOUS}
    rows: list[dict[str, object]] = []
    for mode in modes():
        mine = [one for one in runs if one.mode == mode.name]
        if not mine:
            continue
        rates = [one.samples_per_s for one in mine]
        ratios = [
            one.samples_per_s / base[one.run_seed].samples_per_s for one in mine if one.run_seed in base
        ]
        scores = [one.validations[-1] for one in mine]
        rows.append(
            {
                "mode": mode.name,
                "samples_per_s": statistics.mean(rates),
                "samples_per_s_stderr": standard_error(rates),
                "ratio": statistics.mean(ratios) if ratios else None,
                "ratio_stderr": standard_error(ratios),
                "ceiling": statistics.mean(
                    ceiling(one.generation_s, one.training_s, mode.trainers, mode.ranks)
                    for one in base.values()
                )
                if base
                else None,
                "validation": statistics.mean(scores),
                "validation_stderr": standard_error(scores),
                "outside": outside(mine, list(base.values())),
                "validations": len(mine[0].validations),
                "learns_as": learns_as(mode.name, runs),
                "idle_share": statistics.mean(one.idle_share for one in mine),
                "early": statistics.mean(one.early for one in mine),
                "by_trainers": statistics.mean(one.by_trainers for one in mine),
                "explored": statistics.mean(one.explored for one in mine),
                "seeds": len(mine),
            }
        )
    return rows


def outside(mine: Sequence[RayRun], base: Sequence[RayRun]) -> int | None:
    """Validations whose means over seeds differ by more than twice the standard error of the difference.

    None where either has fewer than two seeds.
    """
    if min(len(mine), len(base)) < 2:
        return None
    count = 0
    for ours, theirs in zip(
        zip(*(one.validations for one in mine), strict=True),
        zip(*(one.validations for one in base), strict=True),
        strict=True,
    ):
        errors = (standard_error(ours) or 0.0, standard_error(theirs) or 0.0)
        count += abs(statistics.mean(ours) - statistics.mean(theirs)) > 2 * math.hypot(*errors)
    return count


def learns_as(name: str, runs: Sequence[RayRun]) -> str:
    """The first mode with the same losses, to all digits, with every seed that both have."""
    losses = {(one.mode, one.run_seed): one.losses for one in runs}
    seeds = [seed for mode, seed in losses if mode == name]
    for mode in modes():
        shared = [seed for seed in seeds if (mode.name, seed) in losses]
        if shared and all(losses[mode.name, seed] == losses[name, seed] for seed in shared):
            return mode.name
    return name


def standard_error(values: Sequence[float]) -> float | None:
    """Of the mean; None of fewer than two values."""
    return statistics.stdev(values) / len(values) ** 0.5 if len(values) > 1 else None


def show_ray(runs: Sequence[RayRun]) -> None:
    """Print a row a mode."""
    table = Table(
        title=f"Ray on {SLOTS} CPU slots: {RANKS} train, {ROLLOUT_SLOTS} roll out; colocated: all do both"
    )
    table.add_column("mode")
    for column in (
        "samples/s",
        "x sync",
        "ceiling",
        "validation",
        "outside",
        "learns as",
        "idle",
        "early",
        "by trainers",
        "explored",
    ):
        table.add_column(column, justify="right")
    for row in summarise(runs):
        table.add_row(
            str(row["mode"]),
            _with_error(row["samples_per_s"], row["samples_per_s_stderr"], 2),
            _with_error(row["ratio"], row["ratio_stderr"], 3),
            _with_error(row["ceiling"], None, 2),
            _with_error(row["validation"], row["validation_stderr"], 3),
            "" if row["outside"] is None else f"{row['outside']} of {row['validations']}",
            str(row["learns_as"]),
            f"{row['idle_share']:.0%}",
            f"{row['early']:.0f}",
            f"{row['by_trainers']:.0f}",
            f"{row['explored']:.0f}",
        )
    Console().print(table)


def _with_error(mean: object, error: object, digits: int) -> str:
    if not isinstance(mean, float):
        return ""
    return f"{mean:.{digits}f}" + (f" ± {error:.{digits}f}" if isinstance(error, float) else "")
