"""What a run has reached, what is left of it, and whether its ledger is sound."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from sqlite3 import Connection, Error

from spotlight.scheduler.types import Purpose
from spotlight.store.ledger import ledger_queries as queries
from spotlight.store.ledger.course_changes import changes_by_iteration, read_course
from spotlight.store.ledger.history import History, read_attempts, read_history, state_of
from spotlight.store.ledger.ledger_audit import AuditLimits, audit
from spotlight.store.ledger.ledger_schema import Incident
from spotlight.store.metrics import JUDGED, STDERR
from spotlight.store.run_directory import flatten
from spotlight.store.run_estimate import read_estimate
from spotlight.store.store_errors import ODD_VALUES
from spotlight_dashboard.figures import Json, finite
from spotlight_dashboard.metric_names import LOSS
from spotlight_dashboard.run_folders import READ_S, RunFolder, Settings
from spotlight_dashboard.views.curves import damaged_lines, recent_rows, spent_usd, validation_rows
from spotlight_dashboard.views.findings import RunFinding, RunLimits, RunOutlook, findings, iteration_s
from spotlight_dashboard.views.lanes import node_of
from spotlight_dashboard.views.money import forecast, target
from spotlight_dashboard.views.trends import Validated
from spotlight_dashboard.views.vote_rounds import vote_curve
from spotlight_rewards.base.file_errors import StoreError

AUTOMATIC_BYTES_MAX = 256 << 20
"""Ledger and newest checkpoint together: a larger run is audited only when asked."""
AUDIT_S = 600.0
RECENT = 20
_REMEMBERED = 60
SILENT = "does not answer"
"""The state of a run that cannot be read in time."""
UNREADABLE = (StoreError, Error, OSError, *ODD_VALUES)
"""What reading a directory that is damaged, or no run's, may raise."""


@dataclass(frozen=True, slots=True)
class NodesNow:
    """Nodes with workers, and the workers; ``noticed`` are those that have a preemption notice."""

    reserved: int
    spot: int
    noticed: int
    workers: int


def overview(run: RunFolder) -> Json:
    """Progress, time and dollars, validations and the newest metrics: what the page shows first.

    Bounded by the number of bills, not of samples. Without a ledger the run is ``new``.

    Raises:
        LedgerError: the ledger cannot be read.
    """
    settings = run.settings()
    planned = settings.whole("iterations")
    begun: Json = {"name": run.name, "planned": planned, "about": about(settings)}
    if run.readable(run.paths.ledger) is None:
        return {**begun, "state": "new", "iterations": 0, "validations": [], "changes": [], "row": {}}
    with run.reading_ledger() as connection:
        (iterations,) = connection.execute(ITERATIONS).fetchone()
        attempts = read_attempts(connection)
        worked_s = queries.worked_s(connection)
        usd = queries.cost_usd(connection)
        ahead = forecast(*spent_usd(connection), planned)
        preemptions, noticed = queries.preemptions(connection)
        nodes = nodes_now(connection)
        seconds = queries.gpu_seconds_by_phase(connection)
        changed = changes_by_iteration(read_course(connection))
        rows = recent_rows(run, RECENT + 1)
        goal = target(settings, connection, rows[-1] if rows else {})
    state = state_of(attempts)
    return {
        **begun,
        "state": state,
        "iterations": iterations,
        "worked_s": worked_s,
        "usd": usd,
        "left": {
            "iterations": ahead["iterations_left"],
            "usd": ahead["usd_left"],
            "seconds": _left_s(rows, planned, iterations),
        },
        "estimate": said_before(run),
        "target": goal,
        "seen_at": attempts[-1].seen_at if attempts else None,
        "attempts": len(attempts),
        "preemptions": preemptions,
        "noticed": noticed,
        "nodes": {"reserved": nodes.reserved, "spot": nodes.spot, "noticed": nodes.noticed}
        if state == "running"
        else None,
        "phases": {phase.value: spent for phase, spent in seconds.items() if spent},
        "validations": validation_rows(run),
        "changes": [{"iteration": iteration, "words": words} for iteration, words in changed.items()],
        "row": rows[-1] if rows else {},
    }


