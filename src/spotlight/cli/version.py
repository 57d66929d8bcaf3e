"""``spotlight version``."""

from __future__ import annotations

import typer

import spotlight


def version() -> None:
    """Print the version of Spotlight.

    [bold]Example[/bold]: spotlight version
    """
    typer.echo(spotlight.__version__)
