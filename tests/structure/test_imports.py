"""Who may import whom, and what must start without torch: the plan of the house, checked."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest
from tests.structure.import_table import (
    ALSO,
    BASICS,
    FOR_ALL,
    FOR_INNER_ROOMS,
    FROM_TRAINER,
    HEAVY,
    HOLD_MODELS,
    INNER_ROOMS,
    LIGHT,
    MAY_IMPORT,
    MEASURE,
    MEASURE_CARDS,
    MESSAGES,
    NEED_RAY,
    PACKAGES,
    PACKAGES_MAY_IMPORT,
    SCHEDULER_PARTS,
    SOURCE,
    SOURCES,
    SPEAK_MESSAGES,
    STARTS,
    USE_FILES,
    USE_FLEET,
    USE_KERNELS,
    USE_REWARDS,
    USE_WEIGHTS,
)


@cache
def nodes_of(path: Path) -> list[ast.AST]:
    """What a file imports, and its classes."""
    wanted = (ast.Import, ast.ImportFrom, ast.ClassDef)
    tree = ast.parse(path.read_text(encoding="utf-8"))
    return [node for node in ast.walk(tree) if isinstance(node, wanted)]


def files_of(package: str) -> Iterator[tuple[Path, str]]:
    """Every file of a package with its room: of the trainer a folder, else the package."""
    source = SOURCES[package]
    for path in sorted(source.rglob("*.py")):
        parts = path.relative_to(source).parts
        if package != "spotlight":
            yield path, f"{package}.commands" if parts[0] == "commands" else package
        elif len(parts) > 1:
            yield path, parts[0]


def imports_of(path: Path) -> Iterator[tuple[int, str]]:
    """Every module a file imports anywhere, functions and type checking included, with the line."""
    for node in nodes_of(path):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f"{path}:{node.lineno}: a relative import"
            module = node.module or ""
            # `from spotlight import core` names the room after `import`.
            names = [f"{module}.{alias.name}" for alias in node.names] if module == "spotlight" else [module]
            yield from ((node.lineno, name) for name in names)


def allowed(room: str, module: str) -> bool:
    package, _, rest = module.partition(".")
    own = room.split(".")[0] if room.startswith("spotlight_") else "spotlight"
    if package not in SOURCES or package == own != "spotlight":
        return True
    if package != own and package not in PACKAGES_MAY_IMPORT[own]:
        return False
    if package == "spotlight_kernels":
        measures = room in MEASURE and module.startswith("spotlight_kernels.measure.")
        return room in USE_KERNELS or measures or room == "spotlight_plan.commands"
    if package == "spotlight_files":
        return own != "spotlight" or room in USE_FILES
    if package == "spotlight_weights":
        return own == "spotlight" and room in USE_WEIGHTS
    if package == "spotlight_fleet":
        return own != "spotlight" or room in USE_FLEET
    if package != "spotlight":
        return own != "spotlight" or module.startswith(BASICS) or room in USE_REWARDS
    target = rest.split(".")[0]
    if target in {"", room, "__version__", *FOR_ALL} or room.endswith(".commands"):
        return True
    if (module in MESSAGES and room in SPEAK_MESSAGES) or (room, module) in ALSO:
        return True
    return target in (MAY_IMPORT[room] if own == "spotlight" else FROM_TRAINER[own])


def test_rooms_import_only_what_the_architecture_allows() -> None:
    found = [
        f"{path}:{line} imports {module}"
        for package in SOURCES
        for path, room in files_of(package)
        for line, module in imports_of(path)
        if not allowed(room, module)
    ]
    assert not found, "\n".join(found)


@pytest.mark.parametrize("room", INNER_ROOMS)
def test_inner_rooms_import_only_what_the_architecture_allows(room: str) -> None:
    inner = INNER_ROOMS[room]
    source = SOURCES.get(room, SOURCE / room)
    prefix = room if room in SOURCES else f"spotlight.{room}"
    found = []
    for path in sorted(source.rglob("*.py")):
        name = path.relative_to(source).with_suffix("").parts[0]
        if name in {"__init__", "commands"}:
            continue
        assert name in inner, f"{room}/{name} is not on the plan"
        for line, module in imports_of(path):
            target = module.removeprefix(f"{prefix}.").split(".")[0]
            if module.startswith(f"{prefix}.") and target not in inner[name] | {
                name,
                *FOR_INNER_ROOMS.get(room, ()),
            }:
                found.append(f"{path}:{line} imports {module}")
    assert not found, "\n".join(found)


@pytest.mark.parametrize(
    "plan", [PACKAGES_MAY_IMPORT, MAY_IMPORT, *INNER_ROOMS.values()], ids=["packages", "rooms", *INNER_ROOMS]
)
def test_no_plan_has_cycles(plan: dict[str, set[str]]) -> None:
    settled: set[str] = set()
    while len(settled) < len(plan):
        free = {room for room, imports in plan.items() if room not in settled and imports <= settled}
        assert free, f"cycle among {set(plan) - settled}"
        settled |= free


def scheduler_part(module: str) -> str:
    """Which line of :data:`SCHEDULER_PARTS` a module of the scheduler belongs to."""
    name = module.removeprefix("spotlight.scheduler.").split(".")[0]
    return name if name in SCHEDULER_PARTS else "messages"


def scheduler_imports() -> dict[str, set[str]]:
    """Every module of the scheduler, with the scheduler's modules that it imports."""
    found: dict[str, set[str]] = {}
    for path in sorted((SOURCE / "scheduler").rglob("*.py")):
        module = ".".join(("spotlight", *path.relative_to(SOURCE).with_suffix("").parts))
        named = {name for _, name in imports_of(path)}
        if "spotlight.scheduler" in named:  # from spotlight.scheduler import events as ev
            named |= {f"spotlight.scheduler.{one}" for one in ("effects", "events")}
        found[module] = {name for name in named if name.startswith("spotlight.scheduler.")}
    return found


