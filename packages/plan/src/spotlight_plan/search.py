"""Search for a cluster that meets a goal: a fast estimate proposes, exact simulation confirms.

1. Grid: strategies x GPU types (each alone, and the scenario's own pair) x machines and places of the price
   source, for each pool x reserved nodes x spot nodes (GPUs in doublings around the scenario's, unless it
   lists numbers). Each is estimated to its target from every start (:mod:`spotlight_plan.surrogate`):
   short exact simulations, which all prices, places and starts share.
2. Up to :data:`ROUNDS` refinements: midpoints between the best candidate and its neighbours.
3. Ways to run it (parts of the pipeline, share that begins early, previews): on every cluster of a strategy
   every combination; where these are too many, all parts and none, then single changes around the
   :data:`SETTLED` best, then what pays there on every cluster. A part that gains less than the noise is not
   recommended. Refined again, and single changes tried there.
4. A strategy that only adds nodes on demand to another: wherever that was tried, without further simulations.
5. The best :data:`CONFIRMED` candidates that meet the goal are simulated to their targets from every start,
   else the next as many. The best of those that still meet it is recommended: a goal must hold at p90,
   because it is a promise; what is left open is ranked by p50, because p90 of a few starts is one bad start.

At most ``plan.candidates_max`` short simulations are made, shared evenly by the strategies that try parts.
Those that cannot be simulated (memory, prices, figures, divisibility) or explore too little are left out,
with the reason. The search is deterministic.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime

from spotlight_plan.candidates import (
    Candidate,
    grid,
    order_of,
    prepared_for,
    previews_of,
    shape_of,
    shares_of,
    ways,
)
from spotlight_plan.compare import (
    PREVIEWS_WANTED,
    SimulationOutcome,
    SimulationTask,
    run_tasks,
    standard_error,
)
from spotlight_plan.estimates import Estimates, family_of
from spotlight_plan.scenarios.scenario_file import ScenarioFile
from spotlight_plan.scenarios.strategies import (
    PipelinePart,
    strategy_named,
    where_nodes_stay,
    with_parts,
    without_part,
)
from spotlight_plan.strategy_runs import StrategyRuns, grouped, known_or_inf, tasks_from_starts
from spotlight_rewards.base.errors import ConfigError, Problem

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
    """A candidate and its metrics from every start: estimated, or simulated to its target (``whole``)."""

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
        evaluated: every estimated candidate, by strategy, machines and size.
        front: Pareto front in time and cost, fastest first.
        answer: simulated to its target; None if nothing meets the goal.
        confirmed: simulated to their targets, whether or not they then met the goal.
        rejected: met the goal by the estimate, but not when simulated to their target.
        parts: pipeline parts removed, retained and not tried, per strategy.
        left_out: candidates that could not be simulated, and why.
        simulated: short simulations made.
    """

    goal: Goal
    evaluated: tuple[EvaluatedCandidate, ...]
    front: tuple[EvaluatedCandidate, ...]
    answer: EvaluatedCandidate | None
    confirmed: tuple[EvaluatedCandidate, ...]
    rejected: tuple[EvaluatedCandidate, ...]
    parts: tuple[str, ...]
    left_out: tuple[str, ...]
    simulated: int

    @property
    def nearest(self) -> EvaluatedCandidate:
        """The best candidate when none meets the goal: as simulated whole, or else by its estimate."""
        wholes = {one.candidate: one for one in self.rejected}
        known = (wholes.get(one.candidate, one) for one in self.evaluated)
        return min(known, key=lambda one: self.goal.rank(one.runs))


