"""Read-only ledger queries: counts, digest, GPU-seconds and cost.

The digest covers decisions and measurements in record order. It excludes where and when (worker, lease epoch,
time, attempt, GPU-seconds, refused commits) and record numbers, so that a resumed run has the digest of an
uninterrupted one.
"""

from __future__ import annotations

import hashlib
import heapq
import json
import os
import sqlite3
import stat
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from spotlight.scheduler.types import DropReason, Filler, Phase, Purpose
from spotlight.store.ledger.ledger_schema import (
    APPLICATION_ID,
    RECORD_TABLES,
    SCHEMA_VERSION,
    SCORES_VIEW,
    UPGRADABLE_VERSION,
    Ending,
    Incident,
)
from spotlight.store.store_errors import ODD_VALUES, LedgerError, told_odd
from spotlight_rewards.base.prompts import PromptId

_BESIDE = ("-journal", "-wal", "-shm")
"""Endings of the files that SQLite opens besides a database."""
_STEPS_BETWEEN_LOOKS = 10_000
"""Of SQLite's machine, between two looks at the clock: a millisecond."""
_VALUE_BYTES_MAX = 64 << 20
_TOGETHER_S = 5.0
"""Parts of a machine that are lost so shortly one after the other are lost together."""
_DIGESTED = (
    ("prompts", "id, text, metadata"),
    ("rollouts", "id, purpose, iteration, prompt, member, seed, steps, version"),
    ("samples", "rollout, version"),
    ("rewards", "rollout, name, value"),
    ("optimizer_steps", "version, iteration, update_index, samples, loss, grad_norm"),
    ("outcomes", "rollout, kind, optimizer_step, reason, detail"),
    ("versions", "version"),
)


@dataclass(frozen=True, slots=True)
class LedgerCounts:
    """Counts over the whole ledger.

    Attributes:
        in_flight: without an outcome.
        kept: train samples that were made as previews.
        dropped: of all purposes; ``train_dropped``: train rollouts only.
        rejected: commits refused for a stale epoch or as duplicates.
    """

    prompts: int
    issued: Mapping[Purpose, int]
    in_flight: Mapping[Purpose, int]
    finished: int
    kept: int
    trained: int
    evaluated: int
    explored: int
    dropped: Mapping[DropReason, int]
    train_dropped: Mapping[DropReason, int]
    optimizer_steps: int
    versions: int
    rejected: int


def open_readonly(path: Path, within_s: float | None = None) -> sqlite3.Connection:
    """Open a read-only connection, safe beside a writer, and to a file of somebody else.

    Of a ledger that no process works on, also where nothing can be written, as on a disk mounted read-only.

    Args:
        within_s: seconds from now after which queries end with ``sqlite3.OperationalError`` (interrupted).

    Raises:
        LedgerError: the file is missing, no ledger of a supported version, or its tables are none.
    """
    if not path.is_file():
        raise LedgerError(f"{path}: no ledger here. Name a run directory that `spotlight train` has made.")
    for part in (path.with_name(path.name + ending) for ending in _BESIDE):
        if os.path.lexists(part) and not stat.S_ISREG(part.lstat().st_mode):
            raise LedgerError(f"{part}: not a regular file; expected one that SQLite has made. Remove it.")
    # SQLite would make two files beside the ledger; without a log to read it can do without.
    still = "" if os.access(path.parent, os.W_OK) or _has_log(path) else "&immutable=1"
    connection = sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro{still}", uri=True, isolation_level=None)
    if within_s is not None:
        end_s = time.monotonic() + within_s
        connection.set_progress_handler(lambda: time.monotonic() > end_s, _STEPS_BETWEEN_LOOKS)
    try:
        connection.execute("PRAGMA trusted_schema = OFF")
        connection.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, _VALUE_BYTES_MAX)
        check_identity(connection, path)
        _check_tables(connection, path)
    except LedgerError:
        connection.close()
        raise
    except sqlite3.Error as error:
        connection.close()
        if ran_out_of_time(error):
            raise
        if is_damage(error):
            raise damaged(path, error) from error
        remedy = "Reading needs write access to its folder"
        if is_locked(error):
            remedy = "Close the program that locks it"
        raise LedgerError(f"{path}: cannot be read: {error}. {remedy}.") from error
    return connection


