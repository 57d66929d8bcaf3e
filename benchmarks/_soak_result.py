"""What a soak did to its run, and what the run's ledger says of it: figures, broken promises, tables."""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import time
from contextlib import closing
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from rich.table import Table

from benchmarks._measure import machine, wide_console
from benchmarks._process_faults import tally
from spotlight.store.ledger import ledger_queries as queries
from spotlight.store.ledger.history import read_history
from spotlight.store.metrics import read_metrics
from spotlight.store.run_directory import RunPaths
from spotlight_rewards.base.file_errors import StoreError

if TYPE_CHECKING:
    from benchmarks.soak import Soak

BILLING_TOLERANCE = 0.01


def collect(soak: Soak) -> dict[str, Any]:
    """All results; adds what the ledger shows against the run to the violations."""
    took_s = time.monotonic() - soak.began_s
    ledger = _ledger(soak)
    if soak.injector.kills < soak.kills:
        soak.violations.append(f"{soak.injector.kills} were killed; expected {soak.kills}")
    progress = soak.progress
    return {
        "benchmark": "soak",
        "utc": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": machine(torch.device("cpu")),
        "command": soak.command,
        "seed": soak.seed,
        "directory": str(soak.run_directory),
        "took_s": round(took_s, 1),
        "killed": soak.injector.kills,
        "done": {
            name: {"killed": own, "killed by the trace": trace, "stopped": stopped}
            for name, own, trace, stopped in tally(soak.injector.faults)
        },
        "heads": len(soak.heads),
        "steps": {
            "made": progress.made,
            "undone": progress.undone,
            "longest_without_s": round(progress.longest_s, 1),
            "recovered_after_s": {kind.value: waited for kind, waited in progress.waited_s.items()},
        },
        "cleared_s": soak.cleared_s,
        "stopping_s": round(soak.stopping_s, 1),
        "ledger": ledger,
        "violations": soak.violations,
        "faults": [asdict(fault) for fault in soak.injector.faults],
    }


def _ledger(soak: Soak) -> dict[str, Any]:
    """The audit's verdict, and what the ledger says befell the run."""
    audited = subprocess.run(
        [sys.executable, "-m", "spotlight.cli", "audit", str(soak.run_directory), "--json"],
        capture_output=True,
        check=False,
        encoding="utf-8",
    )
    try:
        report = json.loads(audited.stdout)
        history = read_history(soak.run_directory)
        recoveries = _recoveries(soak.run_directory)
    except (ValueError, StoreError) as error:
        soak.violations.append(f"the ledger cannot be read: {error}; {audited.stderr.strip()}")
        return {"audit": audited.returncode}
    soak.violations += [f"audit: {item['check']}: {item['broken']}" for item in report["violations"]]
    if audited.returncode != 0 and not report["violations"]:
        soak.violations.append(f"spotlight audit ended with status {audited.returncode}")
    billed_s = sum(bill["billed_s"] for bill in report["attempts"])
    phases_s = sum(report["gpu_seconds_by_phase"].values())
    if abs(billed_s - phases_s) > BILLING_TOLERANCE * billed_s:
        soak.violations.append(f"billed {billed_s:.1f} GPU-seconds, {phases_s:.1f} in phases")
    counts = report["counts"]
    return {
        "audit": audited.returncode,
        "checks": len(report["checks"]),
        "attempts": [attempt.ended.value if attempt.ended else None for attempt in history.attempts],
        "records_undone": history.undone,
        "iterations": history.iterations,
        "optimizer_steps": counts["optimizer_steps"],
        "issued": counts["issued"],
        "trained": counts["trained"],
        "dropped": counts["dropped"],
        "in_flight": counts["in_flight"],
        "refused": _refused(soak.run_directory),
        "preemptions": {"noticed": history.noticed, "unnoticed": history.preemptions - history.noticed},
        "incidents": {
            f"{kind.value}{' (spot)' if spot else ''}": number
            for (kind, spot), number in sorted(history.incidents.items())
        },
        "recoveries": recoveries,
        "gpu_seconds": {"billed": billed_s, "by_phase": report["gpu_seconds_by_phase"]},
        "cost_usd": history.cost_usd,
    }


def _refused(run: Path) -> dict[str, int]:
    with closing(queries.open_readonly(RunPaths(run).ledger)) as connection:
        return dict(connection.execute("SELECT reason, COUNT(*) FROM rejected GROUP BY reason"))


def _recoveries(run: Path) -> dict[str, int]:
    """How often each branch of recovery was taken, by the rows that count; a new head starts at 0."""
    taken: dict[str, float] = {}
    before: dict[str, float] = {}
    for row in read_metrics(run):
        now = {name: value for name, value in row.values.items() if name.startswith("recovery/")}
        again = any(now.get(name, 0.0) < value for name, value in before.items())
        for name, value in now.items():
            taken[name] = taken.get(name, 0.0) + value - (0.0 if again else before.get(name, 0.0))
        before = now
    return {name.removeprefix("recovery/"): int(value) for name, value in sorted(taken.items()) if value}


def show(result: dict[str, Any]) -> None:
    """Print tables."""
    console = wide_console()
    faults = Table(
        title=f"{result['killed']} kills in {result['took_s'] / 60:.1f} minutes, seed {result['seed']}"
    )
    for column in ("", "killed", "killed by the trace", "stopped"):
        faults.add_column(column, justify="right" if column else "left")
    for name, counts in result["done"].items():
        faults.add_row(name, *(str(number) for number in counts.values()))
    console.print(faults)
    steps, ledger = result["steps"], result["ledger"]
    facts = Table(show_header=False, title="What came of it")
    facts.add_row("heads", str(result["heads"]))
    facts.add_row("optimizer steps", f"{steps['made']}, and {steps['undone']} of them undone")
    facts.add_row("longest time without", f"{steps['longest_without_s']:.1f} s")
    for name, waited in steps["recovered_after_s"].items():
        spread = f"{statistics.median(waited):.1f} s ({min(waited):.1f} to {max(waited):.1f} s)"
        facts.add_row(f"next step after {name}", f"{spread}, {len(waited)} times")
    for name, value in ledger.items():
        facts.add_row(name.replace("_", " "), _text(value))
    console.print(facts)
    for violation in result["violations"]:
        console.print(f"VIOLATED {violation}", style="red", markup=False)
    if not result["violations"]:
        console.print("no promise was broken", style="green")


def _text(value: object) -> str:
    match value:
        case dict():
            return ", ".join(f"{key} {_text(item)}" for key, item in value.items()) or "none"
        case list():
            return ", ".join(_text(item) for item in value)
        case float():
            return f"{value:.4g}" if abs(value) < 1 else f"{value:.1f}"
    return str(value)
