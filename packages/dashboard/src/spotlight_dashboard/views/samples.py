"""Search the ledger for samples, and tell one's life."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Iterator
from dataclasses import dataclass

from spotlight.store.ledger import ledger_queries as queries
from spotlight_dashboard.figures import Json, finite
from spotlight_dashboard.run_folders import RunFolder
from spotlight_dashboard.views.lanes import node_of
from spotlight_dashboard.views.sample_nodes import ON_SEVERAL_NODES, nodes_of, stays, trained_on

PAGE_SIZE = 50
IN_FLIGHT = "in flight"
_LISTED = """
SELECT rollouts.seq, rollouts.id, rollouts.purpose, rollouts.iteration,
    substr(prompts.text, 1, 400) AS text, rollouts.member,
    samples.worker, outcomes.kind, outcomes.reason,
    (SELECT value FROM rewards WHERE rewards.rollout = rollouts.id AND name = 'reward') AS reward
FROM rollouts JOIN prompts ON prompts.id = rollouts.prompt
    LEFT JOIN samples ON samples.rollout = rollouts.id
    LEFT JOIN outcomes ON outcomes.rollout = rollouts.id
"""


@dataclass(frozen=True, slots=True)
class SampleSearch:
    """What to look for; empty text and None match everything.

    Attributes:
        text: part of the prompt, or a rollout's id.
        fate: an outcome, or :data:`IN_FLIGHT`.
        worker: a worker or a node that held a lease on it, or finished it.
        moved: only samples that were on several nodes.
        before: only rollouts issued before this record: the next page.
    """

    text: str = ""
    purpose: str = ""
    fate: str = ""
    worker: str = ""
    iteration: int | None = None
    moved: bool = False
    before: int | None = None


def samples(run: RunFolder, search: SampleSearch) -> Json:
    """The newest matches, at most :data:`PAGE_SIZE`.

    Raises:
        LedgerError: there is no ledger, or it cannot be read.
    """
    with run.reading_ledger() as connection:
        conditions = list(_conditions(search, leased=queries.has_table(connection, "leases")))
        where = f" WHERE {' AND '.join(condition for condition, _ in conditions)}" if conditions else ""
        query = f"{_LISTED}{where} ORDER BY rollouts.seq DESC LIMIT {PAGE_SIZE + 1}"
        connection.row_factory = sqlite3.Row
        rows = connection.execute(query, [value for _, values in conditions for value in values]).fetchall()
        nodes = nodes_of(connection, [row["id"] for row in rows[:PAGE_SIZE]])
    return {
        "samples": [
            {
                **dict(row),
                "reward": finite(row["reward"]),
                "nodes": nodes.get(row["id"]) or ([node_of(row["worker"])] if row["worker"] else []),
            }
            for row in rows[:PAGE_SIZE]
        ],
        "more": len(rows) > PAGE_SIZE,
    }


def _conditions(search: SampleSearch, *, leased: bool) -> Iterator[tuple[str, tuple[str | int, ...]]]:
    if search.text:
        escaped = search.text.replace("\\", "\\\\").replace("%", "\\%").replace("_", "\\_")
        prompts = "SELECT id FROM prompts WHERE text LIKE ? ESCAPE '\\'"
        yield f"(rollouts.id = ? OR rollouts.prompt IN ({prompts}))", (search.text, f"%{escaped}%")
    if search.purpose:
        yield "rollouts.purpose = ?", (search.purpose,)
    if search.fate == IN_FLIGHT:
        yield "outcomes.kind IS NULL", ()
    elif search.fate:
        yield "outcomes.kind = ?", (search.fate,)
    if search.worker:
        held = "SELECT rollout FROM samples WHERE ? IN (worker, rtrim(rtrim(worker, '0123456789'), '/'))"
        if leased:
            held = f"{held} UNION {held.replace('samples', 'leases')}"
        yield f"rollouts.id IN ({held})", (search.worker,) * (1 + leased)
    if search.moved:
        yield f"rollouts.id IN ({ON_SEVERAL_NODES})" if leased else "0", ()
    if search.iteration is not None:
        yield "rollouts.iteration = ?", (search.iteration,)
    if search.before is not None:
        yield "rollouts.seq < ?", (search.before,)


def sample(run: RunFolder, rollout: str) -> Json | None:
    """One rollout's life by record, with all members of its group; None if the ledger has no such rollout.

    Raises:
        LedgerError: there is no ledger, or it cannot be read.
    """
    with run.reading_ledger() as connection:
        connection.row_factory = sqlite3.Row
        issued = connection.execute(
            "SELECT rollouts.*, text, metadata FROM rollouts JOIN prompts ON prompts.id = prompt"
            " WHERE rollouts.id = ?",
            (rollout,),
        ).fetchone()
        if issued is None:
            return None
        life = [_event(connection, seq, what, how) for seq, what, how in sorted(_life(connection, issued))]
        ended = connection.execute("SELECT seq FROM outcomes WHERE rollout = ?", (rollout,)).fetchone()
        maker = connection.execute(
            "SELECT worker, epoch FROM samples WHERE rollout = ?", (rollout,)
        ).fetchone()
        members = connection.execute(
            "SELECT rollouts.id, member, (SELECT value FROM rewards WHERE rollout = rollouts.id AND"
            " name = 'reward') AS reward, (SELECT kind FROM outcomes WHERE rollout = rollouts.id) AS kind"
            " FROM rollouts WHERE prompt = ? AND iteration = ? AND purpose = ? ORDER BY reward DESC, member",
            (issued["prompt"], issued["iteration"], issued["purpose"]),
        ).fetchall()
        return {
            "id": issued["id"],
            "prompt": issued["text"],
            "metadata": json.loads(issued["metadata"]),
            **{key: issued[key] for key in ("purpose", "iteration", "member", "steps", "version")},
            "seed": str(issued["seed"]),  # more digits than a number of JavaScript has
            "life": life,
            "stays": stays(
                connection,
                rollout,
                (maker["worker"], maker["epoch"]) if maker else None,
                _billed_at(connection, ended["seq"]) if ended else None,
            ),
            "scores": [
                {"name": name, "value": finite(value), "by": by}
                for name, value, by in connection.execute(_scores_query(connection), (rollout,))
            ],
            "group": [{**dict(row), "reward": finite(row["reward"])} for row in members],
        }


def _life(connection: sqlite3.Connection, issued: sqlite3.Row) -> Iterator[tuple[int, str, str]]:
    """(record, what happened, how) of one rollout, in no order."""
    rollout = issued["id"]
    yield issued["seq"], "issued", f"for policy version {issued['version']}"
    for seq, reason in connection.execute("SELECT seq, reason FROM rejected WHERE rollout = ?", (rollout,)):
        yield seq, "refused", f"a commit: {reason}"
    for seq, worker, epoch in connection.execute(
        "SELECT seq, worker, epoch FROM samples WHERE rollout = ?", (rollout,)
    ):
        yield seq, "finished", f"by worker {worker} of node {node_of(worker)} (lease epoch {epoch})"
    for (seq,) in connection.execute("SELECT DISTINCT seq FROM rewards WHERE rollout = ?", (rollout,)):
        yield seq, "scored", ""
    for seq, kind, step, reason, detail in connection.execute(
        "SELECT seq, kind, optimizer_step, reason, detail FROM outcomes WHERE rollout = ?", (rollout,)
    ):
        yield seq, kind, _drop_text(reason, detail) if step is None else _trained(connection, seq, step)


def _trained(connection: sqlite3.Connection, seq: int, step: int) -> str:
    nodes = trained_on(connection, seq)
    return f"in optimizer step {step}" + (f" of the learner on {', '.join(nodes)}" if nodes else "")


def _drop_text(reason: str | None, detail: str | None) -> str:
    return f"{reason}: {detail}" if reason else ""


def _event(connection: sqlite3.Connection, seq: int, what: str, detail: str) -> Json:
    return {"seq": seq, "what": what, "detail": detail, "by": _billed_at(connection, seq)}


def _billed_at(connection: sqlite3.Connection, seq: int) -> float | None:
    """When the first bill after a record ended: an upper bound of its time, since records have none."""
    bill = connection.execute(
        "SELECT attempt, worker, id FROM gpu_seconds WHERE position >= ? AND phase <> 'lost'"
        " ORDER BY id LIMIT 1",
        (seq,),
    ).fetchone()
    if bill is None:
        return None
    found: float = connection.execute(
        "SELECT joined_at + (SELECT SUM(seconds) FROM gpu_seconds WHERE attempt = ?1 AND worker = ?2"
        " AND id <= ?3) FROM attempt_workers WHERE attempt = ?1 AND worker = ?2",
        tuple(bill),
    ).fetchone()[0]
    return found


def _scores_query(connection: sqlite3.Connection) -> str:
    if queries.has_scores_view(connection):
        return "SELECT reward, value, scored_by FROM scores WHERE rollout = ? ORDER BY reward"
    return "SELECT name, value, NULL FROM rewards WHERE rollout = ? ORDER BY name"
