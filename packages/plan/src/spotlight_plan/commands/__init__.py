"""The commands simulate, plan, calibrate, prices, traces and sweep."""

from __future__ import annotations

import typer

from spotlight_plan.commands.calibrate_command import calibrate
from spotlight_plan.commands.plan_command import plan
from spotlight_plan.commands.prices_command import prices
from spotlight_plan.commands.simulate_command import simulate
from spotlight_plan.commands.sweep.sweep_command import sweep
from spotlight_plan.commands.traces_command import traces


def add_to(app: typer.Typer) -> None:
    """Add the commands to those of ``spotlight``."""
    app.command("sweep", rich_help_panel="Run", no_args_is_help=True)(sweep)
    app.command("simulate", rich_help_panel="Plan")(simulate)
    app.command("plan", rich_help_panel="Plan", no_args_is_help=True)(plan)
    app.command("calibrate", rich_help_panel="Plan", no_args_is_help=True)(calibrate)
    app.command("prices", rich_help_panel="Plan")(prices)
    app.command("traces", rich_help_panel="Plan")(traces)
