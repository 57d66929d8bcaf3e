"""``spotlight report``: a run's dashboard as one file."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from spotlight.cli.exit_codes import errors_without_traceback
from spotlight.cli.run_argument import RunArgument, find_run


def report(
    run: RunArgument,
    html: Annotated[
        Path, typer.Option("--html", metavar="FILE", help="The page to write.", show_default=False)
    ],
) -> None:
    """Write a run's dashboard as one HTML file, pictures included, which needs no network and no server.

    Anybody who gets the file sees the run's prompts, pictures, configuration and logs. Needs
    pip install 'spotlight-rl\\[dashboard]'.

    [bold]Examples[/bold]

      spotlight report demo --html demo.html
    """
    directory = find_run(run)
    with errors_without_traceback():
        from spotlight.dashboard.run_folders import RunFolder
        from spotlight.dashboard.single_page import write_page
        from spotlight.report.wording import size

        write_page(RunFolder(directory.resolve().name, directory.resolve()), html)
        typer.echo(f"{html} ({size(html.stat().st_size)})")