def ran_out_of_time(error: BaseException) -> bool:
    """Whether the seconds given to :func:`open_readonly` were over."""
    return isinstance(error, sqlite3.Error) and error.sqlite_errorcode == sqlite3.SQLITE_INTERRUPT


def _check_tables(connection: sqlite3.Connection, path: Path) -> None:
    """Refuse tables that compute what they hold: of a few bytes they could make rows without an end."""
    computed = connection.execute(
        "SELECT type, name FROM sqlite_master WHERE type = 'view' AND name <> 'scores'"
        " OR type = 'table' AND rootpage = 0 UNION SELECT 'column', tables.name || '.' || columns.name"
        " FROM sqlite_master AS tables, pragma_table_xinfo(tables.name) AS columns"
        " WHERE tables.type = 'table' AND rootpage > 0 AND columns.hidden = 2"
    ).fetchone()
    if computed is not None:
        raise LedgerError(
            f"{path}: {computed[1][:100]!r} is a computed {computed[0]}; expected tables that hold "
            "their rows. No Spotlight made this file."
        )


def _has_log(path: Path) -> bool:
    log = path.with_name(f"{path.name}-wal")
    return log.exists() and log.stat().st_size > 0


def damaged(path: Path, found: object) -> LedgerError:
    return LedgerError(
        f"{path}: damaged ({found}). Restore the ledger and the checkpoints from one copy of the run, or "
        "start a run of another name."
    )


def is_damage(error: sqlite3.Error) -> bool:
    """Whether the file is not what SQLite wrote: a bad page, or text that is none."""
    code = getattr(error, "sqlite_errorcode", sqlite3.SQLITE_OK) & 0xFF
    return code in (sqlite3.SQLITE_NOTADB, sqlite3.SQLITE_CORRUPT) or "decode to UTF-8" in str(error)


def is_locked(error: sqlite3.Error) -> bool:
    """Whether another program's lock is in the way."""
    return getattr(error, "sqlite_errorcode", sqlite3.SQLITE_OK) & 0xFF == sqlite3.SQLITE_BUSY


def is_empty_database(connection: sqlite3.Connection, path: Path) -> bool:
    """Whether the database has no tables, as after an interrupted creation."""
    return _header_integer(connection, path, "SELECT COUNT(*) FROM sqlite_master") == 0


def check_identity(connection: sqlite3.Connection, path: Path) -> int:
    """The ledger's schema version. Raises :class:`LedgerError` if it is not supported."""
    application = _header_integer(connection, path, "PRAGMA application_id")
    version = _header_integer(connection, path, "PRAGMA user_version")
    if application != APPLICATION_ID or not UPGRADABLE_VERSION <= version <= SCHEMA_VERSION:
        raise LedgerError(
            f"{path}: no ledger of this Spotlight: (application id, schema version) is "
            f"{(application, version)}, expected {(APPLICATION_ID, SCHEMA_VERSION)}. "
            "Use the version that made it, or start a run of another name."
        )
    return version


@contextmanager
def consistent_reading(connection: sqlite3.Connection) -> Iterator[None]:
    """Read everything in the block from one snapshot. Nests.

    Raises LedgerError of what SQLite finds damaged, as it is read, and of values that none of ours can be.
    """
    if connection.in_transaction:
        yield
        return
    # As bytes: a folder's name need not be UTF-8.
    (file,) = connection.execute("SELECT CAST(file AS BLOB) FROM pragma_database_list").fetchone()
    path = Path(os.fsdecode(file))
    try:
        connection.execute("BEGIN")
        yield
        connection.execute("COMMIT")
    except sqlite3.Error as error:
        if not is_damage(error) and "no such" not in str(error):  # a table or column
            raise
        raise damaged(path, error) from error
    except Exception as error:
        if type(error) not in ODD_VALUES:
            raise
        raise LedgerError(told_odd(path, error)) from error
    finally:
        with suppress(sqlite3.Error):  # which was told
            connection.rollback()


def position(connection: sqlite3.Connection) -> int:
    """Number of the last record; 0 in an empty ledger."""
    newest = " UNION ALL ".join(f"SELECT MAX(seq) AS seq FROM {table}" for table in RECORD_TABLES)
    return _integer(connection, f"SELECT COALESCE(MAX(seq), 0) FROM ({newest})")


