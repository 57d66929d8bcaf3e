"""Draw the packages, their rooms and who imports whom into ``docs/img/architecture.svg``.

A room is a folder of a package; it stands above every room that it imports. Figures are code lines without
docstrings, comments and blank lines, rounded to hundreds. In a dark page the picture is dark.

python scripts/draw_architecture.py
"""

from __future__ import annotations

import ast
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cache
from html import escape
from pathlib import Path

ROOT = Path(__file__).parents[1]
PICTURE = ROOT / "docs" / "img" / "architecture.svg"
POLICIES = ("spotlight", "scheduler", "policies")
"""The folder whose folders are policies."""
ROWS = (
    ("spotlight_plan", "spotlight_dashboard", "spotlight_bucket"),
    ("spotlight",),
    ("spotlight_fleet", "spotlight_files", "spotlight_weights", "spotlight_kernels"),
    ("spotlight_rewards",),
)
"""Packages, row by row."""
FOR_WHOM = {
    "spotlight": "train",
    "spotlight_rewards": "score pictures and videos, with any trainer",
    "spotlight_fleet": "know nodes that come and go",
    "spotlight_files": "read and write files of models",
    "spotlight_weights": "bring tensors to many processes",
    "spotlight_kernels": "fuse operators of blocks",
    "spotlight_plan": "decide what to rent",
    "spotlight_dashboard": "watch runs",
    "spotlight_bucket": "keep runs in a bucket",
}

Graph = Mapping[str, set[str]]


# -- the code ----------------------------------------------------------------------------------------------


@cache
def packages() -> dict[str, Path]:
    """Folders of the packages, by name."""
    found = [ROOT / "src" / "spotlight", *sorted(ROOT.glob("packages/*/src/*"))]
    return {path.name: path for path in found if (path / "__init__.py").exists()}


def code_lines(text: str, nodes: Sequence[ast.AST]) -> int:
    """Lines that are not blank, a comment, or of a docstring."""
    documented = {
        line
        for node in nodes
        if isinstance(node, ast.Expr)
        and isinstance(node.value, ast.Constant)
        and isinstance(node.value.value, str)
        for line in range(node.lineno, (node.end_lineno or node.lineno) + 1)
    }
    return sum(
        number not in documented and line.strip() != "" and not line.lstrip().startswith("#")
        for number, line in enumerate(text.splitlines(), 1)
    )


def room_of(module: Sequence[str]) -> str:
    """``package.folder``; ``package`` itself for its loose modules."""
    package = packages()[module[0]]
    return ".".join(module[:2]) if len(module) > 1 and (package / module[1]).is_dir() else module[0]


def imported(nodes: Sequence[ast.AST]) -> Iterator[str]:
    """Full names of modules that run when the code does; imports for type checkers do not."""
    skipped = {
        id(inner)
        for node in nodes
        if isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"
        for statement in node.body
        for inner in ast.walk(statement)
    }
    for node in nodes:
        if id(node) in skipped:
            continue
        if isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)


@cache
def read() -> tuple[dict[str, int], dict[str, set[str]]]:
    """Code lines of each room, and the rooms that it imports."""
    lines: Counter[str] = Counter()
    uses: defaultdict[str, set[str]] = defaultdict(set)
    known = packages()
    for package, folder in known.items():
        for path in folder.rglob("*.py"):
            module = (package, *path.relative_to(folder).with_suffix("").parts)
            source = path.read_text(encoding="utf-8")
            nodes = list(ast.walk(ast.parse(source)))
            room = room_of(module)
            lines[room] += code_lines(source, nodes)
            for name in imported(nodes):
                parts = name.split(".")
                if parts[0] in known and (target := room_of(parts)) != room:
                    uses[room].add(target)
    return dict(lines), dict(uses)


def policies() -> list[str]:
    """Names of the policies' folders."""
    folder = packages()[POLICIES[0]].joinpath(*POLICIES[1:])
    return sorted(path.name for path in folder.glob("*/") if (path / "__init__.py").exists())


def rows(rooms: Iterable[str], uses: Graph) -> list[list[str]]:
    """Rooms from top to bottom, each above all that it imports; those that import each other share a row."""
    names = set(rooms)

    def reach(room: str) -> set[str]:
        seen: set[str] = set()
        todo = [room]
        while todo:
            todo += (new := uses.get(todo.pop(), set()) & names - seen)
            seen |= new
        return seen

    below = {room: reach(room) for room in names}

    @cache
    def height(room: str) -> int:
        return max((height(other) + 1 for other in below[room] if room not in below[other]), default=0)

    # Rooms that import each other are equally high, since each counts only what does not reach it.
    heights = {room: height(room) for room in names}
    return [
        sorted(r for r in names if heights[r] == h) for h in range(max(heights.values(), default=-1), -1, -1)
    ]


# -- the picture -------------------------------------------------------------------------------------------

STYLE = """
text { font-family: ui-sans-serif, system-ui, Helvetica, Arial, sans-serif; fill: #22252a }
.page { fill: #fbfaf7 } .package { fill: #eef2f9; stroke: #8ba4d0; stroke-width: 1.4 }
.room { fill: #ffffff; stroke: #b9bdc4 } .core { fill: #dfe9fa; stroke: #2563c9; stroke-width: 1.6 }
.policy { fill: #fdf0e3; stroke: #d08a4a } .title { font-size: 16px; font-weight: 600 }
.name { font-size: 13px } .small { font-size: 11.5px; fill: #5b6470 }
.arrow { stroke: #5b6470; stroke-width: 1.6; fill: none } .tip { fill: #5b6470 }
@media (prefers-color-scheme: dark) {
text { fill: #e4e6ea } .page { fill: #1b1e24 } .package { fill: #242a35; stroke: #5b75a8 }
.room { fill: #2d333f; stroke: #555e6d } .core { fill: #263c63; stroke: #6d9bf0 }
.policy { fill: #45331f; stroke: #c08850 } .small { fill: #a5adba }
.arrow { stroke: #a5adba } .tip { fill: #a5adba } }
"""
WIDTH, MARGIN, GAP, BOX = 980, 20, 8, 28


