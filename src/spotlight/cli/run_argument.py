"""The argument RUN of most commands: a run directory, or the name of one under ``runs/``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from spotlight_rewards.commands.exit_codes import failure

RUNS = Path("runs")


def find_run(text: str) -> Path:
    """The run directory named by ``text``; otherwise list the existing ones and exit."""
    if (found := run_named(text)) is not None:
        return found
    there = sorted(path.parent.name for path in RUNS.glob("*/config.yaml"))
    hint = f"Runs in {RUNS}/: {', '.join(there)}." if there else f"There are no runs in {RUNS}/ yet."
    raise failure(f"RUN: {text!r} is no run directory (one with config.yaml and ledger.sqlite). {hint}")


def run_named(text: str) -> Path | None:
    """The run directory named by ``text``, if there is one."""
    from spotlight.store.run_directory import RunPaths

    return next((path for path in (Path(text), RUNS / text) if RunPaths(path).config.is_file()), None)


RunArgument = Annotated[
    str,
    typer.Argument(metavar="RUN", help="A run directory, or the name of one in runs/.", show_default=False),
]