def example_prompt(connection: sqlite3.Connection) -> str | None:
    """Text of the first held-out prompt; of the first prompt, if none was evaluated; None before any."""
    first = "SELECT prompt FROM rollouts {} ORDER BY seq LIMIT 1"
    evaluated = first.format(f"WHERE purpose = '{Purpose.EVAL}'")
    found = connection.execute(
        f"SELECT text FROM prompts WHERE id = COALESCE(({evaluated}), ({first.format('')}))"
    ).fetchone()
    return None if found is None else str(found[0])


def passed_and_refused(connection: sqlite3.Connection, passed: str, judge: str) -> dict[str, tuple[int, int]]:
    """Of the last evaluation, by text of prompt: pictures that have 1 in the one curve, and how many of those
    have less in the other."""
    found = connection.execute(
        "SELECT prompts.text, COUNT(*), SUM(judge.value < 1) FROM rollouts "
        "JOIN prompts ON prompts.id = rollouts.prompt "
        "JOIN rewards AS passed ON passed.rollout = rollouts.id AND passed.name = ? AND passed.value = 1 "
        "JOIN rewards AS judge ON judge.rollout = rollouts.id AND judge.name = ? "
        f"WHERE purpose = '{Purpose.EVAL}' AND iteration = "
        f"(SELECT MAX(iteration) FROM rollouts WHERE purpose = '{Purpose.EVAL}') "
        "GROUP BY prompts.text ORDER BY SUM(judge.value < 1) DESC, prompts.text",
        (passed, judge),
    )
    return {text: (pictures, refused) for text, pictures, refused in found}


def counts(connection: sqlite3.Connection) -> LedgerCounts:
    with consistent_reading(connection):
        issued = _tally(connection, "SELECT purpose, COUNT(*) FROM rollouts GROUP BY purpose")
        ended = _tally(connection, "SELECT purpose, COUNT(*) FROM outcomes GROUP BY purpose")
        kinds = _tally(connection, "SELECT kind, COUNT(*) FROM outcomes GROUP BY kind")
        dropped = "SELECT reason, COUNT(*) FROM outcomes WHERE kind = 'dropped'"
        return LedgerCounts(
            prompts=_rows_in(connection, "prompts"),
            issued={purpose: issued.get(purpose, 0) for purpose in Purpose},
            in_flight={purpose: issued.get(purpose, 0) - ended.get(purpose, 0) for purpose in Purpose},
            finished=_rows_in(connection, "samples"),
            kept=_rows_in(connection, "kept_previews") if has_table(connection, "kept_previews") else 0,
            trained=kinds.get("trained", 0),
            evaluated=kinds.get("evaluated", 0),
            explored=kinds.get("explored", 0),
            dropped=_by_reason(connection, f"{dropped} GROUP BY reason"),
            train_dropped=_by_reason(connection, f"{dropped} AND purpose = 'train' GROUP BY reason"),
            optimizer_steps=_rows_in(connection, "optimizer_steps"),
            versions=_rows_in(connection, "versions"),
            rejected=_rows_in(connection, "rejected"),
        )


def digest(connection: sqlite3.Connection) -> str:
    """SHA-256 (hexadecimal) over the logical rows, in record order."""
    hasher = hashlib.sha256()
    with consistent_reading(connection):
        tables = [_logical_rows(connection, table, columns) for table, columns in _DIGESTED]
        for _, line in heapq.merge(*tables, key=lambda row: row[0]):
            hasher.update(line)
    return hasher.hexdigest()


def _logical_rows(connection: sqlite3.Connection, table: str, columns: str) -> Iterator[tuple[int, bytes]]:
    ordered = "seq, name" if table == "rewards" else "seq"
    for row in connection.execute(f"SELECT seq, {columns} FROM {table} ORDER BY {ordered}"):
        yield row[0], json.dumps([table, *row[1:]], ensure_ascii=True, separators=(",", ":")).encode() + b"\n"


def gpu_seconds_by_phase(connection: sqlite3.Connection, attempt: int | None = None) -> dict[Phase, float]:
    """GPU-seconds of one attempt, or of all; every phase is present."""
    rows = connection.execute(
        "SELECT phase, SUM(seconds) FROM gpu_seconds WHERE attempt = COALESCE(?, attempt) GROUP BY phase",
        (attempt,),
    )
    spent = dict(rows)
    return {phase: float(spent.get(phase.value, 0.0)) for phase in Phase}


