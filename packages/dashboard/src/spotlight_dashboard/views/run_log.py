"""What happened to a run: attempts, incidents, refused and dropped work, and the processes' logs."""

from __future__ import annotations

import os

from spotlight.store.ledger.history import read_attempts
from spotlight_dashboard.figures import Json
from spotlight_dashboard.run_folders import LOG_NAME, RunFolder
from spotlight_rewards.base.files import open_regular

PAGE_SIZE = 200
_TAIL_BYTES = 64 << 10
_LOGS_MAX = 200
_INCIDENT = ("id", "attempt", "at", "kind", "subject", "spot", "detail")


def happened(run: RunFolder, before: int | None = None) -> Json:
    """Attempts, rollbacks, drops by reason, and the newest incidents, those before record ``before``.

    Raises:
        LedgerError: there is no ledger, or it cannot be read.
    """
    with run.reading_ledger() as connection:
        attempts = read_attempts(connection)
        incidents = connection.execute(
            f"SELECT {', '.join(_INCIDENT)} FROM incidents WHERE id < COALESCE(?, id + 1)"
            " ORDER BY id DESC LIMIT ?",
            (before, PAGE_SIZE + 1),
        ).fetchall()
        rollbacks = connection.execute(
            "SELECT attempt, from_position, to_position FROM rollbacks WHERE from_position > to_position"
            " ORDER BY id DESC LIMIT ?",
            (PAGE_SIZE,),
        ).fetchall()
        drops = connection.execute(
            "SELECT purpose, reason, COUNT(*), MAX(rollout), detail FROM outcomes WHERE kind = 'dropped'"
            " GROUP BY purpose, reason ORDER BY COUNT(*) DESC"
        ).fetchall()
    return {
        "attempts": [
            {
                "number": each.number,
                "host": each.host,
                "started_at": each.started_at,
                "seen_at": each.seen_at,
                "ended": each.ended.value if each.ended else "running" if each.is_alive else "killed",
            }
            for each in reversed(attempts)
        ],
        "incidents": [dict(zip(_INCIDENT, row, strict=True)) for row in incidents[:PAGE_SIZE]],
        "more": len(incidents) > PAGE_SIZE,
        "rollbacks": [{"attempt": attempt, "from": last, "to": to} for attempt, last, to in rollbacks],
        "drops": [
            {"purpose": purpose, "reason": reason, "count": number, "example": rollout, "detail": detail}
            for purpose, reason, number, rollout, detail in drops
        ],
        "logs": log_names(run),
    }


def log_names(run: RunFolder) -> list[str]:
    """The logs of the processes that worked on the run, the newest first."""
    logs = [path for path in run.paths.attempts.glob("*.log") if LOG_NAME.fullmatch(path.name)]
    found = [real for path in logs if (real := run.readable(path)) is not None and real.name == path.name]
    return [path.name for path in sorted(found, key=lambda path: -path.stat().st_mtime)][:_LOGS_MAX]


def log_tail(run: RunFolder, name: str) -> Json | None:
    """The end of one log; None if there is no such log."""
    path = run.readable(run.paths.attempts / name) if LOG_NAME.fullmatch(name) else None
    if path is None:
        return None
    with open_regular(path) as file:
        size = os.fstat(file.fileno()).st_size
        file.seek(max(0, size - _TAIL_BYTES))
        tail = file.read().decode("utf-8", "replace")
    return {"name": name, "bytes": size, "cut": size > _TAIL_BYTES, "text": tail}
