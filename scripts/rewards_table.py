"""Write the tables of rewards into ``docs/rewards.md``: facts from the registry, measured differences.

The facts also stand in ``packages/rewards/README.md``.

    pytest tests/unit/test_rewards_{preference,local_vlm,plain_vlm,ocr_neural}.py \\
        tests/unit/test_geneval_reward.py --junitxml=build/rewards.xml
    python -m scripts.rewards_table build/rewards.xml

Without a file, the table of facts alone is renewed.
"""

from __future__ import annotations

import re
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path

from scripts.marked_part import write_part
from spotlight_rewards.commands.rewards_command import registered_rewards

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "rewards.md"
README = ROOT / "packages" / "rewards" / "README.md"
FACTS, FIGURES = (f"{what}: written by scripts/rewards_table.py" for what in ("facts", "figures"))


def facts() -> str:
    """One line per registered reward."""
    lines = ["| reward | scores | weights (licence) | runs on | typical |", "|---|---|---|---|---|"]
    for each in registered_rewards():
        weights = f"{each.weights} ({each.licence})" if each.weights else "-"
        weights = re.sub(r"[\w.-]+/[\w.-]+", r"`\g<0>`", weights) if each.weights else weights
        lines.append(
            f"| `{each.name}` | {each.scores} | {weights} | {each.runs_on} | {each.typical or '-'} |"
        )
    return "\n".join([*lines, ""])


def figures(report: Path) -> str:
    """The largest difference per reward that the tests measured."""
    found: dict[str, float] = {}
    for each in ElementTree.parse(report).getroot().iter("property"):
        name, _, what = (each.get("name") or "").partition("/")
        if what == "difference":
            found[name] = max(found.get(name, 0.0), float(each.get("value") or "nan"))
    lines = ["| reward | largest difference |", "|---|---|"]
    lines += [f"| `{name}` | {value:.1e} |" for name, value in found.items()]
    return "\n".join([*lines, ""])


def main(arguments: list[str]) -> None:
    """Rewrite the tables."""
    for page in (PAGE, README):
        write_part(page, FACTS, facts())
    if arguments:
        write_part(PAGE, FIGURES, figures(Path(arguments[0])))


if __name__ == "__main__":
    main(sys.argv[1:])
