"""What the planner finds: reserved GPUs alone, the shipped cluster, and its best at several deadlines.

    python -m benchmarks.plan_table
    python -m benchmarks.plan_table --workload paper-512 --confirm-starts 1 --json table.json

Two workloads, three clouds and all of them together (each pool where it is cheapest, traffic between clouds
paid), built-in prices, whole machines. Every figure is the closed form's (spotlight_plan/closed_form.py),
from ``--starts`` starts; the planner's best, and the clusters that come nearest to the goals, are also
simulated exactly to their target, from ``--confirm-starts`` starts. Ranges are of the starts and of the
interval of the iterations to target; of factors, of both sides.

Goals: five times as fast at the dollars of the scenario's reserved GPUs alone, and a seventh of their
dollars in their time.
"""

from __future__ import annotations

import json as json_format
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, TypeAlias

import typer

from spotlight_plan.candidates import Candidate, Machine, grid, prepared_for, shape_of
from spotlight_plan.compare import SimulationOutcome, run_tasks
from spotlight_plan.estimates import Estimates
from spotlight_plan.explanation.levers import lever_steps
from spotlight_plan.pages.comparison_summary import between, hours, usd
from spotlight_plan.pages.verdict import ratios
from spotlight_plan.scenarios.scenario_file import ScenarioFile
from spotlight_plan.scenarios.scenario_load import load_scenario
from spotlight_plan.scenarios.strategies import PipelinePart, with_parts
from spotlight_plan.search import Goal
from spotlight_plan.strategy_runs import StrategyRuns, tasks_from_starts

CLOUDS = ("aws", "gcp", "azure")
EVERYWHERE = "all three"
FASTER, CHEAPER = 5.0, 7.0
_After: TypeAlias = Callable[[SimulationOutcome, int], float]


@dataclass(frozen=True, slots=True)
class TableRow:
    """One cluster; times and costs to target."""

    workload: str
    place: str
    what: str
    cluster: str
    hours_p50: float
    hours_range: tuple[float, float]
    usd_p50: float
    usd_range: tuple[float, float]
    exact_h: float = math.nan
    exact_usd: float = math.nan


@dataclass(frozen=True, slots=True)
class Factor:
    """How many times less a cluster takes than the scenario's reserved GPUs alone.

    Attributes:
        p50, ends: estimated: at p50, and of the same starts and both intervals of iterations.
        exactly: simulated exactly, at p50; NaN: it was not.
    """

    p50: float
    ends: tuple[float, float]
    exactly: float
    cluster: str


@dataclass(frozen=True, slots=True)
class GoalRow:
    """How far the goals are met in one place, against the scenario's reserved GPUs alone.

    Attributes:
        faster: most times as fast for no more dollars; None: every cluster is dearer.
        cheaper: most times cheaper in no more time; None: every cluster is slower.
        levers: hours and dollars to target after each lever, towards the cheapest.
    """

    workload: str
    place: str
    faster: Factor | None
    cheaper: Factor | None
    levers: tuple[tuple[str, float, float], ...]


@dataclass(slots=True)
class Workload:
    """One workload's estimates, shared by all places and goals."""

    name: str
    file: ScenarioFile
    estimates: Estimates
    jobs: int
    known: dict[Candidate, StrategyRuns] = field(default_factory=dict)
    confirmed: dict[Candidate, StrategyRuns] = field(default_factory=dict)

    @classmethod
    def of(cls, name: str, starts: int, jobs: int, now: datetime) -> Workload:
        """With built-in prices of H100."""
        wishes = [
            "prices.cloud=null",
            "plan.gpu_types=[H100]",
            "plan.strategies=[reserved_only, spotlight, all_spot]",
            "plan.machine_sizes_max=1",
            "plan.parts=[gap, tsp, tag, subset]",
        ]
        file = load_scenario(name, wishes, starts=starts)
        return cls(name, file, Estimates(file, now), jobs)

    def on(self, cloud: str | None) -> ScenarioFile:
        """The scenario in one cloud, or in all."""
        return self.file.model_copy(update={"prices": self.file.prices.model_copy(update={"cloud": cloud})})

    def runs_of(self, candidates: Sequence[Candidate]) -> dict[Candidate, StrategyRuns]:
        """Their estimates, without those that say nothing of the target."""
        found = {one: self.known.get(one) or self.estimates.of(one) for one in candidates}
        self.known |= {one: runs for one, runs in found.items() if not isinstance(runs, str)}
        return {one: self.known[one] for one in candidates if one in self.known}

    def space(self, cloud: str | None) -> list[Candidate]:
        """Every cluster of a cloud, with no part, with all, and with a subset alone."""
        file = self.on(cloud)
        found, _ = grid(file, self.estimates.quotes)
        ways = ((), (PipelinePart.SUBSET,), file.usable_parts)
        names = [(one, {with_parts(one.strategy, parts) for parts in ways}) for one in found]
        return [replace(one, strategy=name) for one, each in names for name in sorted(each)]

    def own(self, strategy: str, cloud: str) -> StrategyRuns:
        """The scenario's own cluster in one cloud, parts of machines at their share of the price."""
        fixed, coming = self.file.cluster.reserved, self.file.cluster.spot
        alone = strategy == "reserved_only"
        one = Candidate(
            strategy,
            Machine(fixed.gpu_type, fixed.gpus_per_node),
            Machine(fixed.gpu_type, fixed.gpus_per_node)
            if alone
            else Machine(coming.gpu_type, coming.gpus_per_node),
            fixed.nodes,
            0 if alone else coming.nodes,
        )
        runs = Estimates(self.on(cloud), self.estimates.now).of(one)
        assert not isinstance(runs, str), runs
        return runs