def filled_s(
    connection: sqlite3.Connection, attempt: int | None = None, up_to: int | None = None
) -> dict[Filler, float]:
    """GPU-seconds of otherwise idle time, by what filled it; zero entries are absent.

    Args:
        up_to: last record number to count; None for all.
    """
    if not has_table(connection, "filled_seconds"):
        return {}
    rows = connection.execute(
        "SELECT filler, SUM(seconds) FROM filled_seconds WHERE attempt = COALESCE(?1, attempt)"
        " AND position <= COALESCE(?2, position) GROUP BY filler",
        (attempt, up_to),
    )
    found = dict(rows)
    return {filler: float(found[filler]) for filler in Filler if filler in found}


def scorers(connection: sqlite3.Connection) -> dict[str, tuple[str, ...]]:
    """What gave the scores, by reward, in order of first use; rewards that do not say it are absent."""
    if not has_table(connection, "scorers"):
        return {}
    rows = connection.execute(
        "SELECT reward, scored_by FROM scorers GROUP BY reward, scored_by ORDER BY MIN(id)"
    )
    found: dict[str, tuple[str, ...]] = {}
    for reward, scorer in rows:
        found[reward] = (*found.get(reward, ()), scorer)
    return found


def scorers_at(connection: sqlite3.Connection, position: int) -> dict[str, str]:
    """What gave the newest scores up to ``position``, by reward that says it."""
    rows = connection.execute(
        "SELECT reward, scored_by FROM scorers WHERE position < ? ORDER BY id", (position,)
    )
    return dict(rows.fetchall())


def prompts_at(connection: sqlite3.Connection, position: int) -> dict[str, list[PromptId]]:
    """The prompts that the records up to ``position`` were made with, by key and in the file's order.

    Empty: the ledger is of a version that did not record them.
    """
    if not has_table(connection, "prompt_files"):
        return {}
    with consistent_reading(connection):
        rows = connection.execute(
            "SELECT key, prompts FROM prompt_files WHERE position < ? ORDER BY id", (position,)
        )
        return {key: json.loads(prompts) for key, prompts in rows}


def has_table(connection: sqlite3.Connection, name: str) -> bool:
    """Whether there is this table; a ledger of an older version may lack it until it is upgraded."""
    found = connection.execute("SELECT 1 FROM sqlite_master WHERE type = 'table' AND name = ?", (name,))
    return found.fetchone() is not None


def made_as(connection: sqlite3.Connection) -> str:
    """SQL of the rollout under which a row of ``samples`` was made: a preview's, if it was kept from one."""
    if not has_table(connection, "kept_previews"):
        return "samples.rollout"
    kept = "SELECT preview FROM kept_previews WHERE kept_previews.rollout = samples.rollout"
    return f"COALESCE(({kept}), samples.rollout)"


def previews_of(connection: sqlite3.Connection, rollouts: Sequence[str]) -> dict[str, str]:
    """The preview of each of these rollouts that was kept from one."""
    if not has_table(connection, "kept_previews"):
        return {}
    marks = ", ".join("?" * len(rollouts))
    query = f"SELECT rollout, preview FROM kept_previews WHERE rollout IN ({marks})"
    return dict(connection.execute(query, rollouts).fetchall())


def furthest_checkpoint(connection: sqlite3.Connection) -> int | None:
    """The greatest position of a checkpoint that was committed; None: there was none, as far as is known."""
    known = ["SELECT NULLIF(to_position, 0) AS position FROM rollbacks"]  # older ones know no more
    if has_table(connection, "checkpoints"):
        known.append("SELECT position FROM checkpoints")
    row = connection.execute(f"SELECT MAX(position) FROM ({' UNION ALL '.join(known)})").fetchone()
    return None if row[0] is None else int(row[0])


def file_damages(connection: sqlite3.Connection) -> tuple[str, ...]:
    """What SQLite finds wrong with the file; it reads all of it."""
    return tuple(row[0] for row in connection.execute("PRAGMA integrity_check") if row[0] != "ok")


def has_scores_view(connection: sqlite3.Connection) -> bool:
    """Whether the view ``scores`` is that of this version."""
    rows = connection.execute("SELECT sql FROM sqlite_master WHERE name = 'scores'").fetchall()
    return rows == [(SCORES_VIEW,)]


