"""Draw the stages of an iteration, as ``scheduler/stages.py`` has them, into ``docs/architecture.md``.

python -m scripts.draw_stages
"""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path

from scripts.marked_part import write_part
from spotlight.scheduler.stages import TRANSITIONS, Stage, Trigger

PAGE = Path(__file__).parents[1] / "docs" / "architecture.md"
MARK = "stages: drawn by scripts/draw_stages.py"
_COMMON = 3
"""A trigger that leads from so many stages to one is put in words: arrows would hide the others."""


def draw() -> str:
    """The table of transitions as a Mermaid diagram, and below it what may happen in many stages."""
    sources: defaultdict[tuple[Trigger, Stage], list[Stage]] = defaultdict(list)
    for stage, ways in TRANSITIONS.items():
        for trigger, following in ways.items():
            sources[trigger, following].append(stage)
    arrows, sentences = [f"    [*] --> {Stage.IDLE.value}"], []
    for (trigger, following), stages in sources.items():
        if len(stages) < _COMMON:
            arrows += [f"    {stage.value} --> {following.value}: {trigger.value}" for stage in stages]
        else:
            names = ", ".join(f"`{stage.value}`" for stage in stages)
            sentences.append(f"- *{trigger.value}* leads to `{following.value}` from {names}.")
    arrows.append(f"    {Stage.OVER.value} --> [*]")
    return "\n".join(["```mermaid", "stateDiagram-v2", *arrows, "```", "", *sentences, ""])


def main() -> None:
    """Draw it into the page."""
    write_part(PAGE, MARK, draw())


if __name__ == "__main__":
    main()
