"""The commands `compare`, `dashboard`, `report` and `why`."""

from __future__ import annotations

import typer

from spotlight_dashboard.commands.compare_command import compare
from spotlight_dashboard.commands.dashboard_command import dashboard
from spotlight_dashboard.commands.report_command import report
from spotlight_dashboard.commands.why_command import why


def add_to(app: typer.Typer) -> None:
    """Add the commands to those of ``spotlight``."""
    app.command("dashboard", rich_help_panel="Run")(dashboard)
    app.command("compare", rich_help_panel="Use", no_args_is_help=True)(compare)
    app.command("report", rich_help_panel="Use", no_args_is_help=True)(report)
    app.command("why", rich_help_panel="Use", no_args_is_help=True)(why)
