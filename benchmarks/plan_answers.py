"""What the planner recommends, after how long, and how near that is to what another commit recommends.

    python -m benchmarks.plan_answers --json now.json
    python -m benchmarks.plan_answers --scenario paper-512 --against before.json

Of every scenario ``spotlight plan`` with a deadline of about a third of the hours that its reserved GPUs take
alone. CPU seconds are of all processes: what two idle cores take is at least half of them.
"""

from __future__ import annotations

import json as json_format
import os
import time
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated

import typer

from spotlight_plan.candidates import shape_of
from spotlight_plan.scenarios.scenario_load import load_scenario
from spotlight_plan.search import Goal, SearchStep, search

DEADLINES_H = {"paper-512": 3.0, "paper-1280": 20.0, "mixed-512": 4.0, "video-1000": 100.0}


@dataclass(frozen=True, slots=True)
class Answered:
    """One scenario's recommendation.

    Attributes:
        clusters: that were ranked.
        first_s: until the first cluster was ranked.
        ranked_cpu_s: of ranking all, in one process.
        cpu_s, wall_s: of the whole search, CPU seconds of all its processes.
        hours, usd: to target at p50, simulated.
    """

    scenario: str
    deadline_h: float
    clusters: int
    first_s: float
    ranked_cpu_s: float
    cpu_s: float
    wall_s: float
    candidate: str
    hours: float
    usd: float


def answered(scenario: str, deadline_h: float, overrides: list[str], jobs: int) -> Answered:
    """Plan one scenario."""
    file = load_scenario(scenario, overrides)
    began_s, began_cpu_s = time.monotonic(), _cpu_s()
    clusters, first_s, ranked_cpu_s = 0, 0.0, 0.0

    def step(now: SearchStep) -> None:
        nonlocal clusters, first_s, ranked_cpu_s
        if now.what != "ranked":
            return
        clusters, ranked_cpu_s = now.of, _cpu_s() - began_cpu_s
        if now.best is not None and not first_s:
            first_s = time.monotonic() - began_s

    found = search(file, Goal(deadline_h=deadline_h), datetime.now(UTC), jobs=jobs, progress=step)
    best = found.answer or found.nearest
    return Answered(
        scenario,
        deadline_h,
        clusters,
        first_s,
        ranked_cpu_s,
        _cpu_s() - began_cpu_s,
        time.monotonic() - began_s,
        shape_of(best.candidate) + ("" if found.answer else " (misses the deadline)"),
        best.runs.target_h.p50,
        best.runs.target_usd.p50,
    )


def _cpu_s() -> float:
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system


def show(found: list[Answered], before: dict[str, Answered]) -> str:
    """As Markdown."""
    lines = [
        "| within | clusters | first after | CPU seconds, all | recommended | hours | dollars |",
        "|---|---|---|---|---|---|---|",
    ]
    for one in found:
        old = before.get(one.scenario)
        cells = (
            f"`{one.scenario}`, {one.deadline_h:g} h",
            f"{one.clusters:,}",
            f"{one.first_s:.1f} s",
            f"{one.cpu_s:.0f}" + (f" (was {old.cpu_s:.0f})" if old else ""),
            one.candidate
            + ("" if old is None or old.candidate == one.candidate else f" (was {old.candidate})"),
            f"{one.hours:.2f}" + (f" ({one.hours / old.hours - 1:+.1%})" if old else ""),
            f"{one.usd:,.0f}" + (f" ({one.usd / old.usd - 1:+.1%})" if old else ""),
        )
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def main(
    scenario: Annotated[list[str], typer.Option(help="Repeatable.")] = list(DEADLINES_H),  # noqa: B006
    override: Annotated[list[str], typer.Option(help="KEY=VALUE of every scenario; repeatable.")] = [],  # noqa: B006
    jobs: Annotated[int, typer.Option(help="Processes.")] = 2,
    against: Annotated[Path | None, typer.Option(help="What --json wrote at another commit.")] = None,
    json: Annotated[Path | None, typer.Option(help="Also write all answers here.")] = None,
) -> None:
    """Print the table."""
    rows = json_format.loads(against.read_text(encoding="utf-8"))["answers"] if against else []
    before = {row["scenario"]: Answered(**row) for row in rows}
    found = []
    for name in scenario:
        found.append(answered(name, DEADLINES_H[name], override, jobs))
        if json is not None:
            content = {
                "utc": datetime.now(UTC).isoformat(timespec="seconds"),
                "answers": [*map(asdict, found)],
            }
            json.write_text(json_format.dumps(content, indent=2) + "\n", encoding="utf-8")
    print(show(found, before))


if __name__ == "__main__":
    typer.run(main)
