"""Search the simulator for a cluster that meets a deadline or a budget.

1. Grid: strategies x GPU types (each alone, and the scenario's own pair) x reserved nodes x spot nodes
   (doublings around the scenario's numbers, unless it lists others). Each candidate is simulated for
   ``plan.iterations`` and extrapolated to its target.
2. Up to :data:`ROUNDS` refinements: midpoints between the best candidate and its neighbours.
3. Pipeline parts: on every cluster of a strategy every combination of ``plan.parts``; where these are too
   many, all and none, then single parts more or fewer around the :data:`SETTLED` best, then what pays
   there on every cluster. A part that gains less than the noise is not recommended. Refined again, and single
   parts tried there.
4. The best :data:`CONFIRMED` candidates that meet the goal are simulated to their targets from every start,
   else the next as many. The best of those that still meet it is recommended: a goal must hold at p90,
   because it is a promise; what is left open is ranked by p50, because p90 of a few starts is one bad start.

At most ``plan.candidates_max`` candidates are simulated, shared evenly by the strategies that try parts.
Those that cannot be simulated (memory, prices, figures, divisibility) or explore too little are left out,
with the reason. The search is deterministic.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from itertools import pairwise

from spotlight.config.errors import ConfigError, Problem
from spotlight.planning.candidates import Candidate, grid, prepared_for, shape_of
from spotlight.planning.compare import (
    PREVIEWS_WANTED,
    SimulationOutcome,
    SimulationTask,
    run_tasks,
    standard_error,
)
from spotlight.planning.prices.quotes import PriceError
from spotlight.planning.scenarios.scenario_file import ScenarioFile
from spotlight.planning.scenarios.strategies import (
    PipelinePart,
    strategy_named,
    variants,
    with_parts,
    without_part,
)
from spotlight.planning.strategy_runs import StrategyRuns, grouped, tasks_from_starts

ROUNDS = 3
SETTLED = 3
"""Clusters of a strategy of which single parts are tried."""
CONFIRMED = 5
"""Candidates simulated to their target at a time."""
GAIN_MIN = 0.01
"""A pipeline part must shorten an iteration by this share, and by two standard errors of the differences."""


@dataclass(frozen=True, slots=True)
class Goal:
    """A deadline or a budget: exactly one is not None."""

    deadline_h: float | None = None
    budget_usd: float | None = None

    def __post_init__(self) -> None:
        given = [value for value in (self.deadline_h, self.budget_usd) if value is not None]
        if len(given) != 1 or not 0 < given[0] < float("inf"):
            found = f"deadline {self.deadline_h} h, budget {self.budget_usd} $"
            remedy = "For example: --deadline-h 24."
            problem = Problem("--deadline-h, --budget-usd", found, "exactly one, above 0", remedy)
            raise ConfigError("the goal", [problem])

    def met_by(self, runs: StrategyRuns) -> bool:
        """Whether p90 of time or cost to target is within the goal."""
        if self.deadline_h is not None:
            return runs.target_h.p90 <= self.deadline_h
        assert self.budget_usd is not None
        return runs.target_usd.p90 <= self.budget_usd

    def rank(self, runs: StrategyRuns) -> tuple[bool, float, float]:
        """Sort key: goals met first, by p50 of the quantity left open; else p90's distance to it."""
        time, cost = runs.target_h, runs.target_usd
        bound, free = (time, cost) if self.deadline_h is not None else (cost, time)
        return (False, free.p50, bound.p50) if self.met_by(runs) else (True, bound.p90, free.p50)


@dataclass(frozen=True, slots=True)
class EvaluatedCandidate:
    """A candidate and its metrics; ``whole`` if simulated to its target, from every start."""

    candidate: Candidate
    runs: StrategyRuns
    whole: bool = False

    @property
    def outcome(self) -> SimulationOutcome:
        """From the scenario's own start."""
        return self.runs.first