@dataclass(slots=True)
class _SearchState:
    file: ScenarioFile
    goal: Goal
    estimates: Estimates
    done: dict[Candidate, EvaluatedCandidate] = field(default_factory=dict)
    steady_s: dict[Candidate, tuple[float, ...]] = field(default_factory=dict)
    """Lengths of iterations of those done, under the strategy without nodes on demand."""

    def try_all(self, candidates: Sequence[Candidate]) -> None:
        """Estimate new candidates, as far as short simulations are left."""
        for candidate, runs in self.estimates.of(candidates).items():
            if (reason := useless(runs.first)) is not None:
                self.estimates.leave_out(candidate, reason)
            else:
                self.done[candidate] = EvaluatedCandidate(candidate, runs)
                self.steady_s[_where_nodes_stay(candidate)] = self.estimates.lengths_s[candidate]

    def add_on_demand(self, strategy: str) -> None:
        """Try a strategy that takes nodes on demand wherever the same was tried without.

        One that takes none by the estimate is left out: it would be confirmed in the place of another.
        """
        plain = where_nodes_stay(strategy)
        tried = [one for one in self.estimates.lengths_s if _is_of(one.strategy, plain)]
        pairs = {_as(one, with_parts(strategy, strategy_named(one.strategy).parts)): one for one in tried}
        self.try_all([*pairs])
        for candidate, simpler in pairs.items():
            both = self.done.get(candidate), self.done.get(simpler)
            if both[0] is not None and both[1] is not None and both[0].runs.lasts_as(both[1].runs):
                del self.done[candidate]
                self.estimates.leave_out(
                    candidate, f"takes no node on demand by the estimate, as {simpler.strategy}"
                )

    def best(self, strategy: str | None = None) -> list[EvaluatedCandidate]:
        """Candidates that may be recommended, best first; of a strategy with any parts, or of all."""
        able = (
            one
            for one in self.done.values()
            if (strategy is None or _is_of(one.candidate.strategy, strategy)) and self._pays(one.candidate)
        )
        return sorted(able, key=lambda one: (*self.goal.rank(one.runs), order_of(one.candidate)))

    def settle(self, strategy: str) -> None:
        """Try single changes of the way to run, until those of the best clusters are the best there."""
        before = -1
        while before != len(self.estimates.tried):
            before = len(self.estimates.tried)
            tops: dict[Candidate, Candidate] = {}
            for one in self.best(strategy):
                tops.setdefault(_cluster(one.candidate, strategy), one.candidate)
            for best in list(tops.values())[:SETTLED]:
                self.try_all(sorted(self._near(best, strategy), key=order_of))

    def _near(self, best: Candidate, strategy: str) -> set[Candidate]:
        """A part more or less, another share that begins early, or other previews."""
        name, parts = best.strategy, self.file.usable_parts
        fewer = [without_part(name, part) for part in strategy_named(name).parts]
        more = [with_parts(name, (part,)) for part in parts]
        others = {_as(best, other) for other in (*fewer, *more) if _is_of(other, strategy)}
        others |= {replace(best, next_share=share) for share in shares_of(self.file, name)}
        return others | {replace(best, previews=arm) for arm in previews_of(self.file, name)}

    def _pays(self, one: Candidate) -> bool:
        """Whether each part shortens iterations by more than the noise, as far as that was tried."""
        plain = _where_nodes_stay(one)
        others = [
            _as(plain, without_part(plain.strategy, part)) for part in strategy_named(one.strategy).parts
        ]
        return all(
            shortens(self.steady_s[plain], self.steady_s[other]) for other in others if other in self.steady_s
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
    # Nodes on demand need no short simulations of their own: they are added to what was searched without.
    named = file.plan.strategies
    added = [one for one in named if where_nodes_stay(one) != one and where_nodes_stay(one) in named]
    plan = file.plan.model_copy(update={"strategies": tuple(one for one in named if one not in added)})
    file = file.model_copy(update={"plan": plan})
    state = _SearchState(file, goal, Estimates(file, now, jobs, progress))
    candidates, without = grid(file, state.estimates.quotes)
    for shape, reason in without:
        state.estimates.left_out.setdefault(reason, {})[shape] = None
    state.try_all(candidates)
    _refine(state)
    parts_found = _every_way(state)
    _refine(state)
    for strategy in plan.strategies:
        state.settle(strategy)
    for strategy in added:
        state.add_on_demand(strategy)
    if not state.done:
        reasons = "; ".join(state.estimates.reasons()) or "an empty grid"
        problem = Problem("plan", reasons, "a candidate that can be simulated", "Change the scenario.")
        raise ConfigError(file.name, [problem])
    answer, confirmed = _checked(state)
    rejected = tuple(one for one in confirmed if not _passes(goal, one.runs))
    everything = tuple(state.done[candidate] for candidate in sorted(state.done, key=order_of))
    parts = tuple(filter(None, parts_found))
    front = pareto(state.best())
    return SearchResult(
        goal,
        everything,
        front,
        answer,
        confirmed,
        rejected,
        parts,
        state.estimates.reasons(),
        state.estimates.simulated,
    )


def _refine(state: _SearchState) -> None:
    for _ in range(ROUNDS if state.done else 0):
        before = len(state.estimates.tried)
        state.try_all(list(state.refinements()))
        if len(state.estimates.tried) == before:
            break


def _every_way(state: _SearchState) -> list[str]:
    """Try every way to run each strategy, each with its share of what may still be simulated."""
    wish, found = state.file.plan, []
    for number, strategy in enumerate(wish.strategies):
        left = wish.candidates_max - state.estimates.simulated
        state.estimates.limit = state.estimates.simulated + left // (len(wish.strategies) - number)
        found.append(_ways(state, strategy))
    state.estimates.limit = wish.candidates_max
    return found


def _ways(state: _SearchState, strategy: str) -> str:
    """Try the ways to run a strategy on every cluster, and report what pays on the best.

    Every combination, if that many may be simulated; else all parts and none on every cluster, single changes
    around the best ones, and what pays there on every cluster.
    """
    every = ways(state.file, strategy)
    everything = with_parts(strategy, state.file.usable_parts)
    clusters = sorted(
        (one for one in state.estimates.lengths_s if one == _cluster(one, strategy)), key=order_of
    )
    if not clusters or len(every) == 1:
        return ""
    families = {family_of(one): None for one in clusters}
    sizes = sum(len(state.estimates.points[family]) for family in families)
    if state.estimates.simulated + sizes * (len(every) - 1) <= state.estimates.limit:
        state.try_all([_run_as(one, way) for way in every for one in clusters])
    else:
        state.try_all([_as(one, everything) for one in clusters])
        state.settle(strategy)
        for best in state.best(strategy)[:1]:
            way = best.candidate.strategy, best.candidate.next_share, best.candidate.previews
            state.try_all([_run_as(one, way) for one in clusters])
    state.settle(strategy)
    return _what_pays(state, strategy, {part for name, *_ in every for part in strategy_named(name).parts})


def _what_pays(state: _SearchState, strategy: str, parts: set[PipelinePart]) -> str:
    """What pays on the best cluster of a strategy, what of it does not, and what was not tried there."""
    ranked = state.best(strategy)
    if not ranked:
        return ""
    best = ranked[0].candidate
    tried = {
        part
        for one in state.estimates.lengths_s
        if _is_of(one.strategy, strategy) and _cluster(one, strategy) == _cluster(best, strategy)
        for part in strategy_named(one.strategy).parts
    }
    off = {part for part in parts & tried if with_parts(best.strategy, (part,)) != best.strategy}
    alone = "nothing pays" if off else "nothing was tried"
    pays = alone if best.strategy == strategy else f"{best.strategy} pays"
    phrases = [f"{shape_of(_cluster(best, strategy))}: {pays}"]
    for heading, some in (("left off", off), ("not tried", parts - tried)):
        if some:
            phrases.append(f"{heading}: {', '.join(f'+{part}' for part in PipelinePart if part in some)}")
    return "; ".join(phrases)


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
    """Pareto front in p50 of time and cost, fastest first; without those that have none."""
    front: list[EvaluatedCandidate] = []
    known = [one for one in evaluated if not math.isnan(one.runs.target_h.p50 + one.runs.target_usd.p50)]
    for one in sorted(known, key=lambda one: (one.runs.target_h.p50, one.runs.target_usd.p50)):
        if not front or one.runs.target_usd.p50 < front[-1].runs.target_usd.p50:
            front.append(one)
    return tuple(front)


def _is_of(name: str, strategy: str) -> bool:
    """Whether ``name`` is the strategy with any further parts."""
    base, *parts = strategy.split("+")
    return name.split("+")[0] == base and set(parts) <= set(name.split("+"))


def _kind(candidate: Candidate) -> Candidate:
    """All but the numbers of nodes."""
    return replace(candidate, reserved_nodes=0, spot_nodes=0)


def _cluster(candidate: Candidate, strategy: str) -> Candidate:
    """The same cluster with the strategy alone."""
    return replace(candidate, strategy=strategy, next_share=None, previews=None)


def _where_nodes_stay(candidate: Candidate) -> Candidate:
    """What is the same where no node is taken on demand."""
    return _as(candidate, where_nodes_stay(candidate.strategy))


def _as(candidate: Candidate, strategy: str) -> Candidate:
    """With another strategy; a share that begins early stays only where one does."""
    early = PipelinePart.TCSS in strategy_named(strategy).parts
    return replace(candidate, strategy=strategy, next_share=candidate.next_share if early else None)


def _run_as(candidate: Candidate, way: tuple[str, float | None, tuple[int, int] | None]) -> Candidate:
    strategy, share, arm = way
    return replace(candidate, strategy=strategy, next_share=share, previews=arm)


def _checked(
    state: _SearchState,
) -> tuple[EvaluatedCandidate | None, tuple[EvaluatedCandidate, ...]]:
    """The answer, and all that was simulated to its target."""
    confirmed: list[EvaluatedCandidate] = []
    meeting = [one.candidate for one in state.best() if state.goal.met_by(one.runs)]
    for first in range(0, len(meeting), CONFIRMED):
        wholes = _whole(state, meeting[first : first + CONFIRMED])
        confirmed += wholes
        if passed := [one for one in wholes if _passes(state.goal, one.runs)]:
            best = min(passed, key=lambda one: (*state.goal.rank(one.runs), order_of(one.candidate)))
            return best, tuple(confirmed)
    return None, tuple(confirmed)


def _passes(goal: Goal, runs: StrategyRuns) -> bool:
    return all(one.problem is None for one in runs.outcomes) and goal.met_by(runs)


def _whole(state: _SearchState, candidates: Sequence[Candidate]) -> list[EvaluatedCandidate]:
    """Simulate candidates to their targets, from every start."""
    tasks: list[SimulationTask] = []
    for candidate in candidates:
        target = state.done[candidate].outcome.target
        assert target is not None, "every strategy has a target"
        prepared = prepared_for(
            state.file, candidate, target.iterations, state.estimates.now, state.estimates.quotes
        )
        tasks += tasks_from_starts(prepared, (candidate.strategy,))
    results = run_tasks(tasks, state.estimates.jobs, lambda task: state.estimates.progress(task.strategy))
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
