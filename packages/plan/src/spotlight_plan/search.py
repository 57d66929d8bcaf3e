"""Search for a cluster that meets a goal: the closed form ranks all candidates, exact simulation confirms.

1. Candidates: strategies x GPU types (each alone, and the scenario's own pair) x machines and places of the
   price source, for each pool x reserved nodes x spot nodes (GPUs in steps of a half around the scenario's,
   unless it lists numbers) x ways to run it (parts of the pipeline, share that begins early, previews).
2. Each is taken to its target from every start by :mod:`spotlight_plan.closed_form`. A part that shortens
   a run by less than :data:`~spotlight_plan.estimates.GAIN_MIN` is left off.
3. Of those that meet the goal, or miss it by less than :data:`SLACK`, the best :data:`CONFIRMED` are
   simulated exactly for ``plan.iterations`` from every start, else the next as many. The simulation corrects
   the closed form, which still says how the rest of the trace compares with the part that was simulated. The
   best of those that then meet the goal is recommended: a goal must hold at p90, because it is a promise;
   what is left open is ranked by p50, because p90 of a few starts is one bad start.

Candidates that cannot be simulated (memory, prices, figures, divisibility) or explore too little are left
out, with the reason. The search is deterministic.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from functools import partial
from itertools import count
from typing import Literal, TypeAlias

from spotlight_plan.candidates import Candidate, grid, order_of, prepared_for
from spotlight_plan.closed_form import HORIZON_H
from spotlight_plan.compare import SimulationOutcome, run_tasks
from spotlight_plan.estimates import Estimates
from spotlight_plan.processes import in_processes
from spotlight_plan.scenarios.prepared_scenario import at_starts
from spotlight_plan.scenarios.scenario_file import ScenarioFile
from spotlight_plan.scenarios.scenario_sections import Target
from spotlight_plan.scenarios.strategies import strategy_named
from spotlight_plan.strategy_runs import StrategyRuns, grouped, known_or_inf, tasks_from_starts
from spotlight_rewards.base.errors import ConfigError, Problem

CONFIRMED = 3
"""Candidates simulated at a time."""
ROUNDS = 3
"""How often the next are simulated, where none of those before meets the goal."""
SLACK = 0.03
"""About the closed form's error: so much of the goal may be missed before the simulation."""
SHARED, PART = 64, 16
"""So many clusters are ranked in several processes, each so many at a time."""
ROOM = 4.0
"""A simulation that takes more than so many times what the closed form says is given up."""


@dataclass(frozen=True, slots=True)
class Goal:
    """A deadline or a budget: exactly one is not None."""

    deadline_h: float | None = None
    budget_usd: float | None = None

    def __post_init__(self) -> None:
        given = [value for value in (self.deadline_h, self.budget_usd) if value is not None]
        if len(given) != 1 or not 0 < given[0] < float("inf"):
            found = " and ".join(map(str, given)) or "neither"
            remedy = "For example: --deadline-h 24."
            problem = Problem("--deadline-h, --budget-usd", found, "exactly one, above 0", remedy)
            raise ConfigError("the goal", [problem])

    def met_by(self, runs: StrategyRuns, slack: float = 0.0) -> bool:
        """Whether p90 of time or cost to target is within the goal, or misses it by this share at most."""
        if self.deadline_h is not None:
            return runs.target_h.p90 <= self.deadline_h * (1 + slack)
        assert self.budget_usd is not None
        return runs.target_usd.p90 <= self.budget_usd * (1 + slack)

    def rank(self, runs: StrategyRuns) -> tuple[bool, float, float]:
        """Sort key: goals met first, by p50 of the quantity left open; else p90's distance to it.

        What a start without a target decides is the farthest.
        """
        time, cost = runs.target_h, runs.target_usd
        bound, free = (time, cost) if self.deadline_h is not None else (cost, time)
        if self.met_by(runs):
            return False, known_or_inf(free.p50), known_or_inf(bound.p50)
        return True, known_or_inf(bound.p90), known_or_inf(free.p50)


@dataclass(frozen=True, slots=True)
class EvaluatedCandidate:
    """A candidate and its metrics from every start: by the closed form, or ``simulated``."""

    candidate: Candidate
    runs: StrategyRuns
    simulated: bool = False

    @property
    def outcome(self) -> SimulationOutcome:
        """From the scenario's own start."""
        return self.runs.first


