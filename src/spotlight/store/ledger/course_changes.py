"""From which iteration on a run had which values of its configuration's keys, read from the ledger."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Sequence
from dataclasses import dataclass

from spotlight.store.ledger.ledger_queries import consistent_reading, has_table
from spotlight.store.run_directory import ABSENT


@dataclass(frozen=True, slots=True)
class CourseChange:
    """Another value of a key, from an iteration on.

    Attributes:
        position: the ledger's, before the iteration's first record.
        was, now: :data:`~spotlight.store.run_directory.ABSENT` where the key has none.
    """

    iteration: int
    position: int
    key: str
    was: object
    now: object

    @property
    def words(self) -> str:
        """``learner.learning_rate 0.0003 to 0.0001``; of a fork, whose."""
        if self.key == "name":
            return f"forked from {self.was}"
        return f"{self.key} {_shown(self.was)} to {_shown(self.now)}"


def _shown(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def read_course(connection: sqlite3.Connection, since: int = 0) -> tuple[CourseChange, ...]:
    """Changes from the position ``since`` on, the oldest first; an older version recorded none."""
    if not has_table(connection, "course_changes"):
        return ()
    with consistent_reading(connection):
        rows = connection.execute(
            "SELECT iteration, position, key, was, now FROM course_changes WHERE position >= ? ORDER BY id",
            (since,),
        )
        return tuple(
            CourseChange(*where, *(ABSENT if text is None else json.loads(text) for text in values))
            for *where, was, now in rows
            for values in ((was, now),)
        )


def values_before(connection: sqlite3.Connection, position: int) -> dict[str, object]:
    """Values that keys had before a run that resumes at ``position`` changed them, there or later."""
    return {change.key: change.was for change in reversed(read_course(connection, position))}


def changes_by_iteration(changes: Sequence[CourseChange]) -> dict[int, list[str]]:
    """In words, by the iteration from which on."""
    found: dict[int, list[str]] = {}
    for change in changes:
        found.setdefault(change.iteration, []).append(change.words)
    return found


def course_words(changes: Sequence[CourseChange]) -> list[str]:
    """A sentence for each iteration at which something changed."""
    changed = changes_by_iteration(changes).items()
    return [f"from iteration {iteration} on: {'; '.join(words)}" for iteration, words in changed]
