"""Which cluster meets a deadline or a budget: a bounded search over the simulator.

1. A grid: strategies x GPU types (each alone, and the scenario's own two) x reserved nodes x spot nodes
   (doublings around the scenario's own, unless the scenario lists others). Each candidate is simulated for
   ``plan.iterations`` and extrapolated to its target.
2. Up to :data:`ROUNDS` refinements: around the best candidate so far, the midpoints to its neighbours.
3. Parts of the pipeline: the best candidate of each strategy with all of ``plan.parts``, then without each
   that gains less than the noise; what is left is tried on all sizes of that kind, and refined again.
4. The best one that meets the goal is simulated whole, to its target. If that misses the goal, the next one
   is tried, up to :data:`CHECKS_MAX`. Only what was simulated whole is recommended.

Never more than ``plan.candidates_max`` candidates. What cannot be simulated (memory, prices, figures,
arithmetic) or explores too little is left out, with the reason. Everything is seeded: the same question has
the same answer.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime

from spotlight.config.errors import ConfigError, Problem
from spotlight.planning.compare import PREVIEWS_WANTED, SimulationOutcome, SimulationTask, run_task, run_tasks
from spotlight.planning.prices.quotes import PriceError
from spotlight.planning.scenarios.prepare import Prepared, prepare
from spotlight.planning.scenarios.profile import load_profile
from spotlight.planning.scenarios.scenario_file import ScenarioFile
from spotlight.planning.scenarios.scenario_load import build_scenario
from spotlight.planning.scenarios.strategies import (
    PipelinePart,
    SpotPlaces,
    strategy_named,
    with_parts,
    without_part,
)

ROUNDS = 3
CHECKS_MAX = 4
GAIN_MIN = 0.01
"""A part of the pipeline is left off if an iteration gets shorter by less, or by less than two errors."""
DROPPED_MAX = 0.05
"""Candidates whose learner GPUs do not divide the samples may leave out such a share of them."""


@dataclass(frozen=True, slots=True, order=True)
class Candidate:
    """A cluster, and how it is used.

    Attributes:
        gpu_type: of reserved nodes.
        spot_gpu_type: of spot nodes, or of what stands in their places; without any, that of reserved ones.
    """

    strategy: str
    gpu_type: str
    spot_gpu_type: str
    reserved_nodes: int
    spot_nodes: int


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

    def met_by(self, outcome: SimulationOutcome) -> bool:
        """Whether time or cost to target is within the goal."""
        if self.deadline_h is not None:
            return outcome.target_h <= self.deadline_h
        assert self.budget_usd is not None
        return outcome.target_usd <= self.budget_usd

    def rank(self, outcome: SimulationOutcome) -> tuple[bool, float, float]:
        """Best first: what meets the goal, by what the goal leaves open; else what comes nearest."""
        time, cost = outcome.target_h, outcome.target_usd
        bound, free = (time, cost) if self.deadline_h is not None else (cost, time)
        return (False, free, bound) if self.met_by(outcome) else (True, bound, free)


@dataclass(frozen=True, slots=True)
class EvaluatedCandidate:
    """A candidate and what it comes to; ``whole`` if it was simulated to its target."""

    candidate: Candidate
    outcome: SimulationOutcome
    whole: bool = False


@dataclass(frozen=True, slots=True)
class SearchResult:
    """What a search found.

    Attributes:
        evaluated: every candidate simulated, by strategy, type and size.
        front: those that no other one beats in both time and cost, fastest first.
        answer: simulated whole; None if nothing meets the goal.
        rejected: seemed to meet the goal, and missed it when they were simulated whole.
        parts: of the pipeline that were left off, and kept, for each strategy.
        left_out: what could not be simulated, and why.
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
        """What comes nearest to the goal, when nothing meets it."""
        return min(self.evaluated, key=lambda one: self.goal.rank(one.outcome))