def table_of(
    work: Workload, deadlines_h: Sequence[float], confirm_starts: int
) -> Iterator[TableRow | GoalRow]:
    """All rows of a workload."""
    spaces = {cloud: work.runs_of(work.space(cloud)) for cloud in CLOUDS}
    spaces[EVERYWHERE] = {one: runs for found in spaces.values() for one, runs in found.items()}
    spaces[EVERYWHERE] |= work.runs_of(work.space(None))
    alone = {cloud: work.own("reserved_only", cloud) for cloud in CLOUDS}
    alone[EVERYWHERE] = min(alone.values(), key=lambda runs: runs.target_usd.p50)
    for place, found in spaces.items():
        yield _row(work, place, "reserved only", "4 reserved H100, of a machine", alone[place])
        if place in CLOUDS:
            shipped = work.own("spotlight", place)
            yield _row(work, place, "shipped", "4 reserved + 8 spot H100, of machines", shipped)
        for deadline_h in deadlines_h:
            goal = Goal(deadline_h=deadline_h)
            best = min(found.items(), key=lambda item: goal.rank(item[1]))
            choice = f"best at {deadline_h:g} h" + ("" if goal.met_by(best[1]) else " (missed)")
            exact = _exact(work, best[0], confirm_starts)
            yield _row(work, place, choice, shape_of(best[0]), best[1], exact)
        yield _goals(work, place, found, alone[place], confirm_starts)


def _exact(work: Workload, candidate: Candidate, starts: int) -> StrategyRuns | None:
    if not starts:
        return None
    if candidate in work.confirmed:
        return work.confirmed[candidate]
    target = work.known[candidate].first.target
    assert target is not None, "useless ones are left out"
    file = work.file.model_copy(update={"run": work.file.run.model_copy(update={"starts": starts})})
    estimates = work.estimates
    prepared = prepared_for(file, candidate, target.iterations, estimates.now, estimates.quotes)
    tasks = tasks_from_starts(prepared, (candidate.strategy,))
    runs = StrategyRuns(tuple(one.outcome for one in run_tasks(tasks, work.jobs)))
    work.confirmed[candidate] = runs
    return runs


def _row(
    work: Workload, place: str, what: str, cluster: str, runs: StrategyRuns, exact: StrategyRuns | None = None
) -> TableRow:
    return TableRow(
        work.name,
        place,
        what,
        cluster,
        runs.target_h.p50,
        runs.ends_h,
        runs.target_usd.p50,
        runs.ends_usd,
        exact.target_h.p50 if exact else math.nan,
        exact.target_usd.p50 if exact else math.nan,
    )