@dataclass(frozen=True, slots=True)
class SearchResult:
    """Result of a search.

    Attributes:
        evaluated: every candidate by the closed form, by strategy, machines and size.
        front: Pareto front in time and cost, fastest first.
        answer: simulated; None if nothing meets the goal.
        confirmed: simulated, whether or not they then met the goal.
        left_out: candidates that could not be simulated, and why.
    """

    goal: Goal
    evaluated: tuple[EvaluatedCandidate, ...]
    front: tuple[EvaluatedCandidate, ...]
    answer: EvaluatedCandidate | None
    confirmed: tuple[EvaluatedCandidate, ...]
    left_out: tuple[str, ...]

    @property
    def rejected(self) -> tuple[EvaluatedCandidate, ...]:
        """Simulated, and then missed the goal."""
        return tuple(one for one in self.confirmed if not self.goal.met_by(one.runs))

    @property
    def nearest(self) -> EvaluatedCandidate:
        """The best candidate when none meets the goal: as simulated, or else by the closed form."""
        simulated = {one.candidate: one for one in self.rejected}
        known = (simulated.get(one.candidate, one) for one in self.evaluated)
        return min(known, key=lambda one: self.goal.rank(one.runs))


@dataclass(frozen=True, slots=True)
class SearchStep:
    """How far a search is.

    Attributes:
        what: of the clusters by the closed form, or of the best few by exact simulation.
        done, of: clusters or simulations.
        best: of what is ranked so far, by the closed form; None: nothing yet.
    """

    what: Literal["ranked", "simulated"]
    done: int
    of: int
    best: EvaluatedCandidate | None


def search(
    file: ScenarioFile,
    goal: Goal,
    now: datetime,
    *,
    jobs: int = 1,
    progress: Callable[[SearchStep], None] = lambda step: None,
) -> SearchResult:
    """Find the cheapest cluster within a deadline, or the fastest within a budget.

    Args:
        progress: called before the first cluster, and after each cluster and each simulation.

    Raises:
        ConfigError: a strategy lacks ``iterations_to_target``, or no candidate can be simulated.
    """
    _require_targets(file)
    estimates = Estimates(file, now)
    candidates, without = grid(file, estimates.quotes)
    for shape, reason in without:
        estimates.left_out.setdefault(reason, {})[shape] = None
    evaluated: list[EvaluatedCandidate] = []
    best: EvaluatedCandidate | None = None
    progress(SearchStep("ranked", 0, len(candidates), best))
    for done, ways_found in enumerate(_worth_it(estimates, candidates, jobs), 1):
        for found in ways_found:
            evaluated.append(EvaluatedCandidate(*found))
            best = min(best or evaluated[-1], evaluated[-1], key=lambda one: goal.rank(one.runs))
        progress(SearchStep("ranked", done, len(candidates), best))
    if not evaluated:
        reasons = "; ".join(estimates.reasons()) or "an empty grid"
        problem = Problem("plan", reasons, "a candidate that can be simulated", "Change the scenario.")
        raise ConfigError(file.name, [problem])
    ranked = sorted(evaluated, key=lambda one: (*goal.rank(one.runs), order_of(one.candidate)))
    able = list(_different(one for one in ranked if goal.met_by(one.runs, SLACK)))

    def simulated(done: int, of: int) -> None:
        progress(SearchStep("simulated", done, of, best))

    confirmed: list[EvaluatedCandidate] = []
    answer: EvaluatedCandidate | None = None
    for first in range(0, min(len(able), ROUNDS * CONFIRMED), CONFIRMED):
        chosen = able[first : first + CONFIRMED]
        confirmed += confirm(estimates, chosen, jobs, simulated)
        passed = [one for one in confirmed if goal.met_by(one.runs)]
        if passed:
            answer = min(passed, key=lambda one: (*goal.rank(one.runs), order_of(one.candidate)))
            break
    by_order = tuple(sorted(evaluated, key=lambda one: order_of(one.candidate)))
    return SearchResult(goal, by_order, pareto(ranked), answer, tuple(confirmed), estimates.reasons())


_Ways: TypeAlias = list[tuple[Candidate, StrategyRuns]]


def _worth_it(estimates: Estimates, clusters: Sequence[Candidate], jobs: int) -> Iterator[_Ways]:
    """The ways that are worth it of each cluster, in order; of many clusters in several processes."""
    if jobs == 1 or len(clusters) < SHARED:
        yield from (list(estimates.worth_it(cluster)) for cluster in clusters)
        return
    parts = [clusters[first : first + PART] for first in range(0, len(clusters), PART)]
    for found, left_out in in_processes(partial(_worth_it_here, estimates), parts, jobs):
        for reason, shapes in left_out.items():
            estimates.left_out.setdefault(reason, {}).update(shapes)
        yield from found


def _worth_it_here(
    estimates: Estimates, clusters: Sequence[Candidate]
) -> tuple[list[_Ways], dict[str, dict[str, None]]]:
    """In a process of its own."""
    estimates.left_out = {}
    return [list(estimates.worth_it(cluster)) for cluster in clusters], estimates.left_out