@dataclass(slots=True)
class _SearchState:
    """The state of a search."""

    file: ScenarioFile
    goal: Goal
    now: datetime
    jobs: int
    progress: Callable[[str], None]
    done: dict[Candidate, EvaluatedCandidate] = field(default_factory=dict)
    tried: set[Candidate] = field(default_factory=set)
    left_out: dict[str, list[str]] = field(default_factory=dict)
    refuted: set[str] = field(default_factory=set)
    """Strategies with a part that does not pay: simulated to find that out, never recommended."""

    def simulate(self, candidates: Sequence[Candidate]) -> None:
        """Simulate those that are new and possible, as far as the bound allows."""
        tasks: dict[Candidate, SimulationTask] = {}
        for candidate in candidates:
            if candidate in self.tried:
                continue
            if len(self.done) + len(tasks) >= self.file.plan.candidates_max:
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
            if (reason := useless(compared.outcome)) is not None:
                self._leave_out(candidate, reason)
            else:
                self.done[candidate] = EvaluatedCandidate(candidate, compared.outcome)

    def _leave_out(self, candidate: Candidate, reason: str) -> None:
        self.left_out.setdefault(reason, []).append(shape_of(self.file, candidate))

    def reasons(self) -> tuple[str, ...]:
        """Why candidates were left out, with the first of each kind."""
        return tuple(
            f"{shapes[0]}{f' and {len(shapes) - 1} more' if len(shapes) > 1 else ''}: {reason}"
            for reason, shapes in self.left_out.items()
        )

    def best(self) -> list[EvaluatedCandidate]:
        """Those that may be recommended, best first."""
        able = (one for one in self.done.values() if one.candidate.strategy not in self.refuted)
        return sorted(able, key=lambda one: (*self.goal.rank(one.outcome), one.candidate))

    def gains(self, one: Candidate, other: Candidate) -> bool:
        """Whether iterations of ``one`` are shorter than those of ``other`` beyond the noise."""
        self.simulate([one, other])
        if one not in self.done or other not in self.done:
            return one in self.done
        with_it, without = self.done[one].outcome, self.done[other].outcome
        noise_s = 2 * math.hypot(with_it.iteration_error_s, without.iteration_error_s)
        return without.iteration_s - with_it.iteration_s > max(noise_s, GAIN_MIN * without.iteration_s)

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
    """Find the cheapest cluster that meets a deadline, or the fastest within a budget.

    Args:
        progress: called after each simulation.

    Raises:
        ConfigError: a strategy without ``iterations_to_target``; nothing at all that can be simulated.
    """
    _require_targets(file)
    state = _SearchState(file, goal, now, jobs, progress)
    state.simulate(grid(file))
    if not state.done:
        reasons = "; ".join(state.reasons()) or "an empty grid"
        problem = Problem("plan", reasons, "a candidate that can be simulated", "Change the scenario.")
        raise ConfigError(file.name, [problem])
    _refine(state)
    parts_found = [_pipeline(state, strategy) for strategy in file.plan.strategies]
    _refine(state)
    answer, rejected = _checked(state)
    everything = tuple(state.done[candidate] for candidate in sorted(state.done))
    parts = tuple(filter(None, parts_found))
    return SearchResult(goal, everything, pareto(state.best()), answer, rejected, parts, state.reasons())


def _refine(state: _SearchState) -> None:
    for _ in range(ROUNDS):
        before = len(state.tried)
        state.simulate(list(state.refinements()))
        if len(state.tried) == before:
            break


def _pipeline(state: _SearchState, strategy: str) -> str:
    """Find the parts that pay on a strategy's best candidate, try them on all of its kind, and tell."""
    own = [one.candidate for one in state.best() if one.candidate.strategy == strategy]
    everything = with_parts(strategy, state.file.plan.parts)
    if not own or everything == strategy:
        return ""
    kept, before = everything, ""
    while kept != before:  # without one part, another may not pay either
        before = kept
        for part in reversed(PipelinePart):
            less = without_part(kept, part)
            if less != kept and not state.gains(_as(own[0], kept), _as(own[0], less)):
                state.refuted.add(kept)
                kept = less
    if kept != strategy:
        state.simulate([_as(one, kept) for one in state.done if _kind(one) == _kind(own[0])])
    had, has = everything.split("+"), kept.split("+")
    off = ", ".join(f"+{part}" for part in had if part not in has)
    pays = f"{kept} pays" if kept != strategy else "nothing pays"
    return f"{shape_of(state.file, own[0])}: {pays}" + (f"; left off: {off}" if off else "")


def grid(file: ScenarioFile) -> list[Candidate]:
    """The first candidates: each GPU type alone, and the scenario's own two types if they differ."""
    wish, cluster = file.plan, file.cluster
    own = cluster.reserved.gpu_type, cluster.spot.gpu_type
    types = wish.gpu_types or tuple(load_profile(file.workload.profile).gpus)
    pairs = [(name, other) for name in types for other in wish.spot_gpu_types or (name,)]
    if own[0] != own[1] and own not in pairs:
        pairs.append(own)
    reserved = wish.reserved_nodes or _around(cluster.reserved.nodes)
    spot = [nodes for nodes in wish.spot_nodes or _around(cluster.spot.nodes) if nodes > 0]
    found: dict[Candidate, None] = {}
    for strategy in wish.strategies:
        alone = strategy_named(strategy).places is SpotPlaces.NOTHING
        for fixed_type, coming_type in pairs:
            for fixed in reserved:
                sizes = [(fixed_type, 0)] if alone else [(coming_type, coming) for coming in spot]
                found |= {Candidate(strategy, fixed_type, kind, fixed, n): None for kind, n in sizes}
    return list(found)


