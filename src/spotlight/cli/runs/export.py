"""``spotlight export``: a run's weights for plain diffusers."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal, TypeAlias

import typer

from spotlight.cli.options import (
    BestOption,
    CurveOption,
    DeviceOption,
    IterationOption,
    WeightsOption,
    open_run,
)
from spotlight.cli.run_argument import RunArgument
from spotlight_rewards.base.terminal import printable
from spotlight_rewards.commands.exit_codes import errors_without_traceback, failure

if TYPE_CHECKING:
    from spotlight_files.update_rounding import LostUpdate


DtypeOption: TypeAlias = Annotated[
    Literal["float32", "bfloat16"] | None,
    typer.Option("--dtype", help="With --merged: type of its weights (default: model.dtype)."),
]


LayoutOption: TypeAlias = Annotated[
    Literal["comfyui", "kohya"] | None,
    typer.Option(
        "--format",
        help="A LoRA with the layer names of ComfyUI, or of kohya's scripts (sd-scripts, musubi-tuner), "
        "instead of diffusers'.",
    ),
]

_WHERE = {
    "comfyui": "ComfyUI: put it into ComfyUI/models/loras and load it with LoraLoaderModelOnly, strength 1.",
    "kohya": "sd-scripts and musubi-tuner: give it as --network_weights to train on, or as --lora_weight "
    "(sd-scripts: --lora_weights) to generate, multiplier 1.",
}


def export(
    run: RunArgument,
    merged: Annotated[
        bool, typer.Option("--merged", help="Write a whole pipeline, with the weights merged in.")
    ] = False,
    dtype: DtypeOption = None,
    layout: LayoutOption = None,
    out: Annotated[
        Path | None,
        typer.Option("--out", help="Where to write (default: RUN/lora, RUN/lora-FORMAT or RUN/merged)."),
    ] = None,
    weights: WeightsOption = None,
    iteration: IterationOption = None,
    best: BestOption = False,
    by: CurveOption = None,
    device: DeviceOption = "auto",
) -> None:
    """Export a checkpoint, by default the newest: a LoRA for load_lora_weights, with --format for
    other programs, or with --merged a whole pipeline.

    [bold]Examples[/bold]

      spotlight export demo

      spotlight export flux-ocr --format comfyui --out ComfyUI/models/loras

      spotlight export demo --merged --out my_model

      spotlight export demo --merged --dtype float32

      spotlight export demo --best --out best
    """
    if dtype is not None and not merged:
        raise failure(
            f"--dtype {dtype} without --merged; expected both, because a LoRA is always written in float32. "
            "Add --merged, or leave it out."
        )
    if layout is not None and merged:
        raise failure(f"--format {layout} with --merged; expected one of the two. Leave one out.")
    with errors_without_traceback():
        from spotlight.report.loading import loading_snippet, whole_base_note
        from spotlight.report.record import read_run

        trained = open_run(run, device, weights, iteration, best, by)
        full = trained.config.learner.mode == "full"
        if full and not merged:
            raise failure(f"{trained.directory}: a full fine-tune has no LoRA to export. Add --merged.")
        target = out or trained.directory / ("merged" if merged else f"lora-{layout}" if layout else "lora")
        lost = None
        if layout is not None:
            for file in trained.export_renamed_lora(target, layout):
                typer.echo(f"{printable(file)} (iteration {trained.iteration}, {trained.weights} weights)")
            typer.echo(f"\n{_WHERE[layout]}")
            _say(whole_base_note(trained.config))
            return
        if merged:
            lost = trained.export_merged(target, dtype)
        else:
            trained.export_lora(target)
        prompt = read_run(trained.directory).example_prompt
    typer.echo(f"{printable(target)} (iteration {trained.iteration}, {trained.weights} weights)\n")
    if lost is not None:
        typer.echo(f"{_loss_note(lost, lora=not full)}\n")
    snippet = loading_snippet(trained.config, target.resolve(), prompt=prompt, merged=merged, dtype=dtype)
    typer.echo(printable(snippet))
    _say(whole_base_note(trained.config))


def _say(note: str) -> None:
    if note:
        typer.echo(f"\n{printable(note)}")


def _loss_note(lost: LostUpdate, *, lora: bool) -> str:
    adapter = "; so does the LoRA, exported without --merged" if lora else ""
    return (
        f"bfloat16 loses {lost.overall:.1%} of the trained update (at most {lost.worst:.1%}, of "
        f"{lost.tensor}). --dtype float32 keeps all of it, in twice the space{adapter}."
    )
