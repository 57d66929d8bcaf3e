"""No file is read or written in the encoding of whoever runs it."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SHIPPED = ("src", "packages", "scripts", "benchmarks", "tools", "examples")
RUNS = {"run", "Popen", "call", "check_call", "check_output"}


def texts_without_encoding(source: str) -> Iterator[int]:
    """Lines of calls that ruff's PLW1514 misses: on what it cannot tell to be a path, and of processes."""
    for call in ast.walk(ast.parse(source)):
        match call:
            case ast.Call(func=ast.Attribute(attr="read_text"), args=[]):
                bound: set[str] = set()
            case ast.Call(func=ast.Attribute(attr="write_text"), args=[_]):
                bound = set()
            case ast.Call(func=ast.Attribute(attr="open"), args=[ast.Constant(value=str(mode))]) if (
                "b" not in mode
            ):
                bound = set()
            case ast.Call(func=ast.Attribute(attr=name)) if name in RUNS:
                bound = {"text", "universal_newlines"}
            case _:
                continue
        given = {keyword.arg for keyword in call.keywords}
        if "encoding" not in given and (not bound or bound & given):
            yield call.lineno


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ("path.read_text()", [1]),
        ("path.write_text('a', errors='replace')", [1]),
        ("path.open('a')", [1]),
        ("subprocess.run(a, text=True)", [1]),
        ("path.read_text(encoding='utf-8')", []),
        ("path.open('rb')", []),
        ("subprocess.run(a, capture_output=True)", []),
    ],
)
def test_such_calls_are_found(source: str, found: list[int]) -> None:
    assert list(texts_without_encoding(source)) == found


def test_every_text_that_is_read_or_written_says_its_encoding() -> None:
    found = [
        f"{file.relative_to(ROOT)}:{line}"
        for folder in SHIPPED
        for file in (ROOT / folder).rglob("*.py")
        for line in texts_without_encoding(file.read_text(encoding="utf-8"))
    ]
    assert not found
