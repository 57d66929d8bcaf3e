"""How large packages and documentation are, and how many files a rollout passes.

    python scripts/measure_structure.py                 # sizes, names that occur twice, long functions
    python scripts/measure_structure.py --walk          # files that a rollout passes during one iteration
    python scripts/measure_structure.py --root OTHER    # of another checkout

``--walk`` trains three iterations of the embedded default in one process and on an emulated Ray cluster, with
a mark in every function, and lists two kinds of files of the packages while the second iteration ran:
those in which a function was given a rollout of it (its id, or a tensor of more than two dimensions, also
inside of what it was given: ``walk_hook.py``), and all in which any function was called. Start-up,
evaluations, pictures of training groups and the export are left out. Code lines leave out docstrings,
comments and blank lines.
"""

from __future__ import annotations

import argparse
import ast
import io
import json
import os
import shutil
import subprocess
import sys
import tempfile
import textwrap
import time
import tokenize
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path

LONG = 50
"""Lines past which a function counts as long."""

HOOK = Path(__file__).with_name("walk_hook.py")
DRIVERS = ("inline", "ray")
KINDS = {"passed": "files that a rollout passes", "ran": "files in which a function runs"}


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--root", type=Path, default=Path(__file__).parents[1], help="the checkout to measure"
    )
    parser.add_argument("--walk", action="store_true", help="count the files that a rollout passes, too")
    parser.add_argument("--driver", action="append", choices=DRIVERS, help="of the walk; both by default")
    parser.add_argument("--json", type=Path, help="write the figures here, too")
    options = parser.parse_args()
    packages = packages_of(options.root)
    figures: dict[str, object] = {}
    for package in packages:
        for name, figure in measure(package):
            figures[f"{package.name}: {name}"] = figure
            print(f"{package.name + ': ' + name:62} {figure}")
    figures["documentation words"] = documentation_words(options.root)
    print(f"{'documentation words (README.md, docs)':62} {figures['documentation words']}")
    if options.walk:
        for driver in options.driver or DRIVERS:
            for kind, files in walk(packages, driver).items():
                figures[f"{KINDS[kind]}, {driver}"] = len(files)
                print(f"\n{KINDS[kind]}, {driver}: {len(files)}")
                print(textwrap.indent("\n".join(files), "  "))
    if options.json is not None:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps(figures, indent=2) + "\n", encoding="utf-8")


def packages_of(root: Path) -> list[Path]:
    """The folders of a checkout's packages, the trainer first."""
    return [
        (root / "src" / "spotlight").resolve(),
        *sorted(path.parent for path in root.resolve().glob("packages/*/src/*/__init__.py")),
    ]


def documentation_words(root: Path) -> int:
    """Of the README and ``docs``, tables' bars and code included, as ``wc -w`` counts them."""
    pages = [root / "README.md", *(root / "docs").rglob("*.md")]
    return sum(len(page.read_text(encoding="utf-8").split()) for page in pages)


def measure(package: Path) -> Iterator[tuple[str, int]]:
    """Sizes by name."""
    counts: Counter[str] = Counter()
    classes: dict[str, int] = defaultdict(int)
    modules: dict[str, int] = defaultdict(int)
    folders: Counter[Path] = Counter()
    rooms: Counter[str] = Counter()
    long = 0
    for path in package.rglob("*.py"):
        text = path.read_text(encoding="utf-8")
        tree = ast.parse(text)
        if path.name != "__init__.py":
            modules[path.name] += 1
            folders[path.parent] += 1
        documented: set[int] = set()
        for node in ast.walk(tree):
            body = getattr(node, "body", None)
            for statement in body if isinstance(body, list) else []:
                text_of = statement.value if isinstance(statement, ast.Expr) else None
                if isinstance(text_of, ast.Constant) and isinstance(text_of.value, str):
                    documented |= set(range(statement.lineno, (statement.end_lineno or 0) + 1))
                    counts["docstring words"] += len(text_of.value.split())
            if isinstance(node, ast.ClassDef):
                classes[node.name] += 1
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                long += (node.end_lineno or 0) - node.lineno + 1 > LONG
        lines = len(_code_lines(text, counts) - documented)
        rooms[path.relative_to(package).parts[0]] += lines
        counts["code lines"] += lines
        counts["files"] += 1
    yield "code lines", counts["code lines"]
    yield "files", counts["files"]
    yield "classes", sum(classes.values())
    yield "class names that occur twice", sum(number > 1 for number in classes.values())
    yield "module names that occur twice", sum(number > 1 for number in modules.values())
    yield "docstring words", counts["docstring words"]
    yield "comment lines", counts["comment lines"]
    yield f"functions over {LONG} lines", long
    yield "most files in one folder", max(folders.values())
    for room, lines in sorted(rooms.items()):
        if not room.endswith(".py"):
            yield f"code lines of {room}", lines


def _code_lines(text: str, counts: Counter[str]) -> set[int]:
    layout = {tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT:
            counts["comment lines"] += 1
        elif token.type not in layout:
            lines |= set(range(token.start[0], token.end[0] + 1))
    return lines


def walk(packages: Sequence[Path], driver: str) -> dict[str, list[str]]:
    """Files of the packages by :data:`KINDS`, during the middle one of three iterations."""
    with tempfile.TemporaryDirectory() as folder:
        flags = Path(folder)
        shutil.copy(HOOK, flags / "sitecustomize.py")
        environment = os.environ | {
            "PYTHONPATH": ":".join(map(str, (flags, *(package.parent for package in packages)))),
            "WALK_FLAGS": str(flags),
            "WALK_PACKAGES": ":".join(map(str, packages)),
        }
        arguments = ["name=walk", f"runs_dir={flags}", "iterations=3", "checkpoint.every=1"]
        arguments += ["evaluation.every=100", "evaluation.images_per_prompt=4", "evaluation.grid_images=1"]
        arguments += ["metrics.training_pictures_every=0"]
        arguments += ["rollout.prompts_per_iteration=2", "rollout.group_size=2", f"fleet.driver={driver}"]
        command = [sys.executable, "-m", "spotlight.cli", "train", "--plain", *arguments]
        with subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL) as process:
            while process.poll() is None:
                time.sleep(0.05)
                done = _iterations(flags / "walk" / "metrics.jsonl")
                if done >= 1:
                    (flags / "on").touch()
                if done >= 2:
                    time.sleep(0.5)  # the checkpoint after it
                    (flags / "off").touch()
        if process.returncode:
            raise SystemExit(f"the run with fleet.driver={driver} ended with status {process.returncode}")
        return {kind: _files(flags, kind, packages) for kind in KINDS}


def _files(flags: Path, kind: str, packages: Sequence[Path]) -> list[str]:
    names = {name for file in flags.glob(f"*.{kind}") for name in file.read_text(encoding="utf-8").split()}
    roots = {package: package.parent for package in packages}
    return sorted(
        str(Path(name).relative_to(root))
        for name in names
        for package, root in roots.items()
        if Path(name).is_relative_to(package)
    )


def _iterations(metrics: Path) -> int:
    if not metrics.exists():
        return 0
    return sum('"train/' in line for line in metrics.read_text(encoding="utf-8").split("\n"))


if __name__ == "__main__":
    main()
