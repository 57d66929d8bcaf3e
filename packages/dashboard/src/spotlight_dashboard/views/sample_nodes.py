"""Where samples were: every worker that a lease gave one to, and the learner's that trained on it."""

from __future__ import annotations

from collections.abc import Sequence
from sqlite3 import Connection, Row

from spotlight.scheduler.types import Phase
from spotlight.store.ledger import ledger_queries as queries
from spotlight.store.ledger.ledger_schema import Incident
from spotlight_dashboard.figures import Json
from spotlight_dashboard.views.lanes import node_of, part_of

_ENDS_A_LEASE = (Incident.NODE_NOTICED, Incident.NODE_LOST, Incident.WORKER_CRASHED)
ON_SEVERAL_NODES = (
    "SELECT rollout FROM leases GROUP BY rollout HAVING COUNT(DISTINCT rtrim(worker, '0123456789')) > 1"
)
"""SQL of the rollouts that were on more than one node; a worker is its node's name, ``/`` and a number."""


def stays(
    connection: Connection, rollout: str, maker: tuple[str, int] | None, over_by: float | None
) -> list[Json] | None:
    """Every lease on a rollout, or on the preview it was kept from, the oldest first, each with its end.

    Args:
        maker: worker and lease epoch of the sample that counts.
        over_by: when the rollout had its outcome at the latest; None before that is known.

    Returns:
        None if the run was made before leases were recorded.
    """
    if not queries.has_table(connection, "leases"):
        return None
    rows = connection.execute(
        "SELECT attempt, lease, worker, epoch, from_step, at, ended, ended_at"
        " FROM leases JOIN attempts ON number = attempt WHERE rollout = ? ORDER BY attempt, lease",
        (queries.previews_of(connection, [rollout]).get(rollout, rollout),),
    ).fetchall()
    makers = [at for at, row in enumerate(rows) if (row["worker"], row["epoch"]) == maker]
    return [
        {
            "at": row["at"],
            "attempt": row["attempt"],
            "worker": row["worker"],
            "node": node_of(row["worker"]),
            "lease": row["lease"],
            "epoch": row["epoch"],
            "from_step": row["from_step"],
            "made_it": at in makers[-1:],
            "then": []
            if at in makers[-1:]
            else _ends(connection, row, rows[at + 1] if at + 1 < len(rows) else None, over_by),
        }
        for at, row in enumerate(rows)
    ]


def _ends(connection: Connection, row: Row, following: Row | None, over_by: float | None) -> list[Json]:
    """What happened to the holder, or to the learner, before the next lease; or its attempt's end."""
    node = part_of(row["worker"])
    met = connection.execute(
        "SELECT kind, MIN(at) AS at FROM incidents WHERE attempt = ? AND at >= ? AND at <= COALESCE(?, at)"
        f" AND (kind = ? OR (subject IN (?, ?) AND kind IN ({', '.join('?' * len(_ENDS_A_LEASE))})))"
        " GROUP BY kind ORDER BY 2",
        (
            row["attempt"],
            row["at"],
            following["at"] if following else over_by,
            Incident.LEARNER_LOST,
            node,
            row["worker"],
            *_ENDS_A_LEASE,
        ),
    ).fetchall()
    ends: list[Json] = [{"what": kind, "at": at} for kind, at in met]
    last = over_by is None if following is None else following["attempt"] != row["attempt"]
    if last and row["ended"] is not None:
        ends.append({"what": f"the run was {row['ended']}", "at": row["ended_at"]})
    elif following is not None and not ends:
        ends.append({"what": "given to another", "at": following["at"]})
    return ends


def nodes_of(connection: Connection, rollouts: Sequence[str]) -> dict[str, list[str]]:
    """The nodes of each rollout by the order of its leases, or of those of its preview if it was kept; those
    without a recorded lease are absent.
    """
    if not queries.has_table(connection, "leases"):
        return {}
    found: dict[str, list[str]] = {}
    previews = queries.previews_of(connection, rollouts)
    names = (*rollouts, *previews.values())
    rows = connection.execute(
        f"SELECT rollout, worker FROM leases WHERE rollout IN ({', '.join('?' * len(names))})"
        " ORDER BY attempt, lease",
        names,
    )
    for rollout, worker in rows:
        known = found.setdefault(rollout, [])
        if known[-1:] != [node_of(worker)]:
            known.append(node_of(worker))
    return found | {kept: found[preview] for kept, preview in previews.items() if preview in found}


def trained_on(connection: Connection, seq: int) -> list[str]:
    """The nodes that were billed for training first after record ``seq``; empty before they are billed."""
    rows = connection.execute(
        "SELECT DISTINCT worker FROM gpu_seconds WHERE phase = ?1 AND seconds > 0 AND position ="
        " (SELECT MIN(position) FROM gpu_seconds WHERE phase = ?1 AND seconds > 0 AND position >= ?2)",
        (Phase.TRAINING, seq),
    )
    return sorted({node_of(worker) for (worker,) in rows})
