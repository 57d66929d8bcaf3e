"""A ledger's file, open to its only writer: made or upgraded, written in transactions."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from spotlight.store.ledger import ledger_queries as queries
from spotlight.store.ledger.ledger_schema import INDEXES, SCHEMA, SCHEMA_VERSION, SCORES_VIEW, upgrade_from
from spotlight.store.store_errors import LedgerError
from spotlight_rewards.base.file_errors import StoreError, storage_error

_LOOK_S = 1.0
"""How long SQLite waits for a lock before a signal is looked for."""


class LedgerFile:
    """A lock that another program holds on the file is waited for, however long.

    Attributes:
        waits: whether that is so; else it is a StoreError.
    """

    def __init__(self, path: Path, note: Callable[[str], None], keep_alive: Callable[[], None]) -> None:
        """See :class:`~spotlight.store.ledger.sqlite_ledger.SqliteLedger`."""
        self._path, self._note, self._keep_alive, self.waits = path, note, keep_alive, True
        try:
            self.connection = sqlite3.connect(path, isolation_level=None, timeout=_LOOK_S)
        except sqlite3.Error as error:
            raise storage_error("cannot open the ledger", path, error) from error

    @contextmanager
    def opened(self) -> Iterator[None]:
        """A ledger of this version, in which the block reads; closed if that cannot be."""
        try:
            self._unlocked(self._prepare)
            yield
        except sqlite3.Error as error:
            self.connection.close()
            raise self._failed("cannot open the ledger", error) from error
        except LedgerError:
            self.connection.close()
            raise

    def _prepare(self) -> None:
        is_new = queries.is_empty_database(self.connection, self._path)
        version = SCHEMA_VERSION if is_new else queries.check_identity(self.connection, self._path)
        for pragma in ("journal_mode = WAL", "synchronous = FULL", "foreign_keys = ON"):
            self.connection.execute(f"PRAGMA {pragma}")
        if is_new:
            self.connection.executescript(f"BEGIN IMMEDIATE;\n{SCHEMA}\nCOMMIT;")
        elif version < SCHEMA_VERSION:
            self.connection.executescript(f"BEGIN IMMEDIATE;\n{upgrade_from(version)}\nCOMMIT;")
        elif not queries.has_scores_view(self.connection):
            self.connection.executescript(
                f"BEGIN IMMEDIATE;\nDROP VIEW IF EXISTS scores;\n{SCORES_VIEW};\nCOMMIT;"
            )
        self.connection.executescript(INDEXES)

    def insert_all(self, table: str, rows: Sequence[Mapping[str, object]]) -> None:
        """Insert rows that all have the same columns."""
        for columns in rows[:1]:
            marks = ", ".join(f":{column}" for column in columns)
            statement = f"INSERT INTO {table} ({', '.join(columns)}) VALUES ({marks})"
            self.connection.executemany(statement, rows)

    @contextmanager
    def reading(self) -> Iterator[None]:
        """Raises LedgerError for a damaged file, and StoreError for one that cannot be read."""
        try:
            yield
        except sqlite3.Error as error:
            raise self._failed("the ledger cannot be read", error) from error

    def _failed(self, what: str, error: sqlite3.Error) -> StoreError:
        if queries.is_damage(error):
            return queries.damaged(self._path, error)
        return storage_error(what, self._path, error)

    def _unlocked(self, act: Callable[[], object]) -> None:
        """Do what needs a lock, which may be done again while another program holds it."""
        told = False
        while True:
            try:
                act()
                break
            except sqlite3.OperationalError as error:
                if not (self.waits and queries.is_locked(error)):
                    raise
            if not told:
                self._note(
                    f"{self._path} is locked by another program, such as a viewer or a backup: the run waits "
                    "until it is released, and is paid for meanwhile. Close that program."
                )
                told = True
            self._keep_alive()
        if told:
            self._note(f"{self._path} is released: the run goes on")

    @contextmanager
    def transaction(self, what: str) -> Iterator[None]:
        """All or nothing of it is on disk; raises LedgerError if it breaks the accounting, or StoreError."""
        try:
            self._unlocked(lambda: self.connection.execute("BEGIN IMMEDIATE"))
            yield
            self._unlocked(lambda: self.connection.execute("COMMIT"))
        except sqlite3.IntegrityError as error:
            self._abandon()
            raise LedgerError(f"{self._path}: {what}: breaks the accounting: {error}") from error
        except sqlite3.Error as error:
            self._abandon()
            raise self._failed(f"the ledger cannot take {what}", error) from error
        except BaseException:
            self._abandon()
            raise

    def _abandon(self) -> None:
        if self.connection.in_transaction:
            self.connection.execute("ROLLBACK")