def said_before(run: RunFolder) -> Json | None:
    """What the whole run was estimated to take; None: nothing was said."""
    path = run.readable(run.paths.estimate)
    said = None if path is None else read_estimate(path)
    return None if said is None else asdict(said)


def headline(run: RunFolder) -> Json:
    """Name, state and iterations, for the list of runs; ``unreadable`` whatever is wrong with it."""
    begun = silent_headline(run.name)
    try:
        begun["asks_people"] = vote_curve(run) is not None
        begun["planned"] = run.settings().whole("iterations")
        if run.readable(run.paths.ledger) is None:
            return {**begun, "state": "new"}
        with run.reading_ledger() as connection:
            (iterations,) = connection.execute(ITERATIONS).fetchone()
            return {**begun, "state": state_of(read_attempts(connection)), "iterations": iterations}
    except UNREADABLE as error:
        return {**begun, "state": SILENT if queries.ran_out_of_time(error) else "unreadable"}


def silent_headline(name: str) -> Json:
    """The :func:`headline` of a run whose files are waited for in vain."""
    return {"name": name, "iterations": 0, "planned": None, "state": SILENT}


def accounting(run: RunFolder, limits: RunLimits) -> Json:
    """Samples by fate, and findings with remedies. Reads the whole ledger.

    Raises:
        LedgerError: there is no ledger, or it cannot be read.
    """
    history, found = history_and_findings(run, limits)
    counts = history.counts
    return {
        "state": history.state,
        "issued": counts.issued[Purpose.TRAIN],
        "trained": counts.trained,
        "dropped": {reason.value: number for reason, number in counts.train_dropped.items()},
        "in_flight": counts.in_flight[Purpose.TRAIN],
        "evaluated": counts.evaluated,
        "explored": counts.explored,
        "rejected": counts.rejected,
        "undone": history.undone,
        "filled_s": {filler.words: spent for filler, spent in history.filled_s.items()},
        "incidents": {
            f"{kind.value} ({'spot' if spot else 'reserved'})": number
            for (kind, spot), number in history.incidents.items()
        },
        "findings": [asdict(each) for each in found],
    }


def history_and_findings(run: RunFolder, limits: RunLimits) -> tuple[History, list[RunFinding]]:
    """What :func:`accounting` tells. Raises as it does."""
    run.ledger()
    history = read_history(run.path, READ_S)
    seconds = history.gpu_seconds_by_phase
    with run.reading_ledger() as connection:
        gone_at = spot_gone_at(connection) if history.state == "running" else None
        ahead = outlook(run, connection) if limits.look_ahead else RunOutlook()
    rows = [row for row in recent_rows(run, _REMEMBERED) if LOSS in row]
    return history, findings(
        history, seconds, rows, time.time(), gone_at, ahead, limits, _validated(run), damaged_lines(run)
    )


def _validated(run: RunFolder) -> list[Validated]:
    """The evaluations, by the score that the run is judged by."""
    rows = validation_rows(run)
    for name in JUDGED:
        found = [
            Validated(iteration, score, error if isinstance(error, float) else math.nan)
            for row in rows
            if isinstance(score := row[name], float) and isinstance(iteration := row["iteration"], int)
            for error in (row[f"{name}{STDERR}"],)
        ]
        if found:
            return found
    return []


def verdict(run: RunFolder) -> Json:
    """The audit of what the ledger holds now.

    Raises:
        LedgerError: there is no ledger, or it cannot be read in full.
    """
    run.ledger()
    report = audit(run.path, AuditLimits.configured(flatten(run.settings().tree)), AUDIT_S)
    return {
        "ok": report.ok,
        "finished": report.finished,
        "position": report.position,
        "checks": len(report.checks),
        "violations": [
            {"check": each.check, "broken": each.broken, "ids": list(each.ids[:20]), "count": len(each.ids)}
            for each in report.violations
        ],
        "digest": report.digest,
        "at": time.time(),
    }


