"""Options shared by several commands, and the run that they open."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Literal, TypeAlias

import typer

from spotlight.cli.run_argument import find_run
from spotlight_rewards.commands.exit_codes import failure
from spotlight_rewards.commands.options import silence_loading_bars

if TYPE_CHECKING:
    from spotlight.runtime.inference import TrainedRun

Weights: TypeAlias = Literal["policy", "ema", "old", "reference"]
Device: TypeAlias = Literal["auto", "cpu", "cuda"]
Quantize: TypeAlias = Literal["none", "int8", "nf4"]

WeightsOption: TypeAlias = Annotated[
    Weights | None,
    typer.Option(
        "--weights", help="Weights to use (default: those the run evaluates); reference: before training."
    ),
]
IterationOption: TypeAlias = Annotated[
    int | None,
    typer.Option("--iteration", min=0, help="Checkpoint after this many iterations (default: the newest)."),
]
BestOption: TypeAlias = Annotated[
    bool, typer.Option("--best", help="The kept checkpoint with the best validation.")
]
CurveOption: TypeAlias = Annotated[
    str | None,
    typer.Option(
        "--by",
        metavar="CURVE",
        help="With --best: validation curve to judge by, such as pickscore (default: the run's).",
    ),
]
DeviceOption: TypeAlias = Annotated[Device, typer.Option("--device", help="Where the model runs.")]


QuantizeOption: TypeAlias = Annotated[
    Quantize | None,
    typer.Option(
        "--quantize", help="Bits of the base under a LoRA (default: as in training, model.quantize)."
    ),
]


def open_run(
    run: str,
    device: Device,
    weights: Weights | None,
    iteration: int | None,
    best: bool,
    curve: str | None,
    quantize: Quantize | None = None,
) -> TrainedRun:
    """A checkpoint of the run that the argument names, loaded; the newest if none is chosen."""
    if best and iteration is not None:
        raise failure(f"--best: found with --iteration {iteration}; expected one of the two. Leave one out.")
    if curve is not None and not best:
        raise failure(f"--by: found {curve} without --best; expected both. Add --best, or leave it out.")
    directory = find_run(run, "all" if best or iteration is not None else "checkpoint")
    silence_loading_bars()
    from spotlight.runtime.inference import TrainedRun

    return TrainedRun.open(
        directory,
        device=device,
        weights=weights,
        iteration=iteration,
        best=(curve or "") if best else None,
        quantize=quantize,
    )
