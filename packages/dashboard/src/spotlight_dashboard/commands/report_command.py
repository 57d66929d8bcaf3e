"""``spotlight report``: a run's dashboard as one file."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from spotlight.cli.run_argument import RunArgument, find_run
from spotlight_rewards.base.terminal import printable
from spotlight_rewards.commands.exit_codes import errors_without_traceback


def report(
    run: RunArgument,
    html: Annotated[Path, typer.Option("--html", metavar="FILE", help="The page to write.")],
) -> None:
    """Write a run's dashboard as one HTML file, pictures included, which needs no network and no server.

    Anybody who gets the file sees the run's prompts, pictures, configuration and logs. Needs
    pip install 'spotlight-rl\\[dashboard]'.

    [bold]Examples[/bold]

      spotlight report demo --html demo.html
    """
    directory = find_run(run, "pictures")
    with errors_without_traceback():
        from spotlight.report.wording import size
        from spotlight_dashboard.run_folders import RunFolder
        from spotlight_dashboard.single_page import write_page

        write_page(RunFolder.of(directory), html)
        typer.echo(f"{printable(html)} ({size(html.stat().st_size)})")
