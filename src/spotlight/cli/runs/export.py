"""``spotlight export``: a run's weights for plain diffusers."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from spotlight.cli.exit_codes import errors_without_traceback, failure
from spotlight.cli.options import (
    Device,
    DeviceOption,
    WeightsOption,
    device_of,
    silence_loading_bars,
    slot_of,
)
from spotlight.cli.run_argument import RunArgument, find_run


def export(
    run: RunArgument,
    merged: Annotated[
        bool, typer.Option("--merged", help="A whole pipeline directory with the weights merged in.")
    ] = False,
    out: Annotated[
        Path | None,
        typer.Option("--out", help="Where to [default: RUN/lora or RUN/merged].", show_default=False),
    ] = None,
    weights: WeightsOption = None,
    device: DeviceOption = Device.AUTO,
) -> None:
    """Export the newest checkpoint: a LoRA for load_lora_weights, or with --merged a whole pipeline.

    [bold]Examples[/bold]

      spotlight export demo

      spotlight export demo --merged --out my_model
    """
    directory = find_run(run)
    silence_loading_bars()
    with errors_without_traceback():
        from spotlight.report.loading import loading_snippet
        from spotlight.runtime.inference import TrainedRun

        trained = TrainedRun.open(directory, device=device_of(device), weights=slot_of(weights))
        full = trained.config.learner.mode == "full"
        if full and not merged:
            raise failure(f"{directory}: a full fine-tune has no LoRA to export; add --merged.")
        target = out or directory / ("merged" if merged else "lora")
        if merged:
            trained.export_merged(target)
        else:
            trained.export_lora(target)
    typer.echo(f"{target} (iteration {trained.iteration}, {trained.weights} weights)\n")
    typer.echo(loading_snippet(trained.config, target.resolve(), merged=merged))
