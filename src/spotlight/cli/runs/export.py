"""``spotlight export``: a run's weights for plain diffusers."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from spotlight.cli.options import Device, DeviceOption, WeightsOption, device_of, slot_of
from spotlight.cli.run_argument import RunArgument, find_run
from spotlight_rewards.commands.exit_codes import errors_without_traceback, failure
from spotlight_rewards.commands.options import silence_loading_bars

if TYPE_CHECKING:
    from spotlight.models.shared.update_rounding import LostUpdate


class MergedType(StrEnum):
    """Type of merged weights."""

    FLOAT32 = "float32"
    BFLOAT16 = "bfloat16"


def export(
    run: RunArgument,
    merged: Annotated[
        bool, typer.Option("--merged", help="A whole pipeline directory with the weights merged in.")
    ] = False,
    dtype: Annotated[
        MergedType | None,
        typer.Option(
            "--dtype", help="With --merged: type of its weights (default: model.dtype).", show_default=False
        ),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option("--out", help="Where to (default: RUN/lora or RUN/merged).", show_default=False),
    ] = None,
    weights: WeightsOption = None,
    device: DeviceOption = Device.AUTO,
) -> None:
    """Export the newest checkpoint: a LoRA for load_lora_weights, or with --merged a whole pipeline.

    [bold]Examples[/bold]

      spotlight export demo

      spotlight export demo --merged --out my_model

      spotlight export demo --merged --dtype float32
    """
    if dtype is not None and not merged:
        raise failure(
            f"--dtype {dtype.value}: nothing without --merged, because a LoRA is always written in float32; "
            "add --merged, or leave it out."
        )
    chosen: Literal["float32", "bfloat16"] | None = None if dtype is None else dtype.value
    directory = find_run(run)
    silence_loading_bars()
    with errors_without_traceback():
        from spotlight.report.loading import loading_snippet
        from spotlight.report.record import read_run
        from spotlight.runtime.inference import TrainedRun

        trained = TrainedRun.open(directory, device=device_of(device), weights=slot_of(weights))
        full = trained.config.learner.mode == "full"
        if full and not merged:
            raise failure(f"{directory}: a full fine-tune has no LoRA to export; add --merged.")
        target = out or directory / ("merged" if merged else "lora")
        lost = None
        if merged:
            lost = trained.export_merged(target, chosen)
        else:
            trained.export_lora(target)
        prompt = read_run(directory).example_prompt
    typer.echo(f"{target} (iteration {trained.iteration}, {trained.weights} weights)\n")
    if lost is not None:
        typer.echo(f"{_loss_note(lost, lora=not full)}\n")
    typer.echo(loading_snippet(trained.config, target.resolve(), prompt=prompt, merged=merged, dtype=chosen))


def _loss_note(lost: LostUpdate, *, lora: bool) -> str:
    adapter = "; so does the LoRA, exported without --merged" if lora else ""
    return (
        f"bfloat16 loses {lost.overall:.1%} of the trained update (of {lost.tensor}: {lost.worst:.1%}, the "
        f"most). --dtype float32 keeps all of it, in twice the space{adapter}."
    )
