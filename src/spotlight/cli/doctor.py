"""``spotlight doctor``: is this machine ready, and if not, what to do?"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from spotlight.cli.run_argument import RUNS


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
    runs_dir: Annotated[Path, typer.Option("--runs-dir", help="Where runs would go.")] = RUNS,
) -> None:
    """Check this machine: Python, packages, device, memory, shared memory, disk, Tesseract, model hub.

    Exit status: 1 if a problem would prevent a run from working.

    [bold]Examples[/bold]

      spotlight doctor

      spotlight doctor --runs-dir /mnt/big/runs
    """
    from spotlight.cli import doctor_checks

    checks: tuple[Callable[[], Iterator[Finding]], ...] = (
        doctor_checks.python,
        doctor_checks.packages,
        doctor_checks.device,
        doctor_checks.kernels,
        doctor_checks.cpu,
        doctor_checks.shared_memory,
        lambda: doctor_checks.disk(runs_dir),
        doctor_checks.pipeline,
        doctor_checks.tesseract,
        doctor_checks.hub,
    )
    console = Console(highlight=False)
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
