"""Figures of runs in Prometheus' text format (version 0.0.4), read from their directories as the page is.

What a resume can undo (iterations, rollouts, phases of seconds) is a gauge; a counter only rises.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from sqlite3 import Connection

from spotlight.store.ledger import ledger_queries as queries
from spotlight.store.ledger.history import read_attempts, state_of
from spotlight.store.ledger.ledger_schema import Ending
from spotlight_dashboard.run_folders import RunFolder
from spotlight_dashboard.views.curves import newest_values, recent_rows
from spotlight_dashboard.views.findings import iteration_s
from spotlight_dashboard.views.overview import ITERATIONS, RECENT, UNREADABLE, nodes_now

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_STATES = ("new", "running", *(ending.value for ending in Ending))
_FAMILIES = {
    "spotlight_run_readable": ("gauge", "1 if the run's ledger and configuration can be read."),
    "spotlight_run_state": ("gauge", "1 for the state that the run is in, 0 for the others."),
    "spotlight_iterations": ("gauge", "Iterations trained."),
    "spotlight_iterations_planned": ("gauge", "Iterations configured."),
    "spotlight_iteration_seconds": ("gauge", "Mean seconds of the newest iterations, evaluations included."),
    "spotlight_policy_version": ("gauge", "The newest published policy version."),
    "spotlight_rollouts_issued": ("gauge", "Rollouts issued."),
    "spotlight_rollouts_in_flight": ("gauge", "Rollouts issued that have no outcome yet."),
    "spotlight_rollouts_ended": ("gauge", "Rollouts by outcome; reason: why one was dropped."),
    "spotlight_leases_granted": ("gauge", "Leases granted to workers."),
    "spotlight_commits_refused": ("gauge", "Commits of samples refused: late, or twice."),
    "spotlight_workers": ("gauge", "Workers billed now."),
    "spotlight_nodes": ("gauge", "Nodes with workers now."),
    "spotlight_nodes_noticed": ("gauge", "Nodes with workers now that have a preemption notice."),
    "spotlight_worker_seconds": ("gauge", "Worker-seconds billed by phase, idle and lost among them."),
    "spotlight_filled_seconds": ("gauge", "Otherwise idle worker-seconds by what filled them."),
    "spotlight_cost_usd_total": ("counter", "Dollars spent."),
    "spotlight_attempts_total": ("counter", "Processes that have worked on the run."),
    "spotlight_incidents_total": ("counter", "What hit the run's nodes and workers."),
    "spotlight_last_account_timestamp_seconds": ("gauge", "When the run last accounted for its workers."),
    "spotlight_metric": ("gauge", "The newest value of a metric of metrics.jsonl."),
}
"""By name: type and help."""


@dataclass(frozen=True, slots=True)
class RunFigure:
    """One sample of a family of :data:`_FAMILIES`; labels besides ``run``."""

    family: str
    value: float
    labels: tuple[tuple[str, str], ...] = ()


SILENT_FIGURES = (RunFigure("spotlight_run_readable", 0),)
"""Of a run that cannot be read, or does not answer."""


def run_figures(run: RunFolder) -> tuple[RunFigure, ...]:
    """A run's figures; of one that cannot be read, that it cannot."""
    try:
        return (RunFigure("spotlight_run_readable", 1), *_ledger_figures(run), *_metrics(run))
    except UNREADABLE:
        return SILENT_FIGURES


def _metrics(run: RunFolder) -> Iterator[RunFigure]:
    each_s = iteration_s(recent_rows(run, RECENT + 1))
    if each_s is not None:
        yield RunFigure("spotlight_iteration_seconds", each_s)
    for name, value in newest_values(run).items():
        yield RunFigure("spotlight_metric", value, (("name", name),))


def exposition(figures: Mapping[str, Iterable[RunFigure]]) -> str:
    """The figures of runs, by name, as Prometheus reads them."""
    lines: dict[str, list[str]] = {family: [] for family in _FAMILIES}
    for run, found in figures.items():
        for figure in found:
            labels = ",".join(f'{name}="{_escaped(text)}"' for name, text in (("run", run), *figure.labels))
            lines[figure.family].append(f"{figure.family}{{{labels}}} {_number(figure.value)}")
    parts: list[str] = []
    for family, samples in lines.items():
        kind, explanation = _FAMILIES[family]
        if samples:
            parts += [f"# HELP {family} {explanation}", f"# TYPE {family} {kind}", *samples]
    return "".join(f"{part}\n" for part in parts)


