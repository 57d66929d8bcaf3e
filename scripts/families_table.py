"""Write the tables of model families into ``docs/families.md``: facts from the registry, measured figures.

    pytest tests/contract/test_families.py tests/e2e/test_smoke.py --junitxml=build/families.xml
    python -m scripts.families_table build/families.xml [MORE.xml ..]

Figures that no file has stay as they are; without a file, the table of facts alone is renewed.
"""

from __future__ import annotations

import sys
import xml.etree.ElementTree as ElementTree
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

from scripts.marked_part import read_part, write_part
from spotlight.licences import Licence, licence_of
from spotlight.models.family import ModelFamily
from spotlight.registry import FAMILIES

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "families.md"
FACTS, FIGURES = (
    "facts: written by scripts/families_table.py",
    "figures: written by scripts/families_table.py",
)
COLUMNS = {
    "picture": "pictures",
    "lora": "LoRA in diffusers",
    "merged": "merged in diffusers",
    "plain_loop": "optimizer step",
    "sequence_parallel": "sequence parallel",
    "parameters": "parameters",
    "smoke_s": "smoke run",
}


def facts() -> str:
    """One line per family and published model."""
    lines = [
        "| `model.family` | published models (parameters) | makes | guidance | step cache "
        "| sequence parallel | configurations from | commercial use of the weights |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for name in FAMILIES.built_in:
        family = FAMILIES.load(name)
        models = "<br>".join(
            f"`{model}` ({published.parameters / 1e9:.1f} B)" for model, published in family.published.items()
        )
        sources = dict.fromkeys(published.source for published in family.published.values())
        kinds = [] if family.embedded_guidance is None else [f"embedded {family.embedded_guidance:g}"]
        kinds += [] if family.guidance_argument is None else ["true"]
        lines.append(
            f"| `{name}` | {models} | {'videos' if family.video else 'pictures'} | {', '.join(kinds)} | "
            f"{_yes(family.reuses_blocks)} | {_yes(family.splits_sequence)} | {'<br>'.join(sources)} | "
            f"{_licences(family)} |"
        )
    return "\n".join([*lines, ""])


def figures(reports: Sequence[Path], before: str) -> str:
    """Largest differences per family, seconds of its smoke run, and the lines of its file.

    Args:
        before: the table so far, for what no report has.
    """
    found: defaultdict[str, dict[str, float]] = defaultdict(dict)
    for report in reports:
        for each in ElementTree.parse(report).getroot().iter("property"):
            name, _, column = (each.get("name") or "").partition("/")
            if column in COLUMNS:
                value = float(each.get("value") or "nan")
                found[name][column] = max(value, found[name].get(column, 0.0))
    lines = [
        f"| `model.family` | {' | '.join(COLUMNS.values())} | lines of its file |",
        f"|---|{'---|' * len(COLUMNS)}---|",
    ]
    for name in FAMILIES.built_in:
        known = _cells(before, name)
        cells = [
            known.get(title, "-") if column not in found[name] else _figure(found[name][column], column)
            for column, title in COLUMNS.items()
        ]
        lines.append(f"| `{name}` | {' | '.join(cells)} | {_lines(FAMILIES.load(name))} |")
    return "\n".join([*lines, ""])


def main(arguments: list[str]) -> None:
    """Rewrite the tables."""
    write_part(PAGE, FACTS, facts())
    if arguments:
        reports = [Path(argument) for argument in arguments]
        write_part(PAGE, FIGURES, figures(reports, read_part(PAGE, FIGURES)))


def _licences(family: type[ModelFamily]) -> str:
    """Each licence once, with the models' last names where there are several."""
    by_licence: dict[str, list[str]] = {}
    for model in family.published:
        by_licence.setdefault(_linked(licence_of(model)), []).append(model.partition("/")[2])
    if len(by_licence) == 1:
        return next(iter(by_licence))
    return "<br>".join(f"{', '.join(models)}: {said}" for said, models in by_licence.items())


def _linked(licence: Licence | None) -> str:
    if licence is None:
        return "not read"
    return f"{licence.commercial} ([{licence.name}]({licence.source}), read {licence.read})"


def _yes(value: bool) -> str:
    return "yes" if value else "no"


def _figure(value: float, column: str) -> str:
    if column == "parameters":
        return f"{value:.2%}".replace("%", " %")
    return f"{value:.0f} s" if column.endswith("_s") else f"{value:.1e}"


def _cells(table: str, family: str) -> dict[str, str]:
    """A family's row, by title."""
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines()]
    row = next((row for row in rows if row[0] == f"`{family}`"), [])
    return dict(zip(rows[0], row, strict=False))


def _lines(family: type[ModelFamily]) -> int:
    source = ROOT / "src" / Path(*family.__module__.split(".")).with_suffix(".py")
    return len(source.read_text(encoding="utf-8").splitlines())


if __name__ == "__main__":
    main(sys.argv[1:])