def test_inside_the_scheduler_parts_import_only_what_the_table_allows() -> None:
    found = [
        f"{module} imports {name}"
        for module, names in scheduler_imports().items()
        for name in sorted(names)
        if scheduler_part(name) not in {scheduler_part(module), *SCHEDULER_PARTS[scheduler_part(module)]}
    ]
    assert not found, "\n".join(found)


def test_a_policy_imports_no_other_policy() -> None:
    found = []
    for module, names in scheduler_imports().items():
        folder = ".".join(module.split(".")[:4])
        if module.startswith("spotlight.scheduler.policies."):
            # Modules beside the policies' folders are what several of them use.
            others = (
                name
                for name in names
                if name.startswith("spotlight.scheduler.policies.") and name.count(".") > 3
            )
            found += [f"{module} imports {name}" for name in others if not name.startswith(f"{folder}.")]
    assert not found, "\n".join(found)


def test_no_modules_of_the_scheduler_import_each_other_in_a_circle() -> None:
    imports = scheduler_imports()
    settled: set[str] = set()
    while len(settled) < len(imports):
        free = {module for module, names in imports.items() if module not in settled and names <= settled}
        assert free, f"circle among {sorted(set(imports) - settled)}"
        settled |= free


def test_every_room_is_on_the_plan() -> None:
    rooms = {path.parent.name for path in SOURCE.glob("*/__init__.py")}
    assert rooms <= set(MAY_IMPORT)
    assert {path.name for path in SOURCE.glob("*.py")} <= {
        "__init__.py",
        "__main__.py",
        *(f"{module}.py" for module in FOR_ALL),
    }


@pytest.mark.parametrize(
    ("room", "module"),
    [
        ("scheduler", "spotlight.runtime.inline"),
        ("scheduler", "spotlight_rewards.pool.reward_pool"),
        ("store", "spotlight.config"),
        ("spotlight_rewards", "spotlight.scheduler.types"),
        ("spotlight_rewards.commands", "spotlight.cli.options"),
        ("spotlight_dashboard", "spotlight.runtime.run"),
        ("cli", "spotlight_plan.prices.quotes"),
    ],
)
def test_the_check_itself_sees_a_forbidden_import(room: str, module: str) -> None:
    assert not allowed(room, module)


def modules_of(name: str) -> list[str]:
    """Those of a package or room that start without a model."""
    package, _, room = name.partition(".")
    source = SOURCES[package]
    modules = [
        ".".join((package, *path.relative_to(source).with_suffix("").parts)).removesuffix(".__init__")
        for path in sorted((source / room).rglob("*.py"))
        if path.stem != "__main__"
    ]
    return [
        module
        for module in modules
        if module not in {*HOLD_MODELS, *NEED_RAY} and not module.startswith(MEASURE_CARDS)
    ]


@pytest.fixture(scope="module")
def dragged_in() -> dict[str, list[str]]:
    """Heavy packages that each light room, then each statement of :data:`STARTS` is the first to import.

    In one process, the lightest first: none of them could hide in what one before it had imported.
    """
    lines = ["import json, sys", "found, known = {}, set()"]
    steps = {room: "import " + ", ".join(modules_of(room)) for room in LIGHT}
    for name, statement in (steps | {name: statement for name, (statement, _) in STARTS.items()}).items():
        lines += [statement, f"found[{name!r}] = sorted(({set(HEAVY)!r} - known) & sys.modules.keys())"]
        lines.append(f"known |= set(found[{name!r}])")
    program = "\n".join([*lines, "print(json.dumps(found))"])
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    found: dict[str, list[str]] = json.loads(done.stdout.splitlines()[-1])
    return found


@pytest.mark.parametrize("room", LIGHT)
def test_deciding_planning_and_bookkeeping_start_without_torch(
    dragged_in: dict[str, list[str]], room: str
) -> None:
    assert dragged_in[room] == [], f"{room} drags in heavy packages"


@pytest.mark.parametrize("what", STARTS)
def test_it_starts_without_the_packages_that_it_does_not_need(
    dragged_in: dict[str, list[str]], what: str
) -> None:
    assert not set(dragged_in[what]) & set(STARTS[what][1])


def test_a_name_is_used_once() -> None:
    """A reader who searches for a class or a module of a package finds one."""
    for package, source in SOURCES.items():
        where: dict[str, list[str]] = {}
        for path in sorted(source.rglob("*.py")):
            place = str(path.relative_to(source))
            if path.name not in {"__init__.py", "__main__.py"}:
                where.setdefault(path.name, []).append(place)
            for node in nodes_of(path):
                if isinstance(node, ast.ClassDef):
                    where.setdefault(node.name, []).append(f"{place}:{node.lineno}")
        assert not {name: places for name, places in where.items() if len(places) > 1}, package


def test_no_folder_is_a_drawer() -> None:
    for package, source in SOURCES.items():
        # A package of its own has no rooms above its files.
        most = 14 if package == "spotlight" else 20
        counts = Counter(path.parent for path in source.rglob("*.py") if path.name != "__init__.py")
        assert not {str(folder): number for folder, number in counts.items() if number > most}


def test_the_packages_have_one_version() -> None:
    assert len({package.__version__ for package in PACKAGES}) == 1