def _ledger_figures(run: RunFolder) -> Iterator[RunFigure]:
    planned = run.settings().whole("iterations")
    if planned is not None:
        yield RunFigure("spotlight_iterations_planned", planned)
    if run.readable(run.paths.ledger) is None:
        yield from _states("new")
        return
    with run.reading_ledger() as connection:
        attempts = read_attempts(connection)
        state = state_of(attempts)
        yield from _states(state)
        yield RunFigure("spotlight_attempts_total", len(attempts))
        if attempts:
            yield RunFigure("spotlight_last_account_timestamp_seconds", attempts[-1].seen_at)
        yield from _work(connection)
        yield from _rollouts(connection)
        yield from _cluster(connection, is_running=state == "running")


def _states(state: str) -> Iterator[RunFigure]:
    for each in _STATES:
        yield RunFigure("spotlight_run_state", each == state, (("state", each),))


def _work(connection: Connection) -> Iterator[RunFigure]:
    (iterations,) = connection.execute(ITERATIONS).fetchone()
    yield RunFigure("spotlight_iterations", iterations)
    (version,) = connection.execute("SELECT MAX(version) FROM versions").fetchone()
    if version is not None:
        yield RunFigure("spotlight_policy_version", version)
    yield RunFigure("spotlight_cost_usd_total", queries.cost_usd(connection))
    for phase, seconds in queries.gpu_seconds_by_phase(connection).items():
        yield RunFigure("spotlight_worker_seconds", seconds, (("phase", phase.value),))
    for filler, seconds in queries.filled_s(connection).items():
        yield RunFigure("spotlight_filled_seconds", seconds, (("filler", filler.value),))


def _rollouts(connection: Connection) -> Iterator[RunFigure]:
    in_flight = dict(connection.execute("SELECT purpose, COUNT(*) FROM rollouts GROUP BY purpose"))
    for purpose, number in in_flight.items():
        yield RunFigure("spotlight_rollouts_issued", number, (("purpose", purpose),))
    for purpose, kind, reason, number in connection.execute(
        "SELECT purpose, kind, COALESCE(reason, ''), COUNT(*) FROM outcomes GROUP BY purpose, kind, reason"
    ):
        labels = (("purpose", purpose), ("outcome", kind), ("reason", reason))
        yield RunFigure("spotlight_rollouts_ended", number, labels)
        in_flight[purpose] -= number
    for purpose, number in in_flight.items():
        yield RunFigure("spotlight_rollouts_in_flight", number, (("purpose", purpose),))
    (refused,) = connection.execute("SELECT COUNT(*) FROM rejected").fetchone()
    yield RunFigure("spotlight_commits_refused", refused)
    if queries.has_table(connection, "leases"):
        newest = "SELECT MAX(lease) FROM leases WHERE attempt = (SELECT MAX(attempt) FROM leases)"
        (granted,) = connection.execute(newest).fetchone()  # a resume goes on counting from its checkpoint
        yield RunFigure("spotlight_leases_granted", granted or 0)


def _cluster(connection: Connection, *, is_running: bool) -> Iterator[RunFigure]:
    nodes = nodes_now(connection)
    now = (nodes.reserved, nodes.spot, nodes.noticed, nodes.workers) if is_running else (0, 0, 0, 0)
    yield RunFigure("spotlight_nodes", now[0], (("kind", "reserved"),))
    yield RunFigure("spotlight_nodes", now[1], (("kind", "spot"),))
    yield RunFigure("spotlight_nodes_noticed", now[2])
    yield RunFigure("spotlight_workers", now[3])
    for (kind, spot), number in queries.incidents(connection).items():
        labels = (("kind", kind.value), ("node", "spot" if spot else "reserved"))
        yield RunFigure("spotlight_incidents_total", number, labels)


def _escaped(text: str) -> str:
    encodable = text.encode("utf-8", "backslashreplace").decode()
    return encodable.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")


def _number(value: float) -> str:
    if math.isfinite(value):
        return repr(float(value))
    return "NaN" if math.isnan(value) else ("+Inf" if value > 0 else "-Inf")
