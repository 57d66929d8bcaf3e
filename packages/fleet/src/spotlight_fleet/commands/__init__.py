"""The command about this node: notices."""

from __future__ import annotations

import typer

from spotlight_fleet.commands.notices_command import notices


def add_to(app: typer.Typer) -> None:
    """Add it to the commands of ``spotlight``."""
    app.command("notices", rich_help_panel="Look up")(notices)