@dataclass(frozen=True, slots=True)
class SearchResult:
    """Result of a search.

    Attributes:
        evaluated: every simulated candidate, by strategy, type and size.
        front: Pareto front in time and cost, fastest first.
        answer: simulated to its target; None if nothing meets the goal.
        rejected: met the goal by extrapolation, but not when simulated to their target.
        parts: pipeline parts removed, retained and not tried, per strategy.
        left_out: candidates that could not be simulated, and why.
    """

    goal: Goal
    evaluated: tuple[EvaluatedCandidate, ...]
    front: tuple[EvaluatedCandidate, ...]
    answer: EvaluatedCandidate | None
    rejected: tuple[EvaluatedCandidate, ...]
    parts: tuple[str, ...]
    left_out: tuple[str, ...]

    @property
    def nearest(self) -> EvaluatedCandidate:
        """The best candidate when none meets the goal."""
        return min(self.evaluated, key=lambda one: self.goal.rank(one.runs))


@dataclass(slots=True)
class _SearchState:
    file: ScenarioFile
    goal: Goal
    now: datetime
    jobs: int
    progress: Callable[[str], None]
    done: dict[Candidate, EvaluatedCandidate] = field(default_factory=dict)
    tried: set[Candidate] = field(default_factory=set)
    lengths_s: dict[Candidate, tuple[float, ...]] = field(default_factory=dict)
    """Of the iterations after the first, of all that was simulated, useless or not."""
    left_out: dict[str, list[str]] = field(default_factory=dict)
    limit: int = 0
    """Candidates up to which may be simulated now."""

    def __post_init__(self) -> None:
        self.limit = self.file.plan.candidates_max

    def simulate(self, candidates: Sequence[Candidate]) -> None:
        """Simulate new, feasible candidates, up to the limit."""
        tasks: dict[Candidate, SimulationTask] = {}
        for candidate in candidates:
            if candidate in self.tried:
                continue
            if len(self.done) + len(tasks) >= self.limit:
                self._leave_out(candidate, "plan.candidates_max is reached")
                continue
            self.tried.add(candidate)
            try:
                prepared = prepared_for(self.file, candidate, self.file.plan.iterations, self.now)
            except (ConfigError, PriceError) as error:
                self._leave_out(candidate, str(error).splitlines()[-1].strip(" -"))
                continue
            tasks[candidate] = SimulationTask(prepared, candidate.strategy)
        results = run_tasks(list(tasks.values()), self.jobs, lambda task: self.progress(task.strategy))
        for candidate, compared in zip(tasks, results, strict=True):
            ends_s = compared.iteration_ends_s
            self.lengths_s[candidate] = tuple(after - before for before, after in pairwise(ends_s))
            if (reason := useless(compared.outcome)) is not None:
                self._leave_out(candidate, reason)
            else:
                self.done[candidate] = EvaluatedCandidate(candidate, StrategyRuns((compared.outcome,)))

    def _leave_out(self, candidate: Candidate, reason: str) -> None:
        self.left_out.setdefault(reason, []).append(shape_of(self.file, candidate))

    def reasons(self) -> tuple[str, ...]:
        """Reasons for leaving candidates out, each with its first example."""
        return tuple(
            f"{shapes[0]}{f' and {len(shapes) - 1} more' if len(shapes) > 1 else ''}: {reason}"
            for reason, shapes in self.left_out.items()
        )

    def best(self, strategy: str | None = None) -> list[EvaluatedCandidate]:
        """Candidates that may be recommended, best first; of a strategy with any parts, or of all."""
        able = (
            one
            for one in self.done.values()
            if (strategy is None or _is_of(one.candidate.strategy, strategy)) and self._pays(one.candidate)
        )
        return sorted(able, key=lambda one: (*self.goal.rank(one.runs), one.candidate))

    def settle(self, strategy: str) -> None:
        """Try single parts more and fewer, until those of the best clusters are the best there."""
        parts, before = self.file.usable_parts, -1
        while before != len(self.tried):
            before = len(self.tried)
            tops: dict[Candidate, str] = {}
            for one in self.best(strategy):
                tops.setdefault(_as(one.candidate, strategy), one.candidate.strategy)
            for cluster, name in list(tops.items())[:SETTLED]:
                fewer = [without_part(name, part) for part in strategy_named(name).parts]
                more = [with_parts(name, (part,)) for part in parts]
                near = {other for other in (*fewer, *more) if _is_of(other, strategy)}
                self.simulate([_as(cluster, other) for other in sorted(near)])

    def _pays(self, one: Candidate) -> bool:
        """Whether each part shortens iterations by more than the noise, as far as that was tried."""
        parts = strategy_named(one.strategy).parts
        others = [_as(one, without_part(one.strategy, part)) for part in parts]
        return all(
            shortens(self.lengths_s[one], self.lengths_s[other]) for other in others if other in self.done
        )

    def refinements(self) -> Iterator[Candidate]:
        """Midpoints between the best candidate and its neighbours on both axes."""
        best = self.best()[0].candidate
        alike = [one for one in self.done if _kind(one) == _kind(best)]
        for nodes in _midpoints(sorted({one.reserved_nodes for one in alike}), best.reserved_nodes):
            yield replace(best, reserved_nodes=nodes)
        if best.spot_nodes:
            for nodes in _midpoints(sorted({one.spot_nodes for one in alike}), best.spot_nodes):
                yield replace(best, spot_nodes=nodes)


