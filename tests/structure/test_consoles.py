"""What commands print is text, not markup: a prompt with ``[/]`` would end them with a traceback."""

from __future__ import annotations

import ast
import io
from pathlib import Path

from rich.table import Table
from scripts.measure_structure import packages_of

from spotlight_rewards.base.terminal import TextConsole, progress_bar

ROOT = Path(__file__).parents[2]


def _makes_a_console(node: ast.AST) -> bool:
    if isinstance(node, ast.Call):
        return ast.unparse(node.func).rpartition(".")[2] == "Console"
    if isinstance(node, ast.ClassDef):
        return "Console" in map(ast.unparse, node.bases)
    return isinstance(node, ast.alias) and node.name == "Console" and node.asname is not None


def test_every_console_prints_texts_as_they_are() -> None:
    made = {
        path.name
        for package in packages_of(ROOT)
        for path in package.rglob("*.py")
        if any(map(_makes_a_console, ast.walk(ast.parse(path.read_text(encoding="utf-8")))))
    }
    assert made == {"terminal.py"}


def test_neither_markup_nor_emoji_is_read() -> None:
    text = "a [bold]cat[/x] :cat: of 12\x1b[2J"
    table = Table("prompt")
    table.add_row(text)
    console = TextConsole(file=io.StringIO(), width=80)
    console.print(text)
    console.print(table)
    with progress_bar(TextConsole(file=io.StringIO(), width=200, force_terminal=True)) as bar:
        bar.add_task(text, total=1)
        console.print(*bar.get_renderables())
    assert console.file.getvalue().count("a [bold]cat[/x] :cat: of 12\\x1b[2J") == 3  # type: ignore[attr-defined]
