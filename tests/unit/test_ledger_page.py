"""The page on the ledger: its queries run on a real one, and its tables are the schema's."""

from __future__ import annotations

import re
import sqlite3
import tarfile
from contextlib import closing
from pathlib import Path

import pytest
from scripts import ledger_table
from scripts.marked_part import read_part

from spotlight.store.ledger.ledger_schema import upgrade_from

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "howto" / "query-the-ledger.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```(\w+)\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
QUERIES = [block for language, block in BLOCKS if language == "sql"]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A run that was trained, its ledger of today's schema, as ``runs/demo``."""
    with tarfile.open(ROOT / "tests" / "contract" / "run-0.1.0.tar.gz") as archive:
        archive.extractall(tmp_path / "runs", filter="data")
    (tmp_path / "runs" / "old").rename(tmp_path / "runs" / "demo")
    with closing(sqlite3.connect(tmp_path / "runs" / "demo" / "ledger.sqlite")) as ledger:
        (version,) = ledger.execute("PRAGMA user_version").fetchone()
        ledger.executescript(upgrade_from(version))
    return tmp_path


def test_its_queries_answer_on_a_real_ledger(folder: Path) -> None:
    prompts, dollars, curves = QUERIES
    with closing(sqlite3.connect(folder / "runs" / "demo" / "ledger.sqlite")) as ledger:
        assert [row[3] for row in ledger.execute(prompts)] == [4, 4]
        found = ledger.execute(dollars)
        assert [column[0] for column in found.description] == ["phase", "gpu_h", "usd"]
        assert {row[0] for row in found} >= {"rollout", "training"}
        names = [(iteration, name) for iteration, name, _ in ledger.execute(curves)]
        assert names == [(0, each) for each in ("reward", "shapes", "shapes/graded", "shapes/strict")]


@pytest.mark.slow
def test_its_pandas_gives_a_column_a_curve(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("pandas")
    monkeypatch.chdir(folder)
    names: dict[str, object] = {"query": QUERIES[2]}
    for language, block in BLOCKS:
        if language == "python":
            exec(block, names)  # the page's own lines, one after the other
    assert list(names["curves"]) == ["reward", "shapes", "shapes/graded", "shapes/strict"]  # type: ignore[call-overload]


def test_its_tables_are_the_schemas() -> None:
    shown = read_part(ledger_table.PAGE, ledger_table.MARK)
    assert shown == ledger_table.table(), "run python -m scripts.ledger_table"