def search(
    file: ScenarioFile,
    goal: Goal,
    now: datetime,
    *,
    jobs: int = 1,
    progress: Callable[[str], None] = lambda strategy: None,
) -> SearchResult:
    """Find the cheapest cluster within a deadline, or the fastest within a budget.

    Args:
        progress: called after each simulation.

    Raises:
        ConfigError: a strategy lacks ``iterations_to_target``, or no candidate can be simulated.
    """
    _require_targets(file)
    state = _SearchState(file, goal, now, jobs, progress)
    state.simulate(grid(file))
    _refine(state)
    parts_found = _every_part(state)
    if not state.done:
        reasons = "; ".join(state.reasons()) or "an empty grid"
        problem = Problem("plan", reasons, "a candidate that can be simulated", "Change the scenario.")
        raise ConfigError(file.name, [problem])
    _refine(state)
    for strategy in file.plan.strategies:
        state.settle(strategy)
    answer, rejected = _checked(state)
    everything = tuple(state.done[candidate] for candidate in sorted(state.done))
    parts = tuple(filter(None, parts_found))
    return SearchResult(goal, everything, pareto(state.best()), answer, rejected, parts, state.reasons())


def _refine(state: _SearchState) -> None:
    for _ in range(ROUNDS if state.done else 0):
        before = len(state.tried)
        state.simulate(list(state.refinements()))
        if len(state.tried) == before:
            break


def _every_part(state: _SearchState) -> list[str]:
    """Try parts of every strategy, each with its share of what may still be simulated."""
    wish, found = state.file.plan, []
    for number, strategy in enumerate(wish.strategies):
        left = wish.candidates_max - len(state.done)
        state.limit = len(state.done) + left // (len(wish.strategies) - number)
        found.append(_parts(state, strategy))
    state.limit = wish.candidates_max
    return found


def _parts(state: _SearchState, strategy: str) -> str:
    """Try parts on every cluster of a strategy, and report what pays on the best.

    Every combination, if that many may be simulated; else all parts and none on every cluster, single parts
    more and fewer around the best ones, and what pays there on every cluster.
    """
    names = variants(strategy, state.file.usable_parts)
    everything = with_parts(strategy, state.file.usable_parts)
    clusters = sorted(one for one in state.lengths_s if one.strategy == strategy)
    if not clusters or len(names) == 1:
        return ""
    if len(state.done) + len(clusters) * (len(names) - 1) <= state.limit:
        state.simulate([_as(one, name) for name in names for one in clusters])
    else:
        state.simulate([_as(one, everything) for one in clusters])
        state.settle(strategy)
        for best in state.best(strategy)[:1]:
            state.simulate([_as(one, best.candidate.strategy) for one in clusters])
    state.settle(strategy)
    return _told(state, strategy, {part for name in names for part in strategy_named(name).parts})


def _told(state: _SearchState, strategy: str, parts: set[PipelinePart]) -> str:
    """What pays on the best cluster of a strategy, what of it does not, and what was not tried there."""
    ranked = state.best(strategy)
    if not ranked:
        return ""
    best = ranked[0].candidate
    tried = {
        part
        for one in state.lengths_s
        if _is_of(one.strategy, strategy) and _as(one, strategy) == _as(best, strategy)
        for part in strategy_named(one.strategy).parts
    }
    off = {part for part in parts & tried if with_parts(best.strategy, (part,)) != best.strategy}
    alone = "nothing pays" if off else "nothing was tried"
    pays = alone if best.strategy == strategy else f"{best.strategy} pays"
    told = [f"{shape_of(state.file, _as(best, strategy))}: {pays}"]
    for heading, some in (("left off", off), ("not tried", parts - tried)):
        if some:
            told.append(f"{heading}: {', '.join(f'+{part}' for part in PipelinePart if part in some)}")
    return "; ".join(told)


