"""``spotlight eval``: evaluate a run's weights on held-out prompts."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table

from spotlight.cli.options import (
    BestOption,
    CurveOption,
    DeviceOption,
    IterationOption,
    QuantizeOption,
    WeightsOption,
    open_run,
)
from spotlight.cli.run_argument import RunArgument
from spotlight_rewards.base.terminal import TextConsole
from spotlight_rewards.commands.exit_codes import errors_without_traceback

if TYPE_CHECKING:
    from spotlight.runtime.inference import TrainedRun
    from spotlight.runtime.validation import Validation


def evaluate(
    run: RunArgument,
    images: Annotated[
        int | None, typer.Option(min=1, help="Pictures per prompt (default: the run's).")
    ] = None,
    steps: Annotated[int | None, typer.Option(min=1, help="Denoising steps (default: the run's).")] = None,
    prompts: Annotated[
        Path | None,
        typer.Option(help="File of prompts, with columns like the run's (default: its held-out prompts)."),
    ] = None,
    weights: WeightsOption = None,
    iteration: IterationOption = None,
    best: BestOption = False,
    by: CurveOption = None,
    device: DeviceOption = "auto",
    quantize: QuantizeOption = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the scores as JSON.")] = False,
) -> None:
    """Evaluate a checkpoint (default: the newest) on held-out prompts, with fixed seeds and standard errors.

    [bold]Examples[/bold]

      spotlight eval demo

      spotlight eval demo --weights reference

      spotlight eval demo --iteration 20

      spotlight eval runs/demo --prompts my_prompts.jsonl --images 32 --json
    """
    with errors_without_traceback():
        from spotlight.cli.runs.progress import WorkBar

        trained = open_run(run, device, weights, iteration, best, by, quantize)
        with WorkBar() as bar:
            validation = trained.evaluate(bar, images, steps, prompts)
    if as_json:
        row = {name: value if math.isfinite(value) else None for name, value in validation.row().items()}
        about = {"run": str(trained.directory), "iteration": trained.iteration, "weights": trained.weights}
        typer.echo(json.dumps(about | row, indent=2))
    else:
        _print(trained, validation)


def _print(trained: TrainedRun, validation: Validation) -> None:
    from spotlight.report.wording import score

    title = f"{trained.directory}: {trained.weights} weights after {trained.iteration} iterations"
    table = Table(box=None, pad_edge=False, title=title, title_justify="left", title_style="bold")
    table.add_column("curve", overflow="fold")
    table.add_column("mean ± standard error", justify="right")
    for name, value in validation.curves.items():
        judged = " (judged)" if name == validation.strict else ""
        table.add_row(f"{name}{judged}", score(value.mean, value.stderr))
    for tag, value in validation.by_tag.items():
        table.add_row(f"  {tag}", score(value.mean, value.stderr))
    TextConsole().print(table)
