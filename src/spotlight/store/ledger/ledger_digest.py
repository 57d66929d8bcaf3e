"""Whether a ledger is the one that a checkpoint was written with.

Its digest at the checkpoint covers every column of the records up to that position, and what was written
before the last of them of leases, bills, scorers and prompts: what neither a rollback to the checkpoint nor
later work changes. The digest of ``ledger_queries.py``, which compares runs, is of decisions alone. Attempts,
workers and incidents are not covered.
"""

from __future__ import annotations

import hashlib
import json
import sqlite3
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from hashlib import _Hash

_RECORDS = (
    ("prompts", "seq, id, text, metadata", "seq"),
    ("rollouts", "seq, id, purpose, iteration, prompt, member, seed, steps, version", "seq"),
    (
        "samples",
        "seq, rollout, version, worker, epoch,"
        " (SELECT preview FROM kept_previews WHERE kept_previews.rollout = samples.rollout)",
        "seq",
    ),
    ("rewards", "seq, rollout, name, value", "seq, name"),
    ("optimizer_steps", "seq, version, iteration, update_index, samples, loss, grad_norm", "seq"),
    ("outcomes", "seq, rollout, purpose, kind, optimizer_step, reason, detail", "seq"),
    ("versions", "seq, version", "seq"),
    ("rejected", "seq, rollout, reason", "seq"),
)
_AROUND = (
    (
        "leases",
        "position, attempt, lease, rollout, at, worker, epoch, from_step",
        "position, attempt, lease, rollout",
    ),
    (
        "gpu_seconds",
        "position, id, attempt, worker, phase, was_phase, seconds, price_usd_h",
        "position, id",
    ),
    ("filled_seconds", "position, id, attempt, iteration, filler, seconds", "position, id"),
    ("scorers", "position, id, attempt, reward, scored_by", "position, id"),
    ("prompt_files", "position, id, attempt, key, prompts", "position, id"),
)
"""Rows at a position may still follow until a record does, so those at the checkpoint's are left out."""


@dataclass(slots=True)
class RunningDigest:
    """Digests at growing positions; each costs only the rows since the one before."""

    _position: int = 0
    _hashes: dict[str, _Hash] = field(default_factory=dict)

    def at(self, connection: sqlite3.Connection, position: int) -> str:
        """SHA-256 (hexadecimal) at ``position``. Raises :class:`sqlite3.Error`."""
        self.forget_after(position)
        hashes = {table: known.copy() for table, known in self._hashes.items()}
        records = "seq", self._position + 1, position + 1
        around = "position", self._position, position
        for tables, (key, first, end) in ((_RECORDS, records), (_AROUND, around)):
            for table, columns, order in tables:
                digest = hashes.setdefault(table, hashlib.sha256())
                for row in connection.execute(
                    f"SELECT {columns} FROM {table} WHERE {key} >= ? AND {key} < ? ORDER BY {order}",
                    (first, end),
                ):
                    digest.update(json.dumps(row, default=bytes.hex).encode() + b"\n")
        self._position, self._hashes = position, hashes
        every = (f"{table} {digest.hexdigest()}\n" for table, digest in sorted(hashes.items()))
        return hashlib.sha256("".join(every).encode()).hexdigest()

    def forget_after(self, position: int) -> None:
        """What is after ``position`` is no more, or may be written again."""
        if position < self._position:
            self._position, self._hashes = 0, {}
