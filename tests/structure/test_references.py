"""What docstrings refer to (``:class:`Name```, ``:mod:`.module```) is there."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
ROLE = re.compile(r":(?:mod|class|func|meth|attr|data):`~?([\w.]+)`")


@cache
def modules() -> Mapping[str, str]:
    """Sources of all packages by the module's name; a package's own ends in ``.``, as relative names need."""
    found = {}
    for root in (ROOT / "src", *(ROOT / "packages").glob("*/src")):
        for file in root.rglob("*.py"):
            name = ".".join(file.relative_to(root).with_suffix("").parts).removesuffix("__init__")
            found[name] = file.read_text(encoding="utf-8")
    return found


@cache
def bound(source: str) -> frozenset[str]:
    """Names that a module defines or imports, at any depth."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
                names.add(name)
            case ast.alias(name=name, asname=other):
                names.add((other or name).rpartition(".")[2])
            case ast.Name(id=name, ctx=ast.Store()) | ast.Attribute(attr=name, ctx=ast.Store()):
                names.add(name)
    return frozenset(names)


@cache
def everywhere() -> frozenset[str]:
    return frozenset[str]().union(*map(bound, modules().values()))


def absent(module: str, source: str) -> Iterator[str]:
    """What a module's docstrings refer to and no module of ours has."""
    sources = {name.removesuffix("."): text for name, text in modules().items()}
    for name in ROLE.findall(source):
        full = module.rpartition(".")[0] + name if name.startswith(".") else name
        where = full
        while where and where not in sources:
            where = where.rpartition(".")[0]
        if where not in sources:
            ours = full.partition(".")[0] in sources or "." not in full
            lacks = ours and full.partition(".")[0] not in everywhere()
        else:
            inside = full[len(where) + 1 :].partition(".")[0]
            lacks = bool(inside) and inside not in bound(sources[where])
        if lacks:
            yield name


@pytest.mark.parametrize(
    ("source", "found"),
    [
        (":func:`plain_name_of_nothing`", ["plain_name_of_nothing"]),
        (":mod:`spotlight.report.gone`", ["spotlight.report.gone"]),
        (":mod:`.gone`", [".gone"]),
        (":class:`~spotlight.report.record.Gone`", ["spotlight.report.record.Gone"]),
        (":class:`spotlight.report.record.RunRecord`, :mod:`.record`, :class:`torch.Tensor`", []),
    ],
)
def test_a_reference_to_nothing_is_found(source: str, found: list[str]) -> None:
    assert list(absent("spotlight.report.model_card", source)) == found


def test_all_references_of_docstrings_lead_somewhere() -> None:
    assert not {name: found for name, source in modules().items() if (found := [*absent(name, source)])}
