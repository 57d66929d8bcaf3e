"""``spotlight calibrate``: a cost profile of what real runs took."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TypeAlias

import typer
from rich.table import Table

from spotlight.cli.run_argument import find_run
from spotlight_rewards.base.terminal import TextConsole
from spotlight_rewards.commands.exit_codes import errors_without_traceback

if TYPE_CHECKING:
    from spotlight_plan.scenarios.profile import Profile

RunsArgument: TypeAlias = Annotated[
    list[str],
    typer.Argument(metavar="RUN...", help="Run directories, or names of some in runs/."),
]
OutOption: TypeAlias = Annotated[
    Path | None, typer.Option("--out", help="Write the profile to this file (default: to stdout).")
]


def calibrate(runs: RunsArgument, out: OutOption = None) -> None:
    """Make a cost profile of what runs took, for simulate and plan.

    Reads each run's ledger, metrics and checkpoints, and changes nothing. Every figure says in which runs it
    was measured; what they do not tell apart is in one figure, which the others name, and what they do not
    tell is assumed, bounded by what they had. The runs are of one model, with a LoRA, on a cluster
    (fleet.driver=ray), were never resumed, and have three iterations or more in checkpoints.

    [bold]Examples[/bold]

      spotlight calibrate demo --out demo-profile.yaml

      spotlight calibrate seed-0 seed-1 --out ours.yaml

      spotlight simulate --as seed-2 --profile ours.yaml

      spotlight simulate mine.yaml workload.profile=ours.yaml
    """
    from spotlight_plan.calibration.measured_profile import measured_yaml
    from spotlight_plan.calibration.run_times import read_run_times
    from spotlight_plan.scenarios.profile import parse_profile
    from spotlight_rewards.base.output_files import require_place, write_file

    directories = [find_run(run) for run in dict.fromkeys(runs)]
    with errors_without_traceback():
        if out is not None:
            require_place(out)
        text = measured_yaml([read_run_times(directory) for directory in directories])
        profile = parse_profile(text, "that was measured")
        if out is None:
            typer.echo(text, nl=False)
            return
        write_file(out, text)
    _print(profile)
    TextConsole().print(f"Wrote {out}", soft_wrap=True)


def _print(profile: Profile) -> None:
    from spotlight_plan.calibration.measured_profile import INCLUDED
    from spotlight_plan.commands.simulate_command import wide_console
    from spotlight_plan.scenarios.profile import figures

    table = Table(box=None, pad_edge=False)
    for title in ("figure", "value", "measured"):
        table.add_column(title, justify="right" if title == "value" else "left", overflow="fold")
    for figure in figures(profile):
        if figure.value > INCLUDED:
            table.add_row(figure.key, f"{figure.value:.4g}", figure.source.removeprefix("measured: "))
    wide_console().print(table)