def is_small(run: RunFolder) -> bool:
    """Whether an audit is quick enough to be made unasked."""
    newest = max(run.paths.checkpoints.glob("[0-9]*"), default=None)
    files = [run.paths.ledger, *(newest.rglob("*") if newest is not None else ())]
    return sum(_bytes(path) for path in files) <= AUTOMATIC_BYTES_MAX


def about(settings: Settings) -> list[list[str]]:
    """The configuration in a few words: (key, value)."""
    shown = ((key, settings.text(key) or settings.number(key)) for key in _ABOUT)
    return [
        [key, f"{value:g}" if isinstance(value, float) else value]
        for key, value in shown
        if value is not None
    ]


def _left_s(rows: Sequence[Mapping[str, float | None]], planned: int | None, iterations: int) -> float | None:
    """Seconds for the iterations left, at the mean pace of ``rows``, evaluations included."""
    each_s = iteration_s(rows)
    return None if planned is None or each_s is None else each_s * max(0, planned - iterations)


def nodes_now(connection: Connection) -> NodesNow:
    """Nodes of the newest attempt that have workers."""
    workers = [worker for (worker,) in connection.execute(_WORKERS_NOW)]
    nodes = set(map(node_of, workers))
    # Runs without Ray have workers, and no incidents of nodes.
    rows = [(queries.machine_of(part), spot, kind) for part, spot, kind in connection.execute(_NODES)]
    by_node = {node: (spot, kind) for node, spot, kind in rows if node in nodes}
    spot = sum(spot for spot, _ in by_node.values())
    noticed = sum(kind == Incident.NODE_NOTICED for _, kind in by_node.values())
    return NodesNow(len(nodes) - spot, spot, noticed, len(workers))


def spot_gone_at(connection: Connection) -> float | None:
    """When the newest attempt lost its last spot node, or began to wait for one to put its learner on.

    None if it has one, or needs none.
    """
    if nodes_now(connection).spot:
        return None
    found: float | None = connection.execute(_SPOT_LOST).fetchone()[0]
    return found


def outlook(run: RunFolder, connection: Connection) -> RunOutlook:
    """What the run will have taken at its end, as far as that is known."""
    settings = run.settings()
    planned = settings.whole("iterations")
    (iterations,) = connection.execute(ITERATIONS).fetchone()
    usd_left = forecast(*spent_usd(connection), planned)["usd_left"]
    left_s = _left_s(recent_rows(run, RECENT + 1), planned, iterations)
    return RunOutlook(
        queries.cost_usd(connection) + (finite(usd_left) or 0.0),
        (queries.worked_s(connection) + (left_s or 0.0)) / 3600,
    )


def _bytes(path: Path) -> int:
    try:
        return path.stat().st_size if path.is_file() else 0
    except OSError:
        return 0


_ABOUT = (
    "model.family",
    "model.path",
    "learner.mode",
    "algorithm.name",
    "rollout.sampler",
    "rollout.steps",
    "rollout.height",
    "rollout.width",
    "rollout.frames",
    "rollout.prompts_per_iteration",
    "rollout.group_size",
    "pipeline.axis",
    "fleet.driver",
    "fleet.spot.trace",
    "run_seed",
)
ITERATIONS = "SELECT COALESCE(MAX(iteration) + 1, 0) FROM optimizer_steps"
_WORKERS_NOW = """
SELECT worker FROM attempt_workers
WHERE attempt = (SELECT MAX(number) FROM attempts) AND left_at IS NULL
"""
_SPOT_LOST = """
SELECT MAX(at) FROM incidents
WHERE attempt = (SELECT MAX(number) FROM attempts) AND kind IN ('node_lost', 'learner_waits') AND spot
"""
_NODES = """
SELECT subject, spot, kind FROM incidents WHERE id IN (
    SELECT MAX(id) FROM incidents
    WHERE attempt = (SELECT MAX(number) FROM attempts)
        AND kind IN ('node_joined', 'node_noticed', 'notice_cancelled', 'node_lost')
    GROUP BY subject)
ORDER BY id
"""