def useless(outcome: SimulationOutcome) -> str | None:
    """Why an outcome says nothing about the target, or None.

    Without previews a strategy trains on random seeds, and its iterations to target do not apply.
    """
    if outcome.problem is not None:
        return outcome.problem
    if outcome.preview_share < PREVIEWS_WANTED:
        return f"less than {PREVIEWS_WANTED:.0%} of the previews could be used: too little idle time for them"
    if outcome.no_target:
        return outcome.no_target
    if math.isnan(outcome.target_h):
        return "too few iterations were done"
    return None


def shortens(with_part_s: Sequence[float], without_s: Sequence[float]) -> bool:
    """Whether a part shortens iterations, of the same seed and trace, by more than their noise.

    They are compared one by one, because they share most of it.
    """
    gains_s = [before - after for before, after in zip(without_s, with_part_s, strict=False)]
    least_s = max(2 * standard_error(gains_s), GAIN_MIN * sum(without_s) / len(without_s))
    return sum(gains_s) / len(gains_s) > least_s


def pareto(evaluated: Sequence[EvaluatedCandidate]) -> tuple[EvaluatedCandidate, ...]:
    """Pareto front in time and cost, fastest first."""
    front: list[EvaluatedCandidate] = []
    for one in sorted(evaluated, key=lambda one: (one.outcome.target_h, one.outcome.target_usd)):
        if not front or one.outcome.target_usd < front[-1].outcome.target_usd:
            front.append(one)
    return tuple(front)


def _is_of(name: str, strategy: str) -> bool:
    """Whether ``name`` is the strategy with any further parts."""
    base, *parts = strategy.split("+")
    return name.split("+")[0] == base and set(parts) <= set(name.split("+"))


def _kind(candidate: Candidate) -> tuple[str, str, str]:
    return candidate.strategy, candidate.gpu_type, candidate.spot_gpu_type


def _as(candidate: Candidate, strategy: str) -> Candidate:
    return replace(candidate, strategy=strategy)


def _checked(state: _SearchState) -> tuple[EvaluatedCandidate | None, tuple[EvaluatedCandidate, ...]]:
    rejected: list[EvaluatedCandidate] = []
    meeting = [one.candidate for one in state.best() if state.goal.met_by(one.runs)]
    for first in range(0, len(meeting), CONFIRMED):
        wholes = _whole(state, meeting[first : first + CONFIRMED])
        passed = [one for one in wholes if _finished(one.runs) and state.goal.met_by(one.runs)]
        rejected += [one for one in wholes if one not in passed]
        if passed:
            best = min(passed, key=lambda one: (*state.goal.rank(one.runs), one.candidate))
            return best, tuple(rejected)
    return None, tuple(rejected)


def _finished(runs: StrategyRuns) -> bool:
    return all(one.problem is None for one in runs.outcomes)


def _whole(state: _SearchState, candidates: Sequence[Candidate]) -> list[EvaluatedCandidate]:
    """Simulate candidates to their targets, from every start."""
    tasks: list[SimulationTask] = []
    for candidate in candidates:
        target = state.done[candidate].outcome.target
        assert target is not None, "every strategy has a target"
        prepared = prepared_for(state.file, candidate, target.iterations, state.now)
        tasks += tasks_from_starts(prepared, (candidate.strategy,))
    results = run_tasks(tasks, state.jobs, lambda task: state.progress(task.strategy))
    found = grouped([result.outcome for result in results], state.file.run.starts)
    return [EvaluatedCandidate(one, runs, whole=True) for one, runs in zip(candidates, found, strict=True)]


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


def _midpoints(values: Sequence[int], around: int) -> Iterator[int]:
    place = bisect_left(values, around)
    for neighbour in (*values[max(0, place - 1) : place], *values[place + 1 : place + 2]):
        middle = (around + neighbour) // 2
        if middle not in {around, neighbour}:
            yield middle
