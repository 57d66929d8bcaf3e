"""What a run has cost, by phase and node, beside the same work on demand, and what it will cost: also by the
forecast of a run that holds a deadline or a budget.
"""

from __future__ import annotations

from collections.abc import Mapping
from sqlite3 import Connection

from spotlight.scheduler.types import Phase
from spotlight.store.ledger import ledger_queries as queries
from spotlight_dashboard.figures import Json, finite, thinned
from spotlight_dashboard.metric_names import NODES_ASKED, REACHABLE
from spotlight_dashboard.run_folders import RunFolder, Settings
from spotlight_dashboard.views.curves import spent_usd
from spotlight_dashboard.views.lanes import node_of, spot_nodes

_NODES_MAX = 30
_RECENT = 20
"""Iterations whose mean forecasts the rest."""


def money(run: RunFolder) -> Json:
    """Dollars and worker-seconds by phase and node, the price on demand, and the forecast.

    Raises:
        LedgerError: there is no ledger, or it cannot be read.
    """
    settings = run.settings()
    with run.reading_ledger() as connection:
        phases = connection.execute(
            "SELECT phase, SUM(seconds), SUM(seconds * price_usd_h) / 3600 FROM gpu_seconds GROUP BY phase"
        ).fetchall()
        workers = connection.execute(
            "SELECT worker, SUM(seconds), SUM(seconds * price_usd_h) / 3600 FROM gpu_seconds GROUP BY worker"
        ).fetchall()
        spot = spot_nodes(connection)
        iterations, dollars = spent_usd(connection)
    kept = thinned(dollars, 600)
    seconds = sum(row[1] for row in phases)
    total = sum(row[2] for row in phases)
    reserved_usd_h = settings.number("fleet.price_usd_h")
    lost_s = sum(row[1] for row in phases if row[0] == Phase.LOST)
    return {
        "usd": total,
        "worker_s": seconds,
        "phases": [
            {"phase": phase, "seconds": spent_s, "usd": usd}
            for phase, spent_s, usd in sorted(phases, key=lambda row: -row[2])
        ],
        "nodes": _by_node(workers, spot),
        "spot_usd": sum(usd for worker, _, usd in workers if node_of(worker) in spot),
        "spot_nodes": len(spot),
        "on_demand_usd_h": reserved_usd_h,
        "on_demand_usd": None if reserved_usd_h is None else (seconds - lost_s) * reserved_usd_h / 3600,
        "lost_s": lost_s,
        "curve": {"iteration": [iterations[at] for at in kept], "usd": [dollars[at] for at in kept]},
        "forecast": forecast(iterations, dollars, settings.whole("iterations")),
    }


def forecast(iterations: list[int], dollars: list[float], planned: int | None) -> Json:
    """Dollars that the iterations left will cost at the mean of the last :data:`_RECENT`; None if unknown."""
    done = iterations[-1] + 1 if iterations else 0
    span = min(_RECENT, len(iterations) - 1)
    each = (dollars[-1] - dollars[-1 - span]) / span if span > 0 else None
    left = None if planned is None else max(0, planned - done)
    return {
        "iterations_left": left,
        "usd_per_iteration": finite(each),
        "usd_left": finite(each * left) if each is not None and left is not None else None,
        "over_iterations": span,
    }


def target(settings: Settings, connection: Connection, row: Mapping[str, float | None]) -> Json | None:
    """The goals that spot nodes follow, and what the rest takes by the run's own forecast; None: no goals.

    Args:
        row: the newest metrics.
    """
    deadline_h, budget_usd = (settings.number(f"fleet.target.{key}") for key in ("deadline_h", "budget_usd"))
    if deadline_h is None and budget_usd is None:
        return None
    decision = connection.execute(
        "SELECT at, detail FROM incidents WHERE kind = 'spot_target' ORDER BY id DESC LIMIT 1"
    ).fetchone()
    began_at = queries.began_at(connection)
    return {
        "deadline_at": began_at + 3600 * deadline_h if deadline_h is not None and began_at else None,
        "budget_usd": budget_usd,
        "nodes": row.get(NODES_ASKED),
        "left_s": [row.get(f"target/left_s{end}") for end in ("_low", "_high")],
        "left_usd": [row.get(f"target/left_usd{end}") for end in ("_low", "_high")],
        "reachable": row.get(REACHABLE),
        "decision": None if decision is None else {"at": decision[0], "words": decision[1]},
    }


def _by_node(workers: list[tuple[str, float, float]], spot: set[str]) -> list[Json]:
    nodes: dict[str, list[float]] = {}
    for worker, seconds, usd in workers:
        known = nodes.setdefault(node_of(worker), [0.0, 0.0])
        known[0] += seconds
        known[1] += usd
    ranked = sorted(nodes.items(), key=lambda item: -item[1][1])
    shown: list[Json] = [
        {"node": node, "spot": node in spot, "seconds": seconds, "usd": usd}
        for node, (seconds, usd) in ranked[:_NODES_MAX]
    ]
    if rest := ranked[_NODES_MAX:]:
        seconds, usd = (sum(each[1][at] for each in rest) for at in (0, 1))
        shown.append({"node": f"{len(rest)} others", "spot": None, "seconds": seconds, "usd": usd})
    return shown
