"""The argument RUN of most commands: a run directory, or the name of one under ``runs/``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from spotlight_rewards.base.file_errors import hidden, is_there
from spotlight_rewards.commands.exit_codes import errors_without_traceback, failure

RUNS = Path("runs")


def find_run(
    text: str, wanted: Literal["light", "pictures", "lora", "checkpoint", "all"] = "checkpoint"
) -> Path:
    """The run directory named by ``text``; otherwise list the existing ones and exit.

    Args:
        wanted: what is brought of a run in a bucket (:class:`spotlight.store.run_store.Wanted`).
    """
    from spotlight.store.run_directory import RunPaths
    from spotlight.store.run_store import Wanted, stored_run

    with errors_without_traceback():
        if (copy := stored_run(text, Wanted(wanted))) is not None:
            return copy

    if (found := run_named(text)) is not None:
        return found
    there = sorted(path.parent.name for path in RUNS.glob("*/config.yaml"))
    hint = f"Runs in {RUNS}/: {', '.join(there)}." if there else f"There are no runs in {RUNS}/ yet."
    why = hidden(RunPaths(Path(text)).config)
    raise failure(f"RUN: {text!r} is no run directory (one with config.yaml and ledger.sqlite).{why} {hint}")


def run_named(text: str) -> Path | None:
    """The run directory named by ``text``, if there is one."""
    from spotlight.store.run_directory import RunPaths

    there = (path for path in (Path(text), RUNS / text) if is_there(RunPaths(path).config))
    return next((path for path in there if RunPaths(path).config.is_file()), None)


RunArgument = Annotated[
    str,
    typer.Argument(
        metavar="RUN", help="A run directory, the name of one in runs/, or s3://BUCKET/PREFIX/NAME."
    ),
]
