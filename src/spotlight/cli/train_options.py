"""The options of ``spotlight train``."""

from __future__ import annotations

from typing import Annotated, TypeAlias

import typer

ConfigArgument: TypeAlias = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="CONFIG.yaml|RUN|KEY=VALUE",
        help="A configuration file (default: the embedded one) or a run to continue; then overrides in YAML "
        "syntax.",
    ),
]
DryRunOption: TypeAlias = Annotated[
    bool, typer.Option("--dry-run", help="Print what the run would do and need, without starting it.")
]
SmokeOption: TypeAlias = Annotated[
    bool,
    typer.Option(
        "--smoke",
        help="Train two iterations on this machine, with a small random pipeline instead of the model.",
    ),
]
AddressOption: TypeAlias = Annotated[
    str | None,
    typer.Option(
        "--address",
        metavar="HOST:PORT",
        help="Join this Ray cluster: short for fleet.driver=ray fleet.address=HOST:PORT.",
    ),
]
DeadlineOption: TypeAlias = Annotated[
    float | None,
    typer.Option(
        "--deadline-h",
        metavar="H",
        help="Add and drop spot nodes so that the run ends H hours after its first attempt began: short for "
        "fleet.driver=ray fleet.target.deadline_h=H.",
    ),
]
BudgetOption: TypeAlias = Annotated[
    float | None,
    typer.Option(
        "--budget-usd",
        metavar="USD",
        help="Add and drop spot nodes so that the run costs at most USD: short for fleet.driver=ray "
        "fleet.target.budget_usd=USD.",
    ),
]
FitOption: TypeAlias = Annotated[
    str | None,
    typer.Option(
        "--fit",
        metavar="GB|auto",
        help="Change settings until the memory plan fits a GPU of GB (auto: this machine's), and print them.",
    ),
]
VoteOption: TypeAlias = Annotated[
    bool,
    typer.Option(
        "--vote",
        help="Let people judge: they pick the best of four pictures on the dashboard, which this serves; the "
        "configuration's rewards are only recorded as curves.",
    ),
]
RanksOption: TypeAlias = Annotated[
    int | None,
    typer.Option(
        "--ranks",
        metavar="N",
        min=1,
        help="Train with N processes on this machine, one per GPU, which start and end together.",
    ),
]
PlainOption: TypeAlias = Annotated[
    bool, typer.Option("--plain", help="One line per event, as when the output is not a terminal.")
]
DashboardOption: TypeAlias = Annotated[
    bool, typer.Option("--dashboard", help="Serve the dashboard on 127.0.0.1 for as long as the run lasts.")
]
ProfileOption: TypeAlias = Annotated[
    int | None,
    typer.Option(
        "--profile",
        metavar="N",
        min=1,
        help="Write torch profiler traces of up to N denoising steps (on a cluster: of one worker) and N "
        "micro-batches of one iteration into the run directory.",
    ),
]
ForkOption: TypeAlias = Annotated[
    str | None,
    typer.Option(
        "--fork",
        metavar="RUN",
        help="Start another run, --name, from a checkpoint of RUN, with its optimizer and reference.",
    ),
]
IterationOption: TypeAlias = Annotated[
    int | None,
    typer.Option(
        "--iteration",
        metavar="N",
        min=1,
        help="With --fork: the checkpoint after this many iterations (default: the newest).",
    ),
]
NameOption: TypeAlias = Annotated[str | None, typer.Option("--name", help="With --fork: the new run's name.")]
KeepDashboardOption: TypeAlias = Annotated[
    bool, typer.Option("--keep-dashboard", help="Like --dashboard, but it stays after the run's end.")
]
