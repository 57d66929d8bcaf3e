"""``spotlight runs``: list the runs and their state."""

from __future__ import annotations

import json
import math
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table
from rich.text import Text

from spotlight.cli.run_argument import RUNS
from spotlight_rewards.base.errors import UserError
from spotlight_rewards.base.file_errors import hidden, is_there
from spotlight_rewards.base.terminal import TextConsole
from spotlight_rewards.commands.exit_codes import complain, errors_without_traceback

if TYPE_CHECKING:
    from spotlight.report.record import RunRecord

_WIDE = 100
"""Columns of a terminal from which on there is room for the algorithm."""
_STYLES = {"finished": "green", "running": "cyan", "failed": "red", "killed": "yellow", "stopped": "yellow"}


def runs(
    directory: Annotated[
        Path, typer.Argument(metavar="[DIR]", help="Parent of the run directories, or s3://BUCKET/PREFIX.")
    ] = RUNS,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, an object for each run.")] = False,
) -> None:
    """List the runs with progress, last validation, cost and state.

    Wide terminals also show the algorithm and what each run was estimated to take (while it goes on, also as
    its own iterations estimate it, from the third on).

    [bold]Examples[/bold]

      spotlight runs

      spotlight runs /mnt/big/runs

      spotlight runs --json | jq '.[] | select(.state == "failed") | .name'
    """
    from spotlight.report.record import read_run
    from spotlight.store.metrics import JUDGED
    from spotlight.store.run_store import local_folder

    with errors_without_traceback():
        directory = local_folder(directory, complain)
    console = TextConsole()
    there = directory.glob("*/config.yaml") if is_there(directory) else ()
    found = sorted(path.parent for path in there)
    if as_json:
        typer.echo(json.dumps([_fields(path) for path in found], indent=1))
        return
    if not found:
        console.print(f"No runs in {directory}/.{hidden(directory)} Start one: spotlight train")
        return
    table = Table(box=None, pad_edge=False)
    for name in ("name", "iteration", *JUDGED, "time", "cost", "state"):
        table.add_column(name, justify="left" if name in {"name", "state"} else "right", overflow="fold")
    if console.width >= _WIDE:
        table.add_column("estimated", justify="right")
        table.add_column("algorithm")
    for path in found:
        try:
            run = read_run(path)
            wide = [_estimated(run), run.config.algorithm.name] if console.width >= _WIDE else []
            table.add_row(*_row(run), *wide)
        except UserError as error:
            table.add_row(path.name, "", "", "", "", "", Text("unreadable", style="red"))
            console.print(str(error), soft_wrap=True)
    console.print(table)


def _fields(path: Path) -> dict[str, object]:
    """What the table shows of a run; of one that cannot be read, why."""
    from spotlight.report.record import read_run
    from spotlight.store.ledger.course_changes import course_words

    try:
        run = read_run(path)
    except UserError as error:
        return {"name": path.name, "state": "unreadable", "error": str(error)}
    last = run.validations[-1] if run.validations else None
    return {
        "name": path.name,
        "state": run.history.state,
        "iteration": run.history.iterations,
        "iterations": run.config.iterations,
        "algorithm": run.config.algorithm.name,
        "validation": {
            name: value.mean if math.isfinite(value.mean) else None
            for name, value in (last.scores.items() if last else ())
        },
        "validation_iteration": last.iteration if last else None,
        "wall_s": run.wall_s,
        "cost_usd": run.history.cost_usd,
        "estimate": asdict(run.estimate) if run.estimate else None,
        "corrected": asdict(run.corrected) if run.corrected else None,
        "forked_from": run.history.forked_from or None,
        "changes": course_words(run.history.course),
    }


def _estimated(run: RunRecord) -> str:
    """What was said of the whole run, and what its own rows say while it is not finished."""
    from spotlight.report.wording import duration, money

    finished = run.history.state == "finished"
    both = (run.estimate, None if finished else run.corrected)
    said = [f"{duration(one.work_s.likely)} {money(one.usd.likely)}" for one in both if one]
    return ", now ".join(said) if run.estimate else "".join(f"now {each}" for each in said)


def _row(run: RunRecord) -> list[str | Text]:
    from spotlight.report.wording import duration, money, score
    from spotlight.store.metrics import JUDGED

    last = run.validations[-1].scores if run.validations else {}
    shown = [last.get(name) for name in JUDGED]
    state = run.history.state
    forked = f" (from {run.history.forked_from})" if run.history.forked_from else ""
    return [
        Text(run.paths.path.name + forked),
        f"{run.history.iterations}/{run.config.iterations}",
        *(score(value.mean, value.stderr) if value else "-" for value in shown),
        duration(run.wall_s),
        money(run.history.cost_usd),
        Text(state, style=_STYLES.get(state, "")),
    ]
