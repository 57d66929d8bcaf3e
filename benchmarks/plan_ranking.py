"""How near the planner's closed form comes to the exact simulation, and whether it ranks candidates alike.

    python -m benchmarks.plan_ranking
    python -m benchmarks.plan_ranking --scenario paper-512 --json ranking.json

Of every scenario some clusters and strategies, with nodes that stay, each simulated exactly for some
iterations. Errors are of the seconds of an iteration; of all pairs of candidates of one scenario, ``order``
is the share that both put in the same order (by dollars of an iteration).
"""

from __future__ import annotations

import json as json_format
import math
import statistics
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from itertools import combinations
from pathlib import Path
from typing import Annotated

import typer

from spotlight_plan.closed_form import ClosedForm
from spotlight_plan.compare import SimulationTask, run_task
from spotlight_plan.scenarios.prepare import prepare
from spotlight_plan.scenarios.scenario_load import load_scenario
from spotlight_plan.scenarios.strategies import strategy_named

_MIXED = (
    "reserved_only",
    "spot_rollout_only",
    "critical_path",
    "spotlight",
    "spotlight+gap",
    "spotlight+gap+tsp",
    "spotlight+gap+tag",
    "all_spot",
)
_STAYS = (
    "all_on_demand",
    "disaggregated",
    "disaggregated+gap",
    "disaggregated+gap+tsp",
    "disaggregated+gap+tsp+tag",
    "disaggregated+gap+tsp+tag+tcss",
)
CASES: dict[str, tuple[tuple[str, ...], tuple[tuple[int, int], ...]]] = {
    "paper-512": (_MIXED, ((1, 2), (1, 4), (2, 4), (1, 8), (2, 8))),
    "paper-1280": (_MIXED, ((1, 4), (2, 8))),
    "mixed-512": (_MIXED[:-1], ((1, 4), (2, 4))),
    "pipeline-qwen-image": (_STAYS, ((3, 1), (2, 2), (1, 3))),
}
"""Strategies, and numbers of reserved and spot nodes."""


@dataclass(frozen=True, slots=True)
class Pair:
    """One candidate, simulated and by the closed form."""

    scenario: str
    strategy: str
    reserved_nodes: int
    spot_nodes: int
    exact_s: float
    closed_s: float
    exact_usd: float
    closed_usd: float
    exact_cpu_s: float
    closed_cpu_s: float

    @property
    def error(self) -> float:
        """Relative, of the seconds of an iteration."""
        return self.closed_s / self.exact_s - 1


def pairs_of(scenario: str, iterations: int) -> Iterator[Pair]:
    """Every case of a scenario."""
    strategies, clusters = CASES[scenario]
    for strategy in strategies:
        alone = strategy == "reserved_only"
        for reserved, spot in dict.fromkeys((one, 1 if alone else other) for one, other in clusters):
            file = load_scenario(
                scenario,
                [
                    f"cluster.reserved.nodes={reserved}",
                    f"cluster.spot.nodes={spot}",
                    f"run.iterations={iterations}",
                    "run.until_h=100",
                    "trace={kind: always_on}",
                    "workload.evaluation=null",
                ],
            )
            prepared = prepare(file, (strategy,), datetime.now(UTC))
            began_s = time.process_time()
            exact = run_task(SimulationTask(prepared, strategy)).outcome
            between_s = time.process_time()
            form = ClosedForm(prepared, strategy_named(strategy), file.run.until_h)
            closed = form.outcome(prepared, seen=iterations)
            yield Pair(
                scenario,
                strategy,
                reserved,
                spot,
                exact.iteration_s,
                closed.iteration_s,
                exact.iteration_usd,
                closed.iteration_usd,
                between_s - began_s,
                time.process_time() - between_s,
            )


def order_of(pairs: list[Pair]) -> float:
    """Share of pairs of candidates in the same order of dollars; NaN without any."""
    same = [
        (one.exact_usd < other.exact_usd) == (one.closed_usd < other.closed_usd)
        for one, other in combinations(pairs, 2)
    ]
    return statistics.fmean(same) if same else math.nan


def table_of(found: dict[str, list[Pair]]) -> str:
    """As Markdown."""
    lines = [
        "| scenario | candidates | error, mean | largest | order | CPU s, simulated | CPU s, closed form |",
        "|---|---|---|---|---|---|---|",
    ]
    for name, pairs in found.items():
        errors = [abs(one.error) for one in pairs]
        worst = max(pairs, key=lambda one: abs(one.error))
        cells = (
            name,
            f"{len(pairs)}",
            f"{statistics.fmean(errors):.1%}",
            f"{worst.error:+.1%} ({worst.strategy}, {worst.reserved_nodes} + {worst.spot_nodes} nodes)",
            f"{order_of(pairs):.1%}",
            f"{sum(one.exact_cpu_s for one in pairs):.1f}",
            f"{sum(one.closed_cpu_s for one in pairs):.2f}",
        )
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def main(
    scenario: Annotated[list[str], typer.Option(help="Repeatable.")] = list(CASES),  # noqa: B006
    iterations: Annotated[int, typer.Option(help="Simulated of each.")] = 4,
    json: Annotated[Path | None, typer.Option(help="Also write every pair here.")] = None,
) -> None:
    """Print the table."""
    found = {name: list(pairs_of(name, iterations)) for name in scenario}
    print(table_of(found))
    if json is not None:
        json.parent.mkdir(parents=True, exist_ok=True)
        rows = [asdict(one) for pairs in found.values() for one in pairs]
        content = {"utc": datetime.now(UTC).isoformat(timespec="seconds"), "pairs": rows}
        json.write_text(json_format.dumps(content, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    typer.run(main)
