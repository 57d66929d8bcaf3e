"""What it saves that a preview which is its rollout is kept, and not made again.

    python -m benchmarks.kept_previews --json kept-previews.json

Two runs of the testbed take turns, with previews on the critical path of all of a rollout's steps: one keeps
those that were chosen, one makes them again as earlier versions did. Seconds are those this process computed,
by iteration: of previews and rollouts, with their decoding, and of these and training. Rewards are scored in
processes of their own. At the same batch shapes both train the same samples; the mean rewards are printed to
show how close they are otherwise.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Annotated
from unittest.mock import patch

import torch
import typer
from rich.table import Table

from benchmarks._exploration_lab import laboratory
from benchmarks._measure import machine, ratio, wide_console, write_result
from spotlight.config.load import load_config
from spotlight.config.schema import RunConfig
from spotlight.config.sections.exploration import ExplorationConfig
from spotlight.scheduler.types import Phase

KEEPS = {"kept": True, "made again": False}
_GENERATION = tuple(f"seconds/{phase.value}" for phase in (Phase.EXPLORATION, Phase.ROLLOUT))
_COMPUTED = (*_GENERATION, f"seconds/{Phase.TRAINING.value}")


def rows_of(config: RunConfig, keeps: bool) -> list[dict[str, float]]:
    """The metrics of a run's iterations, with seconds that this process computed."""
    with ExitStack() as stack:
        if not keeps:
            stack.enter_context(patch.object(ExplorationConfig, "makes_rollouts", return_value=False))
        lab = stack.enter_context(laboratory(config))
        return lab.train("critical_path", now_s=time.process_time).rows


def main(
    prompts: Annotated[int, typer.Option(help="Per iteration.")] = 4,
    group: Annotated[int, typer.Option(help="Samples of a prompt that are trained.")] = 8,
    previews: Annotated[int, typer.Option(help="Of a prompt.")] = 16,
    steps: Annotated[int, typer.Option(help="Denoising steps.")] = 6,
    iterations: Annotated[int, typer.Option(help="Of a run; the first does not count.")] = 3,
    rounds: Annotated[int, typer.Option(help="Runs of each kind.")] = 3,
    json: Annotated[Path | None, typer.Option(help="Also write everything measured here.")] = None,
) -> None:
    """Print CPU seconds of an iteration, and their ratios with 95 % intervals over pairs of iterations."""
    with tempfile.TemporaryDirectory() as directory:
        found: dict[str, list[dict[str, float]]] = {name: [] for name in KEEPS}
        for turn in range(rounds):
            settings = [
                f"runs_dir={directory}", f"run_seed={turn}", f"iterations={iterations}",
                f"rollout.prompts_per_iteration={prompts}", f"rollout.group_size={group}",
                f"rollout.steps={steps}", f"learner.micro_batch_size={prompts * group}",
                "learner.decay_iterations=null",
                "evaluation={every: 999, prompts: 1, images_per_prompt: 1, grid_images: 1, grid_prompts: 1}",
                f"exploration={{seeds_per_prompt: {previews}}}",
            ]  # fmt: skip
            for name, keeps in KEEPS.items():
                found[name] += rows_of(load_config(None, settings), keeps)[1:]
    table = Table(title=f"{prompts} prompts x {previews} previews, {group} trained, {steps} steps")
    for column in (
        "chosen previews are",
        "iterations",
        "generation, s",
        "with training, s",
        "reward",
    ):
        table.add_column(column)
    for name, rows in found.items():
        medians = (f"{statistics.median(_sums(rows, names)):.2f}" for names in (_GENERATION, _COMPUTED))
        reward = statistics.fmean(row["rollout/reward"] for row in rows)
        table.add_row(name, str(len(rows)), *medians, f"{reward:.4f}")
    console = wide_console()
    console.print(table)
    for what, names in (("generation", _GENERATION), ("with training", _COMPUTED)):
        ours, theirs = (_sums(found[name], names) for name in KEEPS)
        console.print(f"{what}: kept / made again = {ratio(ours, theirs)}")
    if json is not None:
        asked = {"prompts": prompts, "group": group, "previews": previews, "steps": steps}
        asked |= {"iterations": iterations, "rounds": rounds}
        write_result(
            json, "kept previews", machine(torch.device("cpu")), {"settings": asked, "iterations": found}
        )


def _sums(rows: list[dict[str, float]], names: tuple[str, ...]) -> list[float]:
    return [_sum(row, names) for row in rows]


def _sum(row: Mapping[str, float], names: tuple[str, ...]) -> float:
    return sum(row.get(name, 0.0) for name in names)


if __name__ == "__main__":
    typer.run(main)
