"""Installed as ``sitecustomize`` by ``measure_structure.py --walk``: marks every function of the packages.

While a file ``on`` and no file ``off`` lies in the folder ``WALK_FLAGS``, each process writes there into
``PID.ran`` the files of the packages ``WALK_PACKAGES`` in which a function is called, and into ``PID.passed``
those in which a function is given a rollout: its id, or a tensor of more than two dimensions (latents,
pictures), also inside of what it is given.
"""

from __future__ import annotations

import ast
import builtins
import dataclasses
import os
import re
import time
from collections.abc import Mapping
from importlib.machinery import SourceFileLoader
from pathlib import Path
from typing import Any

FLAGS, PACKAGES = Path(os.environ["WALK_FLAGS"]), tuple(os.environ["WALK_PACKAGES"].split(os.pathsep))
ROLLOUT = re.compile(r"t[0-9]{6}-[0-9]{3}-[0-9]{3}")
DEPTH = 6
ITEMS = 20
"""How many items of a collection are looked at."""
REFRESH_S = 0.02

seen: dict[str, set[str]] = {"ran": set(), "passed": set()}
looked = (0.0, False)


def walked(file: str, arguments: list[object]) -> None:
    """A function of ``file`` was called."""
    global looked
    now = time.monotonic()
    if now > looked[0] + REFRESH_S:
        looked = (now, (FLAGS / "on").exists() and not (FLAGS / "off").exists())
    if not looked[1]:
        return
    if file not in seen["ran"]:
        note("ran", file)
    if file not in seen["passed"] and carries(arguments, DEPTH):
        note("passed", file)


def note(kind: str, file: str) -> None:
    """Write a file's name down, once per process."""
    seen[kind].add(file)
    with (FLAGS / f"{os.getpid()}.{kind}").open("a", encoding="utf-8") as lines:
        lines.write(f"{file}\n")


def carries(value: Any, depth: int) -> bool:
    """Whether a value is a rollout's id or tensor, or holds one."""
    if isinstance(value, str):
        return ROLLOUT.match(value) is not None
    if isinstance(value, bytes | bytearray):
        return ROLLOUT.search(value.decode("latin-1")) is not None
    if hasattr(value, "shape") and hasattr(value, "dtype"):
        return len(value.shape) > 2
    inside: list[object] = []
    if dataclasses.is_dataclass(value):
        inside = [getattr(value, field.name, None) for field in dataclasses.fields(value)]
    elif isinstance(value, Mapping):
        inside = [*list(value)[:ITEMS], *list(value.values())[:ITEMS]]
    elif isinstance(value, list | tuple | set | frozenset):
        inside = list(value)[:ITEMS]
    return depth > 0 and any(carries(one, depth - 1) for one in inside)


def marked(self: SourceFileLoader, name: str) -> Any:
    """A module's code: of the package's with a mark in every function, and never from the bytecode cache."""
    path = self.get_filename(name)
    if not path.startswith(PACKAGES):
        return plain(self, name)
    tree = ast.parse(self.get_data(path))
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            documented = isinstance(node.body[0], ast.Expr) and isinstance(node.body[0].value, ast.Constant)
            given = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
            given += [node.args.vararg] if node.args.vararg else []
            names = ", ".join(one.arg for one in given if one.arg not in ("self", "cls"))
            mark = ast.parse(f"__walked__({path!r}, [{names}])").body[0]
            node.body.insert(int(documented), mark)
    return compile(ast.fix_missing_locations(tree), path, "exec", dont_inherit=True)


plain = SourceFileLoader.get_code
builtins.__walked__ = walked  # type: ignore[attr-defined]
SourceFileLoader.get_code = marked  # type: ignore[method-assign, assignment]