def iterations(connection: sqlite3.Connection) -> int:
    """Iterations of which something was trained, up to the last."""
    return _integer(connection, "SELECT COALESCE(MAX(iteration) + 1, 0) FROM optimizer_steps")


def worked_s(connection: sqlite3.Connection) -> float:
    """Seconds from start to end (or last heartbeat), over all attempts."""
    row = connection.execute("SELECT TOTAL(COALESCE(ended_at, seen_at) - started_at) FROM attempts")
    return float(row.fetchone()[0])


def began_at(connection: sqlite3.Connection) -> float:
    """When the first attempt began, in seconds since the epoch; 0 before it."""
    row = connection.execute("SELECT COALESCE(MIN(started_at), 0.0) FROM attempts")
    return float(row.fetchone()[0])


def incidents(connection: sqlite3.Connection) -> dict[tuple[Incident, bool], int]:
    """Counts by (kind, whether it hit a spot node)."""
    rows = connection.execute("SELECT kind, spot, COUNT(*) FROM incidents GROUP BY kind, spot")
    return {(Incident(kind), bool(spot)): number for kind, spot, number in rows}


def machine_of(node: str) -> str:
    """The machine of a node: ``spot-3``, also of its parts ``spot-3/learner`` and ``spot-3/rollout``."""
    return node.removesuffix("/learner").removesuffix("/rollout")


def preemptions(connection: sqlite3.Connection) -> tuple[int, int]:
    """(spot machines lost that the run had not given back, those with a standing notice)."""
    connection.create_function("machine_of", 1, machine_of, deterministic=True)
    row = connection.execute(
        """
        SELECT COUNT(*), TOTAL(state = 'node_noticed') FROM (
            SELECT COALESCE((
                SELECT kind FROM incidents AS before
                WHERE before.attempt = gone.attempt AND before.subject = gone.subject AND before.id < gone.id
                    AND before.kind IN ('node_noticed', 'notice_cancelled', 'node_joined', 'node_returned')
                ORDER BY before.id DESC LIMIT 1), '') AS state
            FROM incidents AS gone WHERE kind = 'node_lost' AND spot AND NOT EXISTS (
                SELECT 1 FROM incidents AS part  -- the other part of the same machine, lost with it
                WHERE part.id < gone.id AND gone.at - part.at < ? AND part.attempt = gone.attempt
                    AND part.kind = 'node_lost' AND part.subject <> gone.subject
                    AND machine_of(part.subject) = machine_of(gone.subject)))
        WHERE state <> 'node_returned'
        """,
        (_TOGETHER_S,),
    ).fetchone()
    return int(row[0]), int(row[1])


def prices_usd_h(connection: sqlite3.Connection) -> tuple[float, ...]:
    """Distinct prices paid per worker-hour, ascending."""
    rows = connection.execute("SELECT DISTINCT price_usd_h FROM gpu_seconds WHERE seconds > 0 ORDER BY 1")
    return tuple(float(price) for (price,) in rows)


def last_ending(connection: sqlite3.Connection) -> Ending | None:
    """How the newest attempt ended; None if unknown."""
    row = connection.execute("SELECT ended FROM attempts ORDER BY number DESC LIMIT 1").fetchone()
    return Ending(row[0]) if row and row[0] else None


def cost_usd(connection: sqlite3.Connection) -> float:
    """Cost of all GPU-seconds, lost ones included."""
    row = connection.execute("SELECT COALESCE(SUM(seconds * price_usd_h), 0.0) / 3600 FROM gpu_seconds")
    return float(row.fetchone()[0])


def _header_integer(connection: sqlite3.Connection, path: Path, query: str) -> int:
    try:
        return _integer(connection, query)
    except sqlite3.DatabaseError as error:
        if not is_damage(error):
            raise
        raise damaged(path, f"cannot be read as a SQLite database: {error}") from error


def _by_reason(connection: sqlite3.Connection, query: str) -> dict[DropReason, int]:
    return {DropReason(reason): number for reason, number in _tally(connection, query).items()}


def _tally(connection: sqlite3.Connection, query: str) -> dict[str, int]:
    return dict(connection.execute(query))


def _rows_in(connection: sqlite3.Connection, table: str) -> int:
    return _integer(connection, f"SELECT COUNT(*) FROM {table}")


def _integer(connection: sqlite3.Connection, query: str) -> int:
    return int(connection.execute(query).fetchone()[0])
