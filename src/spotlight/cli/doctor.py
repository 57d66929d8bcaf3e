"""``spotlight doctor``: is this machine ready, and if not, what to do?"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Annotated, TypeAlias

import typer
from rich.table import Table
from rich.text import Text

from spotlight.cli.run_argument import RUNS
from spotlight.registry import CHECKS
from spotlight_rewards.base.terminal import TextConsole
from spotlight_rewards.commands.exit_codes import errors_without_traceback, failure
from spotlight_rewards.commands.options import silence_loading_bars

_Model: TypeAlias = Annotated[
    str | None,
    typer.Argument(
        metavar="MODEL",
        help="With --gpu: a family, the hub id of a published model, a preset or a configuration file "
        "(default: qwen-image).",
    ),
]
_Side: TypeAlias = Annotated[
    int | None,
    typer.Option(
        "--side",
        min=16,
        help="With --gpu: height and width in pixels (default: the configuration's, else 512).",
    ),
]
_Json: TypeAlias = Annotated[Path | None, typer.Option("--json", help="With --gpu: write a report here.")]


class Verdict(StrEnum):
    OK = "ok"
    WARN = "warn"
    FAIL = "fail"


_STYLES = {Verdict.OK: "green", Verdict.WARN: "yellow", Verdict.FAIL: "bold red"}


@dataclass(frozen=True, slots=True)
class Finding:
    """Result line: what was checked, its state, and the remedy (empty if ok)."""

    verdict: Verdict
    what: str
    found: str
    remedy: str = ""


def doctor(
    model: _Model = None,
    runs_dir: Annotated[Path, typer.Option("--runs-dir", help="Parent of the run directories.")] = RUNS,
    gpu: Annotated[
        bool, typer.Option("--gpu", help="Measure this machine's GPUs instead; takes about 30 seconds.")
    ] = False,
    side: _Side = None,
    json: _Json = None,
) -> None:
    """Check this machine: Python, packages, device and what it can train, memory, shared memory, disk,
    Tesseract, model hub.

    With --gpu it measures matrix products and copies; a denoising forward and updates of a model with random
    weights, with their utilisation (MFU) and kernels; what fits into memory; and how fast several GPUs
    communicate. Nothing is downloaded.

    Exit status: 1 if a problem would prevent a run from working, or if there is no GPU to measure.

    [bold]Examples[/bold]

      spotlight doctor

      spotlight doctor --runs-dir /mnt/big/runs

      spotlight doctor --gpu

      spotlight doctor --gpu flux --side 1024 --json report.json

      spotlight doctor --gpu Wan-AI/Wan2.1-T2V-14B-Diffusers

      spotlight doctor --gpu examples/qwen-image-ocr-lora.yaml
    """
    if gpu:
        _check_gpus(model or "qwen-image", side, json)
        return
    given = {"MODEL": model, "--side": side, "--json": json}
    for name, value in given.items():
        if value is not None:
            raise failure(
                f"{name} is {str(value)!r} without --gpu; expected both: add --gpu, or leave it out."
            )
    _check_machine(runs_dir)


def _check_machine(runs_dir: Path) -> None:
    from spotlight.cli import doctor_checks

    checks: tuple[Callable[[], Iterator[Finding]], ...] = (
        doctor_checks.python,
        doctor_checks.packages,
        doctor_checks.extensions,
        doctor_checks.device,
        doctor_checks.trainable,
        doctor_checks.kernels,
        doctor_checks.cpu,
        doctor_checks.shared_memory,
        lambda: doctor_checks.disk(runs_dir),
        doctor_checks.pipeline,
        doctor_checks.tesseract,
        doctor_checks.hub,
    )
    console = TextConsole()
    failed = 0
    table = Table(box=None, pad_edge=False, show_header=False)
    for _ in range(3):
        table.add_column(overflow="fold")
    for check in checks:
        for finding in check():
            failed += finding.verdict is Verdict.FAIL
            text = finding.found + (f"\n-> {finding.remedy}" if finding.remedy else "")
            table.add_row(Text(finding.verdict, style=_STYLES[finding.verdict]), finding.what, Text(text))
    console.print(table)
    if failed:
        raise typer.Exit(1)


def _check_gpus(model: str, side_px: int | None, json: Path | None) -> None:
    silence_loading_bars()
    if "gpu" not in CHECKS:
        raise failure(
            "--gpu needs the package spotlight-plan, which is not installed. "
            "pip install 'spotlight-rl[plan]'."
        )
    with errors_without_traceback():
        CHECKS.load("gpu")(model, side_px, json)
