"""Whether the planner's answer is the best that a grid of exact simulations finds on a small space.

    python -m benchmarks.plan_grid
    python -m benchmarks.plan_grid --scenario paper-512 --deadline-h 4 --json build/plan_grid.json

The default is a fifth of ``video-1000``'s work on 12 clusters. The planner ranks all ways to run it by its
closed form and simulates those that it finds best; here every way is simulated, and the cheapest that meets
the deadline should be the one recommended. Extra arguments are overrides of the scenario.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated

import typer

from benchmarks._measure import report
from spotlight_plan.candidates import grid, shape_of, ways
from spotlight_plan.estimates import Estimates
from spotlight_plan.scenarios.scenario_file import ScenarioFile
from spotlight_plan.scenarios.scenario_load import load_scenario
from spotlight_plan.search import EvaluatedCandidate, Goal, confirm, search

SMALL = (
    "workload.prompts=25",
    "rewards.scorers=25",
    "cluster.reserved={nodes: 5, gpus_per_node: 8, gpu_type: H100}",
    "cluster.spot={nodes: 20, gpus_per_node: 8, gpu_type: H100}",
    "plan={iterations: 3, strategies: [spotlight, all_spot], gpu_types: [H100], machine_sizes_max: 1, "
    "reserved_nodes: [2, 3, 5], spot_nodes: [16, 24], parts: [gap, subset]}",
)


def simulated(file: ScenarioFile, now: datetime, jobs: int) -> Iterator[EvaluatedCandidate]:
    """Every way to run on every cluster that the closed form gives a target, simulated."""
    estimates = Estimates(file, now)
    for cluster in grid(file, estimates.quotes)[0]:
        for name, share, arm in ways(file, cluster.strategy):
            candidate = replace(cluster, strategy=name, next_share=share, previews=arm)
            runs = estimates.of(candidate)
            if not isinstance(runs, str):
                yield from confirm(estimates, [EvaluatedCandidate(candidate, runs)], jobs)


def row(one: EvaluatedCandidate) -> dict[str, object]:
    """A way, with its hours and dollars to target."""
    return {"way": shape_of(one.candidate), "h": one.runs.target_h.p50, "usd": one.runs.target_usd.p50}


def main(
    overrides: Annotated[list[str] | None, typer.Argument(help="key=value of the scenario.")] = None,
    scenario: Annotated[str, typer.Option(help="What is planned.")] = "video-1000",
    deadline_h: Annotated[float, typer.Option(help="Hours to target at p50.")] = 120.0,
    jobs: Annotated[int, typer.Option(min=1, help="Processes.")] = 2,
    json: Annotated[Path | None, typer.Option(help="Also write the tables here.")] = None,
) -> None:
    """Print what the planner recommends, and the five cheapest ways of the grid."""
    small = SMALL if scenario == "video-1000" else ()
    file = load_scenario(scenario, [*small, *(overrides or [])])
    goal, now = Goal(deadline_h=deadline_h), datetime.now(UTC)
    answer = search(file, goal, now, jobs=jobs).answer
    found = [*simulated(file, now, jobs)]
    met = [one for one in found if goal.met_by(one.runs)]
    met.sort(key=lambda one: one.runs.target_usd.p50)
    report(
        json,
        f"{scenario}, {len(found)} simulated, {len(met)} within {deadline_h:g} h",
        recommended=[row(answer)] if answer else [],
        cheapest=[*map(row, met[:5])],
    )
    best = met[0] if met else None
    if (answer and answer.candidate) != (best and best.candidate):
        raise SystemExit("the planner recommends another than the best of the grid")


if __name__ == "__main__":
    typer.run(main)
