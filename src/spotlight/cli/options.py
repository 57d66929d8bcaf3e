"""Options shared by several commands, and the run that they open."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Literal, TypeAlias

import typer

from spotlight.cli.run_argument import find_run
from spotlight_rewards.commands.options import silence_loading_bars

if TYPE_CHECKING:
    from spotlight.runtime.inference import TrainedRun

Weights: TypeAlias = Literal["policy", "ema", "old", "reference"]
Device: TypeAlias = Literal["auto", "cpu", "cuda"]
Quantize: TypeAlias = Literal["none", "int8", "nf4"]

WeightsOption: TypeAlias = Annotated[
    Weights | None,
    typer.Option(
        "--weights",
        help="Which weights (default: those the run judges by); reference: before training.",
        show_default=False,
    ),
]
DeviceOption: TypeAlias = Annotated[Device, typer.Option("--device", help="Where the model lives.")]


QuantizeOption: TypeAlias = Annotated[
    Quantize | None,
    typer.Option(
        "--quantize",
        help="How the base beside a LoRA is held (default: as in training, model.quantize).",
        show_default=False,
    ),
]


def open_run(
    run: str, device: Device, weights: Weights | None, quantize: Quantize | None = None
) -> TrainedRun:
    """The newest checkpoint of the run that the argument names, loaded."""
    directory = find_run(run)
    silence_loading_bars()
    from spotlight.runtime.inference import TrainedRun

    return TrainedRun.open(directory, device=device, weights=weights, quantize=quantize)
