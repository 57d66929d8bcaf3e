"""The options of ``spotlight train``."""

from __future__ import annotations

from typing import Annotated, TypeAlias

import typer

ConfigArgument: TypeAlias = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="CONFIG.yaml|RUN|KEY=VALUE",
        help="A configuration file (without it: the embedded default), or a run to go on with; and overrides "
        "in YAML syntax.",
    ),
]
DryRunOption: TypeAlias = Annotated[
    bool, typer.Option("--dry-run", help="Print what the run would do and need; do nothing.")
]
SmokeOption: TypeAlias = Annotated[
    bool,
    typer.Option(
        "--smoke",
        help="Two iterations in this process with a small random pipeline of the family, not the model.",
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
        help="Likewise, so that the run costs no more: short for fleet.driver=ray "
        "fleet.target.budget_usd=USD.",
    ),
]
FitOption: TypeAlias = Annotated[
    str | None,
    typer.Option(
        "--fit",
        metavar="GB|auto",
        help="Change what it takes for a GPU of GB (auto: this machine's), by the memory plan, and say what.",
    ),
]
VoteOption: TypeAlias = Annotated[
    bool,
    typer.Option(
        "--vote",
        help="People judge: they pick the best of four pictures on the dashboard, as with --dashboard; the "
        "configuration's rewards stay as curves.",
    ),
]
RanksOption: TypeAlias = Annotated[
    int | None,
    typer.Option(
        "--ranks",
        metavar="N",
        min=1,
        help="Train with N processes of this machine, one per GPU; they are started, and end, together.",
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
        help="Another run, --name, from a checkpoint of this one, with its optimizer and reference.",
    ),
]
IterationOption: TypeAlias = Annotated[
    int | None,
    typer.Option(
        "--iteration",
        metavar="N",
        min=1,
        help="Of --fork: the checkpoint after so many iterations; default: the newest.",
    ),
]
NameOption: TypeAlias = Annotated[str | None, typer.Option("--name", help="Of --fork: the new run's name.")]
KeepDashboardOption: TypeAlias = Annotated[
    bool, typer.Option("--keep-dashboard", help="As --dashboard, but it stays when the run has ended.")
]
