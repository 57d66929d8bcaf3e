"""Benchmarks leave no folder behind, but the runs of one that failed."""

from __future__ import annotations

import ast
import tempfile
from pathlib import Path

import pytest
from benchmarks._places import place_for_runs

ROOT = Path(__file__).parents[2]


def test_runs_stay_where_they_are_wanted_or_needed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with place_for_runs(tmp_path / "given", "x-") as given, place_for_runs(None, "x-") as own:
        (own / "run").mkdir()
    assert given.is_dir()
    assert not own.exists()
    with pytest.raises(ValueError, match="of the run"), place_for_runs(None, "x-") as own:
        raise ValueError("of the run")
    assert own.is_dir()
    assert str(own) in capsys.readouterr().out


@pytest.mark.parametrize(
    "path",
    [path for folder in ("benchmarks", "scripts", "tools") for path in sorted((ROOT / folder).rglob("*.py"))],
    ids=lambda path: path.stem,
)
def test_who_makes_a_folder_removes_it(path: Path) -> None:
    names = [
        node.attr if isinstance(node, ast.Attribute) else node.id
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Attribute | ast.Name)
    ]
    assert names.count("rmtree") >= names.count("mkdtemp")
