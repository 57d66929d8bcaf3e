"""``spotlight why``: what is wrong with a run, or looks so, and what to do."""

from __future__ import annotations

from typing import Annotated

import typer
from rich.text import Text

from spotlight.cli.run_argument import RunArgument, find_run
from spotlight_rewards.base.terminal import TextConsole
from spotlight_rewards.commands.exit_codes import errors_without_traceback


def why(
    run: RunArgument,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, an object for each finding.")] = False,
) -> None:
    """Say why a run does not learn, costs more than it need, or stands still: findings, each with a remedy.

    They are those of the dashboard and its alerts. Exits with 1 if one is serious.

    [bold]Examples[/bold]

      spotlight why demo

      spotlight why demo --json | jq '.[].name'
    """
    directory = find_run(run, "light")
    with errors_without_traceback():
        import json
        from dataclasses import asdict

        from spotlight_dashboard.run_folders import RunFolder
        from spotlight_dashboard.views.findings import RunLimits
        from spotlight_dashboard.views.overview import history_and_findings

        folder = RunFolder.of(directory)
        with folder.values():
            _, found = history_and_findings(folder, RunLimits())
    if as_json:
        typer.echo(json.dumps([asdict(each) for each in found], indent=1))
    else:
        console = TextConsole()
        for each in found:
            style = "bold red" if each.serious else "bold"
            console.print(Text(each.finding, style=style), soft_wrap=True)
            console.print(f"  {each.remedy}", soft_wrap=True)
        if not found:
            console.print(f"Nothing looks wrong with {folder.name}.")
    if any(each.serious for each in found):
        raise typer.Exit(1)
