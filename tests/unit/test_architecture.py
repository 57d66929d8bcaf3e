"""Who may import whom, and what must start without torch: the plan of the house, checked."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import spotlight

SOURCE = Path(spotlight.__file__).parent

ALL = {"config", "core", "diffusion", "algorithms", "models", "rewards", "rollout", "training"}
ALL |= {"fleet", "store", "runtime", "report", "testbed", "simulation", "weights"}

MAY_IMPORT: dict[str, set[str]] = {
    "config": set(),
    "core": {"config"},
    "diffusion": set(),
    "algorithms": {"diffusion"},
    "models": {"diffusion"},
    "rewards": set(),
    "rollout": {"models", "diffusion"},
    "training": {"models", "algorithms", "diffusion"},
    "fleet": {"core"},
    "store": {"core"},
    "weights": set(),
    "testbed": {"rewards"},
    "report": {"store", "config", "testbed"},
    "runtime": ALL - {"report", "runtime", "simulation"},
    "simulation": {"core", "fleet", "config"},
    "cli": ALL,
}

NOUNS = "spotlight.core.types"
"""Ids and sizes, which flow through every room that moves rollouts."""
MAY_USE_NOUNS = {"rollout", "training", "report"}

MESSAGES = {"spotlight.core.effects", "spotlight.core.events"}
"""What the controller and workers say to each other: a worker obeys effects and answers with events."""

LIGHT = ("config", "core", "fleet", "rewards", "simulation", "store")
HEAVY = ("torch", "diffusers", "transformers", "peft", "accelerate", "ray")


def imports_of(path: Path) -> Iterator[tuple[int, str]]:
    """Every module a file imports anywhere, functions and type checking included, with the line."""
    package = ["spotlight", *path.relative_to(SOURCE).parent.parts]
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            origin = package[: len(package) + 1 - node.level] if node.level else []
            module = ".".join([*origin, *([node.module] if node.module else [])])
            # `from spotlight import core` names the room after `import`.
            names = [f"{module}.{alias.name}" for alias in node.names] if module == "spotlight" else [module]
            yield from ((node.lineno, name) for name in names)


def allowed(room: str, module: str) -> bool:
    parts = module.split(".")
    if parts[0] != "spotlight" or len(parts) == 1 or parts[1] in {room, "__version__"}:
        return True
    if module in MESSAGES and room == "rollout":
        return True
    return parts[1] in MAY_IMPORT[room] or (module == NOUNS and room in MAY_USE_NOUNS)


def test_rooms_import_only_what_the_architecture_allows() -> None:
    found = [
        f"{path.relative_to(SOURCE)}:{line} imports {module}"
        for path in sorted(SOURCE.rglob("*.py"))
        if path.parent != SOURCE
        for line, module in imports_of(path)
        if not allowed(path.relative_to(SOURCE).parts[0], module)
    ]
    assert not found, "\n".join(found)


def test_every_room_is_on_the_plan() -> None:
    rooms = {path.parent.name for path in SOURCE.glob("*/__init__.py")}
    assert rooms <= set(MAY_IMPORT)
    assert {path.name for path in SOURCE.glob("*.py")} <= {"__init__.py", "__main__.py"}


def test_the_plan_has_no_cycles() -> None:
    settled: set[str] = set()
    while len(settled) < len(MAY_IMPORT):
        free = {room for room, imports in MAY_IMPORT.items() if room not in settled and imports <= settled}
        assert free, f"cycle among {set(MAY_IMPORT) - settled}"
        settled |= free


@pytest.mark.parametrize(
    ("room", "module"),
    [
        ("core", "spotlight.runtime.inline"),
        ("rewards", "spotlight.core.types"),
        ("store", "spotlight.config"),
    ],
)
def test_the_check_itself_sees_a_forbidden_import(room: str, module: str) -> None:
    assert not allowed(room, module)


@pytest.mark.parametrize("room", LIGHT)
def test_deciding_planning_and_bookkeeping_start_without_torch(room: str) -> None:
    modules = [
        ".".join(("spotlight", *path.relative_to(SOURCE).with_suffix("").parts)).removesuffix(".__init__")
        for path in sorted((SOURCE / room).rglob("*.py"))
        if path.stem != "__main__"
    ]
    program = (
        f"import importlib, sys\n"
        f"for module in {modules!r}: importlib.import_module(module)\n"
        f"print(*sorted(set({HEAVY!r}) & set(sys.modules)))"
    )
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert result.stdout.split() == [], f"spotlight.{room} drags in heavy packages"