def prepared_for(file: ScenarioFile, candidate: Candidate, iterations: int, now: datetime) -> Prepared:
    """The scenario with a candidate's cluster. A price that the scenario states is of its own GPU types only.

    Raises:
        ConfigError, PriceError: it cannot be simulated, or too many samples would be left out.
    """
    tree = file.model_dump(mode="json")
    for pool, gpu_type, nodes in (
        ("reserved", candidate.gpu_type, candidate.reserved_nodes),
        ("spot", candidate.spot_gpu_type, candidate.spot_nodes),
    ):
        section = tree["cluster"][pool]
        if section["gpu_type"] != gpu_type:
            section.update({key: None for key in section if key.startswith("usd_gpu_h")})
        section["gpu_type"], section["nodes"] = gpu_type, nodes
    tree["run"]["iterations"] = iterations
    changed = build_scenario(tree, shape_of(file, candidate))
    ranks = candidate.reserved_nodes * changed.cluster.reserved.gpus_per_node
    alike = candidate.gpu_type == candidate.spot_gpu_type  # another type only denoises
    if strategy_named(candidate.strategy).places is SpotPlaces.ON_DEMAND and alike:
        ranks += candidate.spot_nodes * changed.cluster.spot.gpus_per_node
    if changed.samples % ranks > DROPPED_MAX * changed.samples:
        found = f"{changed.samples} samples, which {ranks} learner GPUs do not divide"
        remedy = f"More than {DROPPED_MAX:.0%} would be left out."
        raise ConfigError(changed.name, [Problem("workload.prompts", found, "a multiple", remedy)])
    return prepare(changed, (candidate.strategy,), now)


def useless(outcome: SimulationOutcome) -> str | None:
    """Why an outcome says nothing of the target, or None.

    Without its previews a strategy trains on random seeds, and the iterations that the scenario states do not
    hold: such a cluster is never recommended.
    """
    if outcome.problem is not None:
        return outcome.problem
    if math.isnan(outcome.target_h):
        return "too few iterations were done"
    if outcome.preview_share < PREVIEWS_WANTED:
        return f"less than {PREVIEWS_WANTED:.0%} of the previews could be used: too little idle time for them"
    return None


def pareto(evaluated: Sequence[EvaluatedCandidate]) -> tuple[EvaluatedCandidate, ...]:
    """Those that no other one beats in time and cost, fastest first."""
    front: list[EvaluatedCandidate] = []
    for one in sorted(evaluated, key=lambda one: (one.outcome.target_h, one.outcome.target_usd)):
        if not front or one.outcome.target_usd < front[-1].outcome.target_usd:
            front.append(one)
    return tuple(front)


def shape_of(file: ScenarioFile, candidate: Candidate) -> str:
    """``4 reserved + 8 spot H100, spotlight``; ``4 reserved H100 + 8 spot L40S, spotlight``."""
    reserved = candidate.reserved_nodes * file.cluster.reserved.gpus_per_node
    others = candidate.spot_nodes * file.cluster.spot.gpus_per_node
    kind = "on-demand" if strategy_named(candidate.strategy).places.stays else "spot"
    more = f" + {others} {kind}" if others else ""
    if others and candidate.gpu_type != candidate.spot_gpu_type:
        more = f" {candidate.gpu_type}{more}"
    return f"{reserved} reserved{more} {candidate.spot_gpu_type}, {candidate.strategy}"


def _kind(candidate: Candidate) -> tuple[str, str, str]:
    """What candidates have in common that only differ in size."""
    return candidate.strategy, candidate.gpu_type, candidate.spot_gpu_type


def _as(candidate: Candidate, strategy: str) -> Candidate:
    return replace(candidate, strategy=strategy)


def _checked(state: _SearchState) -> tuple[EvaluatedCandidate | None, tuple[EvaluatedCandidate, ...]]:
    """The best candidate that also meets the goal when it is simulated whole."""
    rejected: list[EvaluatedCandidate] = []
    meeting = [one for one in state.best() if state.goal.met_by(one.outcome)]
    for one in meeting[:CHECKS_MAX]:
        target = one.outcome.target
        assert target is not None, "every strategy has a target"
        prepared = prepared_for(state.file, one.candidate, target.value, state.now)
        whole = EvaluatedCandidate(
            one.candidate, run_task(SimulationTask(prepared, one.candidate.strategy)).outcome, True
        )
        state.progress(one.candidate.strategy)
        if useless(whole.outcome) is None and state.goal.met_by(whole.outcome):
            return whole, tuple(rejected)
        rejected.append(whole)
    return None, tuple(rejected)


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


def _around(nodes: int) -> list[int]:
    """Doublings from 1 to four times a number, and the number itself."""
    doublings = [2**power for power in range(max(1, nodes).bit_length() + 2) if 2**power <= 4 * max(1, nodes)]
    return sorted({*doublings, max(1, nodes)})


def _midpoints(values: Sequence[int], around: int) -> Iterator[int]:
    """Whole numbers halfway to the neighbours of a value."""
    place = bisect_left(values, around)
    for neighbour in (*values[max(0, place - 1) : place], *values[place + 1 : place + 2]):
        middle = (around + neighbour) // 2
        if middle not in {around, neighbour}:
            yield middle
