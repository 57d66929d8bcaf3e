"""Command line of the one-GPU suite.

python -m benchmarks.gpu --part A --json build/gpu-A.json
python -m benchmarks.gpu --part A --tiny          every row on a tiny model, here on the CPU
"""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from benchmarks.gpu.rows import ROWS
from benchmarks.gpu.suite import IN_MEMORY, Part, Report, Verdict, chosen
from benchmarks.gpu.supervisor import supervise


def main(
    part: Annotated[str, typer.Option(help="A: right, B: fast, C: processes, D: end to end.")],
    json: Annotated[Path | None, typer.Option(help="Results, written after every row.")] = None,
    tiny: Annotated[bool, typer.Option(help="A tiny model; thresholds of speed are not judged.")] = False,
    device: Annotated[str, typer.Option(help="cuda or cpu; default: cuda, with --tiny cpu.")] = "",
    minutes: Annotated[float, typer.Option(help="A row that no longer fits is skipped.")] = 8.0,
    only: Annotated[list[str], typer.Option(help="Rows by name; repeatable.")] = [],  # noqa: B006
    model: Annotated[str, typer.Option(help="Part D: qwen-image, z-image; default: by GPU memory.")] = "",
    scratch: Annotated[Path | None, typer.Option(help="Directory for models and sockets.")] = None,
) -> None:
    """Run one part of the suite; the exit code is 1 if a row failed."""
    if part not in ("A", "B", "C", "D"):
        raise typer.BadParameter(f"--part is {part!r}; expected A, B, C or D")
    if model not in ("", "qwen-image", "z-image"):
        raise typer.BadParameter(f"--model is {model!r}; expected qwen-image or z-image")
    which: Part = part  # type: ignore[assignment]
    try:
        rows = chosen(ROWS, which, only)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error
    where = device or ("cpu" if tiny else "cuda")
    console = Console()
    wide = console if console.is_terminal else Console(width=200)
    settings = {
        "part": which,
        "tiny": tiny,
        "device": where,
        "minutes": minutes,
        "only": list(only),
        "model": model,
    }
    report = Report(which, settings, wide, json)
    # Short: the paths of sockets below it are limited to 107 bytes.
    home = Path(tempfile.mkdtemp(prefix="gs", dir=scratch))
    try:
        supervise(rows, report, home, device=where, tiny=tiny, limit_s=60 * minutes, model=model)
    finally:
        for directory in (home, IN_MEMORY / home.name):
            shutil.rmtree(directory, ignore_errors=True)
    report.summary()
    raise typer.Exit(int(any(result.verdict is Verdict.FAIL for result in report.results)))


if __name__ == "__main__":
    typer.run(main)
