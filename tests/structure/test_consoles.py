"""What commands print is text, not markup: a prompt with ``[/]`` would end them with a traceback."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest
from scripts.measure_structure import packages_of

ROOT = Path(__file__).parents[2]
CONSOLES = {
    f"{path.relative_to(ROOT)}:{node.lineno}": node
    for package in packages_of(ROOT)
    for path in sorted(package.rglob("*.py"))
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id.endswith("Console")
}


@pytest.mark.parametrize("where", CONSOLES)
def test_no_console_reads_markup(where: str) -> None:
    given = {each.arg: ast.unparse(each.value) for each in CONSOLES[where].keywords}
    # The one that records for a notebook passes markup=False to `print` instead.
    assert given.get("markup") == "False" or "record" in given
