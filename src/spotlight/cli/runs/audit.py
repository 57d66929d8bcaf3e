"""``spotlight audit``: recount a run's ledger offline."""

from __future__ import annotations

import dataclasses
import json
from typing import TYPE_CHECKING, Annotated

import typer
from rich.text import Text

from spotlight.cli.run_argument import RunArgument, find_run
from spotlight_rewards.base.terminal import TextConsole
from spotlight_rewards.commands.exit_codes import EXIT_NOT_STARTED, errors_without_traceback

if TYPE_CHECKING:
    from pathlib import Path

    from spotlight.store.ledger.ledger_audit import AuditReport

_IDS_SHOWN = 5


def audit(
    run: RunArgument,
    as_json: Annotated[bool, typer.Option("--json", help="Print the whole report as JSON.")] = False,
) -> None:
    """Recount a run's ledger from its rows: every sample accounted for, every second in a phase.

    Needs neither the model nor a GPU, and can be used while the run goes on.
    Exit status: 0 without violations, 1 with violations, 2 if there is no ledger to audit.

    [bold]Examples[/bold]

      spotlight audit demo

      spotlight audit runs/demo --json | jq .violations
    """
    directory = find_run(run)
    with errors_without_traceback(EXIT_NOT_STARTED):
        report = audit_run(directory)
    if as_json:
        typer.echo(json.dumps(dataclasses.asdict(report), indent=2))
    else:
        _print(report)
    if not report.ok:
        raise typer.Exit(1)


def audit_run(directory: Path) -> AuditReport:
    """Recount with the limits of the run's own configuration. Raises StoreError if there is no ledger."""
    from spotlight.config.load import load_dump
    from spotlight.store.ledger.ledger_audit import AuditLimits
    from spotlight.store.ledger.ledger_audit import audit as recount
    from spotlight.store.run_directory import RunPaths, flatten

    config = load_dump(RunPaths(directory).config, installed=False)
    return recount(directory, AuditLimits.configured(flatten(config.model_dump(mode="json"))))


def _print(report: AuditReport) -> None:
    from spotlight.report.wording import count, money
    from spotlight.scheduler.types import DropReason, Purpose

    console = TextConsole()
    counts = report.counts
    left_out, dropped = (
        ", ".join(
            f"{n} {reason.value}" for reason, n in counts.train_dropped.items() if reason.by_choice is by
        )
        for by in (True, False)
    )
    previews = [f"{count(counts.issued[Purpose.EXPLORE])} issued", f"{count(counts.explored)} explored"]
    if early := counts.dropped.get(DropReason.STOPPED_EARLY):
        previews.append(f"{count(early)} stopped early")
    filled = ", ".join(f"{by.words} {seconds:,.1f}" for by, seconds in report.filled_s.items())
    lines = (
        ("state", "finished" if report.finished else "not finished"),
        ("train samples", f"{count(counts.issued[Purpose.TRAIN])} issued"),
        *([("  kept from previews", count(counts.kept))] if counts.kept else []),
        ("  trained", count(counts.trained)),
        *([("  left out", left_out)] if left_out else []),
        ("  dropped", dropped or "0"),
        ("  in flight", count(counts.in_flight[Purpose.TRAIN])),
        *([("previews", ", ".join(previews))] if counts.issued[Purpose.EXPLORE] else []),
        ("evaluated", f"{count(counts.evaluated)} of {count(counts.issued[Purpose.EVAL])} issued"),
        ("optimizer steps", count(counts.optimizer_steps)),
        ("refused commits", count(counts.rejected)),
        *((f"{reward} by", ", then ".join(scorers)) for reward, scorers in report.scorers.items()),
        *(("course", said) for said in report.course),
        ("attempts", ", ".join(f"{bill.attempt}: {bill.ended or 'open'}" for bill in report.attempts)),
        ("worker seconds", f"{sum(report.gpu_seconds_by_phase.values()):,.1f}, {money(report.cost_usd)}"),
        ("  idle time filled by", filled or "nothing"),
        ("last record", f"{report.position} (checkpoint at {report.checkpoint_position})"),
        ("digest", report.digest),
    )
    width = max(len(name) for name, _ in lines)
    for name, value in lines:
        # Not a table, which would break the digest over two lines if the output is not a terminal.
        console.print(Text.assemble((f"{name:{width}}", "bold"), f" {value}"), soft_wrap=True)
    for violation in report.violations:
        more = len(violation.ids) - _IDS_SHOWN
        ids = ", ".join(violation.ids[:_IDS_SHOWN]) + (f" and {more} more" if more > 0 else "")
        broken = f" {violation.check}: {violation.broken}: {ids}"
        console.print(Text.assemble(("VIOLATED", "bold red"), broken), soft_wrap=True)
    passed = len(report.checks) - len(report.violations)
    console.print(f"{passed} of {len(report.checks)} checks passed", style="green" if report.ok else "red")
