"""Write the tables of ``ledger.sqlite`` into their page, from the statements that make them.

python -m scripts.ledger_table
"""

from __future__ import annotations

import re
import sqlite3
from contextlib import closing
from pathlib import Path

from scripts.marked_part import write_part
from spotlight.store.ledger.ledger_schema import SCHEMA

PAGE = Path(__file__).resolve().parent.parent / "docs" / "howto" / "query-the-ledger.md"
MARK = "tables: written by scripts/ledger_table.py"
_TABLE = re.compile(r"((?:^--[^\n]*\n)*)^CREATE (?:TABLE|VIEW) (\w+)", re.MULTILINE)


def table() -> str:
    """A row for each table or view: its columns, and what the statement's comment says."""
    lines = ["| table | columns | |", "|---|---|---|"]
    with closing(sqlite3.connect(":memory:")) as connection:
        connection.executescript(SCHEMA)
        for comment, name in _TABLE.findall(SCHEMA):
            columns = [row[1] for row in connection.execute(f"PRAGMA table_info({name})")]
            said = " ".join(line.removeprefix("--").strip() for line in comment.splitlines())
            lines.append(f"| `{name}` | {', '.join(f'`{each}`' for each in columns)} | {said} |")
    return "\n".join([*lines, ""])


def main() -> None:
    """Write the table into the page."""
    write_part(PAGE, MARK, table())


if __name__ == "__main__":
    main()