def text(x: float, y: float, words: str, kind: str, *, anchor: str = "start") -> str:
    """One line of text."""
    return f'<text x="{x:g}" y="{y:g}" class="{kind}" text-anchor="{anchor}">{escape(words)}</text>'


def rounded(lines: int) -> str:
    """In hundreds, the least 100."""
    return f"{max(round(lines, -2), 100):,}"


def box(x: float, y: float, width: float, name: str, kind: str) -> Iterator[str]:
    """A room or a policy."""
    yield f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{BOX}" rx="6" class="{kind}"/>'
    yield text(x + width / 2, y + 19, name, "name", anchor="middle")


def row_of(names: Mapping[str, str], x: float, y: float, width: float) -> Iterator[str]:
    """Boxes side by side; ``names``: what they say, and their kind."""
    wide = (width - GAP * (len(names) - 1)) / len(names)
    for place, (name, kind) in enumerate(names.items()):
        yield from box(x + place * (wide + GAP), y, wide, name, kind)


def package(name: str, x: float, y: float, width: float) -> tuple[float, list[str]]:
    """The height of a package's box, and what is in it."""
    lines, uses = read()
    rooms = [room for room in lines if room.split(".")[0] == name]
    scheduler = ".".join(POLICIES[:2])
    parts: list[str] = []
    wide = width > WIDTH / 2
    left, inner, top = x + 10, width - 20, y + (36 if wide else 54)
    for row in rows([room for room in rooms if room != name], uses):
        across = max(int(inner // 130), 1)
        for start in range(0, len(row), across):
            says = {
                f"{room.split('.')[1]}  {rounded(lines[room])}": "core" if room == scheduler else "room"
                for room in row[start : start + across]
            }
            parts += row_of(says, left, top, inner)
            top += BOX + GAP
        if scheduler in row and policies():
            parts.append(text(left, top + 10, "policies of the scheduler, loaded by name", "small"))
            parts += row_of({name.replace("_", " "): "policy" for name in policies()}, left, top + 18, inner)
            top += 18 + BOX + GAP
    total = rounded(sum(lines[room] for room in rooms))
    head = [
        f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{top - y:g}" rx="9" class="package"/>',
        text(x + 12, y + 24, name, "title"),
        text(*((x + 180, y + 24) if wide else (x + 12, y + 42)), f"{FOR_WHOM[name]}, {total} lines", "small"),
    ]
    return top - y, head + parts


def arrow(path: str) -> str:
    """A line with a tip."""
    return f'<path class="arrow" marker-end="url(#tip)" d="{path}"/>'


def between() -> set[tuple[str, str]]:
    """Each package with each other that it imports."""
    _, uses = read()
    pairs = {(a.split(".")[0], b.split(".")[0]) for a, others in uses.items() for b in others}
    return {(user, used) for user, used in pairs if user != used}


def way(places: Mapping[str, tuple[float, float, float, float]], user: str, used: str) -> str:
    """An arrow's path: straight down to the next row, around the rows between to another."""
    (x, top, wide, height), (to, end, width, _) = places[user], places[used]
    row = {name: number for number, names in enumerate(ROWS) for name in names}
    if row[used] == row[user] + 1:
        at = (x + wide / 2) if wide < width else (to + width / 2)
        return f"M{at:g} {top + height:g} V{end - 1:g}"
    share, side = (0.15, MARGIN / 2) if user == ROWS[0][0] else (0.85, WIDTH - MARGIN / 2)
    below = places[ROWS[row[user] + 1][0]][1]
    around = f"V{below - 22:g} H{side:g} V{end - 22:g} H{to + share * width:g}"
    return f"M{x + share * wide:g} {top + height:g} {around} V{end - 1:g}"


def draw() -> str:
    """The picture as SVG."""
    parts: list[str] = []
    places: dict[str, tuple[float, float, float, float]] = {}
    y = float(MARGIN)
    for names in ROWS:
        wide = (WIDTH - 2 * MARGIN - 2 * GAP * (len(names) - 1)) / len(names)
        tallest = 0.0
        for place, name in enumerate(names):
            x = MARGIN + place * (wide + 2 * GAP)
            height, drawn = package(name, x, y, wide)
            places[name] = (x, y, wide, height)
            parts += drawn
            tallest = max(tallest, height)
        y += tallest + 44
    parts += [arrow(way(places, user, used)) for user, used in sorted(between())]
    height = y - 44 + 50
    says = (
        "Arrows: imports. In a package a room imports only rooms below it, or beside it. "
        "Figures: code lines, loose modules in the total."
    )
    title = "Packages, their rooms, and who imports whom"
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{height:g}" '
            f'viewBox="0 0 {WIDTH} {height:g}" role="img" aria-label="{title}">',
            f"<style>{STYLE}</style>",
            '<defs><marker id="tip" viewBox="0 0 10 10" refX="9" refY="5" markerWidth="7" markerHeight="7" '
            'orient="auto"><path class="tip" d="M0 0 L10 5 L0 10 z"/></marker></defs>',
            f'<rect class="page" width="{WIDTH}" height="{height:g}" rx="8"/>',
            *parts,
            text(WIDTH / 2, height - 18, says, "small", anchor="middle"),
            "</svg>",
            "",
        ]
    )


def main() -> None:
    """Write the picture."""
    PICTURE.write_text(draw(), encoding="utf-8")


if __name__ == "__main__":
    main()