def _goals(
    work: Workload,
    place: str,
    found: dict[Candidate, StrategyRuns],
    alone: StrategyRuns,
    confirm_starts: int,
) -> GoalRow:
    time, cost = alone.target_h.p50, alone.target_usd.p50
    affordable = [one for one, runs in found.items() if runs.target_usd.p50 <= cost]
    in_time = [one for one, runs in found.items() if runs.target_h.p50 <= time]
    fast = min(affordable, key=lambda one: found[one].target_h.p50, default=None)
    cheap = min(in_time, key=lambda one: found[one].target_usd.p50, default=None)
    levers: list[tuple[str, float, float]] = [("reserved GPUs alone", time, cost)]
    if cheap is not None:
        levers += _levers(work, place, cheap)
        cheapest = found[cheap]
        levers.append(("whole machines, sizes and places", cheapest.target_h.p50, cheapest.target_usd.p50))

    def factor(one: Candidate | None, of: Callable[[StrategyRuns], float], after: _After) -> Factor | None:
        if one is None:
            return None
        exact = _exact(work, one, confirm_starts)
        return Factor(
            of(alone) / of(found[one]),
            ratios(alone, found[one], after),
            of(alone) / of(exact) if exact else math.nan,
            shape_of(one),
        )

    faster = factor(fast, lambda runs: runs.target_h.p50, SimulationOutcome.hours_after)
    cheaper = factor(cheap, lambda runs: runs.target_usd.p50, SimulationOutcome.usd_after)
    return GoalRow(work.name, place, faster, cheaper, tuple(levers))


def _levers(work: Workload, place: str, cheap: Candidate) -> Iterator[tuple[str, float, float]]:
    """Those between the reserved GPUs alone and the cheapest cluster; of several clouds none."""
    if place not in CLOUDS:
        return
    file = work.on(place)
    here = Estimates(file, work.estimates.now)
    for name, candidate in lever_steps(file, cheap)[1:-1]:
        runs = here.of(candidate)
        if not isinstance(runs, str):
            yield name, runs.target_h.p50, runs.target_usd.p50


def _factor(found: Factor | None, goal: float) -> str:
    """``4.1x (3.2-5.0x; exactly 4.0x) of 5x: ...``."""
    if found is None:
        return f"none, of {goal:g}x"
    exactly = "" if math.isnan(found.exactly) else f"; exactly {found.exactly:.1f}x"
    least, most = found.ends
    return f"{found.p50:.1f}x ({least:.1f}-{most:.1f}x{exactly}) of {goal:g}x: {found.cluster}"


def show(rows: Sequence[TableRow | GoalRow]) -> str:
    """As Markdown."""
    lines = [
        "| | cloud | | cluster | to target | $ to target | simulated exactly |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        if isinstance(row, TableRow):
            time = f"{hours(row.hours_p50)} ({between(hours, *row.hours_range)})"
            cost = f"{usd(row.usd_p50)} ({between(usd, *row.usd_range)})"
            exact = "-" if math.isnan(row.exact_h) else f"{hours(row.exact_h)}, {usd(row.exact_usd)}"
            cells = (row.workload, row.place, row.what, row.cluster, time, cost, exact)
            lines.append(f"| {' | '.join(cells)} |")
    lines += ["", "| | cloud | faster for no more dollars | cheaper in no more time |", "|---|---|---|---|"]
    for row in rows:
        if isinstance(row, GoalRow):
            fast, cheap = _factor(row.faster, FASTER), _factor(row.cheaper, CHEAPER)
            lines.append(f"| {row.workload} | {row.place} | {fast} | {cheap} |")
    lines += ["", "| | cloud | lever | to target | $ to target |", "|---|---|---|---|---|"]
    for row in rows:
        if isinstance(row, GoalRow):
            for name, time_h, cost_usd in row.levers:
                lines.append(f"| {row.workload} | {row.place} | {name} | {hours(time_h)} | {usd(cost_usd)} |")
    return "\n".join(lines)


def main(
    workload: Annotated[list[str], typer.Option(help="Scenario; repeatable.")] = ["paper-512", "paper-1280"],  # noqa: B006
    deadline_h: Annotated[list[float], typer.Option(help="Hours; repeatable.")] = [2.0, 4.0, 8.0],  # noqa: B006
    starts: Annotated[int, typer.Option(help="Of each estimate.")] = 5,
    confirm_starts: Annotated[int, typer.Option(help="Of the exact simulations; 0: none.")] = 5,
    jobs: Annotated[int, typer.Option(help="Processes.")] = 1,
    json: Annotated[Path | None, typer.Option(help="Also write all rows here.")] = None,
) -> None:
    """Print the tables."""
    now = datetime.now(UTC)
    rows: list[TableRow | GoalRow] = []
    for name in workload:
        rows += table_of(Workload.of(name, starts, jobs, now), deadline_h, confirm_starts)
        if json is not None:
            json.parent.mkdir(parents=True, exist_ok=True)
            content = {"utc": now.isoformat(timespec="seconds"), "rows": [asdict(row) for row in rows]}
            json.write_text(json_format.dumps(content, indent=2) + "\n", encoding="utf-8")
    print(show(rows))


if __name__ == "__main__":
    typer.run(main)