def _different(ranked: Iterable[EvaluatedCandidate]) -> Iterator[EvaluatedCandidate]:
    """Without those that only add what changes nothing, such as a node on demand that is never taken."""
    known: set[tuple[object, ...]] = set()
    for one in ranked:
        cluster = replace(one.candidate, strategy="", next_share=None)
        figures = (cluster, *((start.target_h, start.target_usd) for start in one.runs.outcomes))
        if figures not in known:
            known.add(figures)
            yield one


def confirm(
    estimates: Estimates,
    candidates: Sequence[EvaluatedCandidate],
    jobs: int,
    progress: Callable[[int, int], None] = lambda done, of: None,
) -> list[EvaluatedCandidate]:
    """Simulate candidates for ``plan.iterations`` from every start; ``progress`` hears how many are done."""
    file, number = estimates.file, estimates.file.plan.iterations
    prepared = [
        prepared_for(_cut(file, one.runs), one.candidate, number, estimates.now, estimates.quotes)
        for one in candidates
    ]
    tasks = [
        task
        for one, each in zip(candidates, prepared, strict=True)
        for task in tasks_from_starts(each, (one.candidate.strategy,))
    ]
    numbers = count()
    progress(next(numbers), len(tasks))
    results = run_tasks(tasks, jobs, lambda task: progress(next(numbers), len(tasks)))
    found = grouped([result.outcome for result in results], file.run.starts)
    confirmed = []
    for one, each, exact in zip(candidates, prepared, found, strict=True):
        starts = at_starts(each)
        form = estimates.form(each, one.candidate, starts)
        outcomes = (
            corrected(simulated, form.outcome(start, seen=number), whole)
            for simulated, start, whole in zip(exact.outcomes, starts, one.runs.outcomes, strict=True)
        )
        confirmed.append(replace(one, runs=StrategyRuns(tuple(outcomes)), simulated=True))
    return confirmed


def _cut(file: ScenarioFile, runs: StrategyRuns) -> ScenarioFile:
    """With as much of the trace as ``plan.iterations`` can need: weeks of many nodes take long to prepare.

    A generated trace of another length is another trace; where it is as long as the closed form's, the same.
    """
    longest_h = max(known_or_inf(one.hours_after(file.plan.iterations)) for one in runs.outcomes)
    until_h = min(file.run.until_h, max(HORIZON_H, ROOM * longest_h))
    return file.model_copy(update={"run": file.run.model_copy(update={"until_h": until_h})})


def corrected(
    simulated: SimulationOutcome, seen: SimulationOutcome, whole: SimulationOutcome
) -> SimulationOutcome:
    """A simulation of a run's first iterations, taken to its target.

    Args:
        seen, whole: the closed form of the same iterations, and of the run to its target: later iterations
            last as much longer, and explore as much less, as it says.
    """
    if simulated.problem or simulated.target is None or whole.target is None or seen.target is None:
        return simulated
    slower, dearer = whole.iteration_s / seen.iteration_s, whole.iteration_usd / seen.iteration_usd
    more = whole.target.iterations / seen.target.iterations
    fewest, most = (math.ceil(more * end) for end in simulated.target.ends)
    iterations = math.ceil(more * simulated.target.iterations)
    value = (fewest, iterations, most) if fewest < most else iterations
    reached = replace(
        simulated,
        iteration_s=simulated.iteration_s * slower,
        iteration_usd=simulated.iteration_usd * dearer,
        target=Target(value=value, source=simulated.target.source),
    )
    return replace(
        reached, target_h=reached.hours_after(iterations), target_usd=reached.usd_after(iterations)
    )


def pareto(evaluated: Sequence[EvaluatedCandidate]) -> tuple[EvaluatedCandidate, ...]:
    """Pareto front in p50 of time and cost, fastest first; without those that have none."""
    front: list[EvaluatedCandidate] = []
    known = [one for one in evaluated if not math.isnan(one.runs.target_h.p50 + one.runs.target_usd.p50)]
    for one in sorted(known, key=lambda one: (one.runs.target_h.p50, one.runs.target_usd.p50)):
        if not front or one.runs.target_usd.p50 < front[-1].runs.target_usd.p50:
            front.append(one)
    return tuple(front)


def _require_targets(file: ScenarioFile) -> None:
    problems = [
        Problem(f"iterations_to_target.{name}", "nothing", "value and source", "Planning needs it.")
        for name in file.plan.strategies
        if file.target_of(strategy_named(name)) is None
    ]
    if file.exploration is None:
        problems += [
            Problem("exploration", "nothing", f"a section, for {name}", "Or set plan.strategies.")
            for name in file.plan.strategies
            if strategy_named(name).explore is not None
        ]
    if problems:
        raise ConfigError(file.name, problems)
