"""The commands `spotlight compare`, `spotlight dashboard` and `spotlight report`."""

from __future__ import annotations

import typer

from spotlight_dashboard.commands.compare_command import compare
from spotlight_dashboard.commands.dashboard_command import dashboard
from spotlight_dashboard.commands.report_command import report


def add_to(app: typer.Typer) -> None:
    """Add the commands to those of ``spotlight``."""
    app.command("dashboard", rich_help_panel="Run")(dashboard)
    app.command("compare", rich_help_panel="Use", no_args_is_help=True)(compare)
    app.command("report", rich_help_panel="Use", no_args_is_help=True)(report)
