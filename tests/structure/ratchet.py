"""Figures of the code and its documentation that may only shrink, and the file that holds them.

    python -m tests.structure.ratchet                      # today's figures beside the committed ones
    python -m tests.structure.ratchet --update             # commit smaller ones; refuses larger ones
    python -m tests.structure.ratchet --update --why TEXT  # a larger one, with its reason
    python -m tests.structure.ratchet --walk [--update]    # also the files that a rollout passes (minutes)

A figure that has shrunk by more than :data:`SLACK` fails, too, until it is committed: else it could grow back
unseen.
"""

from __future__ import annotations

import argparse
import ast
import json
import re
import sys
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TypedDict

from scripts.measure_structure import documentation_words, measure, packages_of, walk

ROOT = Path(__file__).parents[2]
FIGURES = Path(__file__).with_name("figures.json")
SLACK = 0.02
"""Share by which a figure may be below the committed one."""
PRIVATE_WORDS = re.compile(
    r"\b(newcomers?|lends?|lender|borrows?|shelf|bef[ae]ll?s?|anew|whoever|sated|berth|tariff|bystander|misfit"
    r"|parcels|tidings|gives? way|told already|nobody can tell|heard of)\b",
    re.IGNORECASE,
)
"""Words that are not the field's, in text and names."""
HOMONYMS = ("slot", "group", "target", "part", "room", "spare", "kept", "safe", "at")
"""Words that stood for several things each: counted are the names of classes, functions and attributes."""


class Change(TypedDict):
    """A committed value, and why it is larger than the one before it."""

    value: int
    why: str


Figures = dict[str, list[Change]]


def committed() -> Figures:
    """The file: by figure all values that it grew to, the last of which holds."""
    figures: Figures = json.loads(FIGURES.read_text())
    return figures


def measured() -> dict[str, int]:
    """Today's figures, but those of a walk."""
    figures: dict[str, int] = {}
    definitions: Counter[str] = Counter()
    words: Counter[str] = Counter()
    for package in packages_of(ROOT):
        sizes = dict(measure(package))
        for figure in ("code lines", "functions over 50 lines"):
            figures[f"{package.name}: {figure}"] = sizes[figure]
        if package.name == "spotlight":
            figures["spotlight: files"] = sizes["files"]
        for path in sorted(package.rglob("*.py")):
            text = path.read_text(encoding="utf-8")
            words["private words"] += len(PRIVATE_WORDS.findall(text))
            if path.name not in ("__init__.py", "__main__.py"):
                definitions[path.name] += 1
            for node in ast.walk(ast.parse(text)):
                words.update(_words_of(node))
                if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                    definitions[node.name] += 1
    figures["code lines of all packages"] = sum(
        value for name, value in figures.items() if name.endswith(": code lines")
    )
    figures["documentation words"] = documentation_words(ROOT)
    figures["names that occur twice"] = sum(number > 1 for number in definitions.values())
    figures |= {name: words[name] for name in ("private words", "refusals by hand")}
    return figures | {f"names with {word!r}": words[word] for word in HOMONYMS}


def walked(driver: str) -> dict[str, int]:
    """Files that a rollout passes, and in which a function runs, in an iteration of the embedded default."""
    files = walk(packages_of(ROOT), driver)
    return {f"files, {driver}: {kind}": len(names) for kind, names in files.items()}


def complaints(now: Mapping[str, int], figures: Figures) -> Iterator[str]:
    """What to do about figures that are not the committed ones."""
    for name, value in now.items():
        if name not in figures:
            yield f"{name}: {value} is not committed. Run `python -m tests.structure.ratchet --update`."
            continue
        held = figures[name][-1]["value"]
        if value > held:
            yield (
                f"{name}: {value}, committed are {held}. Make it smaller, or raise it in the same commit: "
                "`python -m tests.structure.ratchet --update --why '...'`."
            )
        elif value < held - max(1, SLACK * held):
            yield f"{name}: {value}, committed are {held}. Run `python -m tests.structure.ratchet --update`."


def updated(now: Mapping[str, int], figures: Figures, why: str) -> Figures:
    """The file's new content. Raises ValueError for a figure that grows without a reason."""
    new = {name: list(changes) for name, changes in figures.items()}
    for name, value in now.items():
        changes = new.setdefault(name, [])
        if changes and value > changes[-1]["value"]:
            if not why:
                raise ValueError(f"{name} grows from {changes[-1]['value']} to {value}; say --why.")
            changes.append({"value": value, "why": why})
        elif changes:
            changes[-1]["value"] = value
        else:
            changes.append({"value": value, "why": "the first measurement"})
    return new


def unexplained(figures: Figures) -> list[str]:
    """Figures that grew without a reason."""
    return [name for name, changes in figures.items() if not all(change["why"].strip() for change in changes)]


def _words_of(node: ast.AST) -> Iterator[str]:
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "Problem":
        yield "refusals by hand"
    match node:
        case ast.ClassDef(name=name) | ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name):
            pass
        case ast.AnnAssign(target=ast.Name(id=name)) | ast.AnnAssign(target=ast.Attribute(attr=name)):
            pass
        case _:
            return
    parts = re.findall(r"[A-Z]?[a-z]+|[A-Z]+(?![a-z])", name)
    yield from {part.lower() for part in parts} & {*HOMONYMS}


def main(arguments: list[str] | None = None) -> None:
    """Print the figures, and write them if asked to."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--update", action="store_true", help="write figures.json")
    parser.add_argument("--why", default="", help="why a figure may grow")
    parser.add_argument("--walk", action="store_true", help="count the files that a rollout passes, too")
    options = parser.parse_args(arguments)
    figures = committed() if FIGURES.exists() else {}
    now = measured()
    if options.walk:
        now |= walked("inline") | walked("ray")
    for name, value in now.items():
        held = figures[name][-1]["value"] if name in figures else "-"
        print(f"{name:52} {value:>7} {held:>7}")
    if options.update:
        try:
            new = updated(now, figures, options.why)
        except ValueError as error:
            sys.exit(str(error))
        FIGURES.write_text(json.dumps(new, indent=1, sort_keys=True) + "\n")


if __name__ == "__main__":
    main()
