"""Metrics of a simulated strategy: time, cost, and GPU-seconds by phase. Pure.

To target: the first iteration (which includes start-up) plus the mean of the later ones times their number.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from spotlight.scheduler.types import Filler, NodeKind, Phase
from spotlight_plan.learning_speed import PREVIEWS_WANTED as PREVIEWS_WANTED
from spotlight_plan.learning_speed import Explored, explored_of, honest_target, learned_target
from spotlight_plan.processes import in_processes
from spotlight_plan.scenarios.baseline_runs import on_spot_nodes
from spotlight_plan.scenarios.prepared_scenario import Prepared
from spotlight_plan.scenarios.scenario_sections import CONTRAST_EXPONENT, Exponent, Target
from spotlight_plan.scenarios.strategies import strategy_named
from spotlight_plan.scenarios.strategy_scenario import scenario_of
from spotlight_plan.simulation.scenario import GpuTimeline, IterationTime, Scenario, SimulationResult
from spotlight_plan.simulation.virtual_driver import simulate


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulationOutcome:
    """One strategy's metrics.

    Attributes:
        problem: why the run did not finish; None if it did.
        iterations: finished iterations.
        iteration_s, iteration_usd: mean over iterations after the first; NaN without any.
        target: iterations to target; None if not stated, or if ``no_target`` says why it cannot hold.
        target_h, target_usd: time and cost to target; NaN if unknown.
        first_h, first_usd: of the first iteration; NaN without any.
        simulated_h, simulated_usd: of the whole simulation.
        gpu_s: GPU-seconds by kind of node and phase.
        spot_idle_share: of the GPU-seconds of spot nodes; NaN without any.
        preview_share: previews scored, as a share of full exploration (or of the planner's request), averaged
            over windows, each capped at 1. NaN without exploration.
        filled_s: otherwise idle GPU-seconds, by what filled them.
        overlapped_share, early_share: of the samples trained, those given to the learner before the batch was
            complete, and those begun before their iteration.
        dropped_share: of the samples generated for training.
        contrast: variance of explored groups' rewards over that of random ones; NaN without exploration.
        coverage: share of the groups that were explored.
        other_usd: paid in the whole simulation beside machines with GPUs, by what it was for.
        on_demand: nodes that the learner took on demand.
    """

    strategy: str
    problem: str | None
    iterations: int
    iteration_s: float
    iteration_usd: float
    target: Target | None
    target_h: float
    target_usd: float
    simulated_h: float
    simulated_usd: float
    gpu_s: Mapping[tuple[NodeKind, Phase], float] = field(default_factory=dict)
    spot_idle_share: float = math.nan
    preview_share: float
    filled_s: Mapping[Filler, float] = field(default_factory=dict)
    overlapped_share: float = 0.0
    early_share: float
    dropped_share: float = 0.0
    preemptions: int = 0
    notices: int = 0
    trained: int = 0
    events: int = 0
    first_h: float = math.nan
    first_usd: float = math.nan
    no_target: str = ""
    contrast: float = math.nan
    coverage: float = math.nan
    other_usd: Mapping[str, float] = field(default_factory=dict)
    on_demand: int = 0
    decisions: tuple[tuple[float, str], ...] = ()

    def hours_after(self, iterations: int) -> float:
        """Time of so many iterations: the first one's, and the mean of the later ones' for each further."""
        return _to(iterations, self.first_h, self.iteration_s / 3600)

    def usd_after(self, iterations: int) -> float:
        """Cost of so many iterations, likewise."""
        return _to(iterations, self.first_usd, self.iteration_usd)

    def seconds(self, phases: Iterable[Phase], kinds: Iterable[NodeKind] = tuple(NodeKind)) -> float:
        """GPU-seconds of these phases on these kinds of nodes."""
        wanted = set(kinds)
        return sum(self.gpu_s.get((kind, phase), 0.0) for phase in phases for kind in wanted)

    @property
    def total_s(self) -> float:
        """All GPU-seconds."""
        return sum(self.gpu_s.values())

    @property
    def lost_s(self) -> float:
        """GPU-seconds of work that was repeated or in vain."""
        return self.seconds([Phase.LOST])


def outcome_of(
    strategy: str,
    scenario: Scenario,
    result: SimulationResult,
    stated: Target | None,
    random: Target | None = None,
    *,
    exact: bool = False,
    exponent: Exponent = CONTRAST_EXPONENT,
) -> SimulationOutcome:
    """Compute a result's metrics.

    Args:
        stated: iterations to target with the seeds that the strategy wants for all groups; None: with
            explored seeds, derived from those with random seeds.
        random: with random seeds, which groups have that begin early; None: not stated.
        exact: ``stated`` counts those groups already.
        exponent: of contrast in the speed of learning.
    """
    previews, early = _preview_share(scenario, result), _early_share(scenario, result)
    explored, problem = _explored(scenario, result), _problem(scenario, result)
    if problem is not None:  # the iterations that it made do not tell of those that it did not
        target, no_target = None, f"it did not come to its end: {problem}"
    elif stated is None and scenario.plan.exploration is not None:
        target, no_target = learned_target(random, previews, explored, exponent)
    else:
        target, no_target = honest_target(stated, random, previews, 0.0 if exact else early)
    iterations = lasting(result.iterations)
    durations = [one.end_s - one.start_s for one in iterations]
    costs = [one.cost_usd for one in iterations]
    iteration_s, iteration_usd = _mean(durations[1:]), _mean(costs[1:])
    target_s = target_usd = math.nan
    if target is not None and durations:
        target_s = _to(target.iterations, durations[0], iteration_s)
        target_usd = _to(target.iterations, costs[0], iteration_usd)
    plan = scenario.plan
    made = len(iterations) * plan.prompts_per_iteration * plan.choice.of_group(plan.group_size)
    return SimulationOutcome(
        strategy=strategy,
        problem=problem,
        iterations=len(durations),
        iteration_s=iteration_s,
        iteration_usd=iteration_usd,
        target=target,
        target_h=target_s / 3600,
        target_usd=target_usd,
        simulated_h=result.end_s / 3600,
        simulated_usd=sum(result.cost_usd.values()) + sum(result.other_usd.values()),
        gpu_s=dict(result.phase_s),
        spot_idle_share=_spot_idle_share(result),
        preview_share=previews,
        filled_s=_filled(result),
        overlapped_share=_samples(result, "overlapped_samples") / max(1, result.trained),
        early_share=early,
        dropped_share=max(0.0, 1 - result.trained / made) if made else math.nan,
        preemptions=result.preemptions,
        notices=result.notices,
        trained=result.trained,
        events=result.events,
        first_h=durations[0] / 3600 if durations else math.nan,
        first_usd=costs[0] if costs else math.nan,
        no_target=no_target,
        contrast=explored.contrast if explored else math.nan,
        coverage=explored.coverage if explored else math.nan,
        other_usd=dict(result.other_usd),
        on_demand=result.on_demand,
        decisions=result.decisions,
    )


def _spot_idle_share(result: SimulationResult) -> float:
    spot = {phase: s for (kind, phase), s in result.phase_s.items() if kind is NodeKind.SPOT}
    return spot.get(Phase.IDLE, 0.0) / sum(spot.values()) if sum(spot.values()) else math.nan


def _explored(scenario: Scenario, result: SimulationResult) -> Explored | None:
    arm = scenario.plan.exploration
    if arm is None:
        return None
    windows = len(lasting(result.iterations)) - (arm.where == "idle")
    return explored_of(result.explorations, scenario.plan.prompts_per_iteration, windows)


def lasting(iterations: Sequence[IterationTime]) -> list[IterationTime]:
    """Each iteration once: one that was repeated also has the time and cost of what was undone."""
    merged: list[IterationTime] = []
    for one in iterations:
        start_s, cost_usd = one.start_s, one.cost_usd
        while merged and merged[-1].iteration >= one.iteration:
            undone = merged.pop()
            start_s, cost_usd = undone.start_s, cost_usd + undone.cost_usd
        merged.append(replace(one, start_s=start_s, cost_usd=cost_usd))
    return merged


def _early_share(scenario: Scenario, result: SimulationResult) -> float:
    early = _samples(result, "early_samples")
    return early / max(1, result.trained / scenario.plan.trained_share)


def _samples(result: SimulationResult, figure: str) -> int:
    return sum(overlap.samples.get(figure, 0) for overlap in result.overlaps)


def _filled(result: SimulationResult) -> dict[Filler, float]:
    filled = {filler: sum(one.filled_s.get(filler, 0.0) for one in result.overlaps) for filler in Filler}
    return {filler: seconds for filler, seconds in filled.items() if seconds}


def _problem(scenario: Scenario, result: SimulationResult) -> str | None:
    if result.finished:
        return None
    if result.error is not None:
        return result.error
    done, wanted = len(lasting(result.iterations)), scenario.plan.iterations
    return f"{done} of {wanted} iterations done after {result.end_s / 3600:.1f} h, when run.until_h was over"


def _preview_share(scenario: Scenario, result: SimulationResult) -> float:
    """The first iteration has no idle window before it, so idle exploration has one window less."""
    arm = scenario.plan.exploration
    if arm is None or not result.iterations:
        return math.nan
    shares = dict(_scored_share(report) for report in result.explorations)
    found = [share for share in shares.values() if share is not None]
    windows = len(found)
    if arm.planner is None:  # then a skipped window counts as wanted
        windows = max(windows, len(lasting(result.iterations)) - (arm.where == "idle"))
    return sum(found) / windows if windows else math.nan


def _scored_share(report: Mapping[str, object]) -> tuple[object, float | None]:
    """A window's iteration and the scored share of its plan; None without a plan."""
    window = report["window"]
    assert isinstance(window, Mapping), "a report names its window"
    planned = int(window["planned"])
    return report["iteration"], min(int(window["scored"]), planned) / planned if planned else None


def _to(iterations: int, first: float, later: float) -> float:
    return first if iterations == 1 else first + (iterations - 1) * later


def _mean(values: list[float]) -> float:
    return sum(values) / len(values) if values else math.nan


@dataclass(frozen=True, slots=True)
class ComparedStrategy:
    """A strategy's metrics, and its GPU timelines if requested."""

    outcome: SimulationOutcome
    gpus: tuple[GpuTimeline, ...]
    iteration_ends_s: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class SimulationTask:
    """One simulation to run."""

    prepared: Prepared
    strategy: str
    timelines: bool = False


def run_task(task: SimulationTask) -> ComparedStrategy:
    """Simulate one strategy."""
    strategy = strategy_named(task.strategy)
    scenario = scenario_of(task.prepared, strategy, timelines=task.timelines)
    result = simulate(scenario)
    if strategy.baseline is not None:
        result = on_spot_nodes(task.prepared, strategy, scenario, result)
    file = task.prepared.file
    # What is stated for a strategy with this very name holds for it as it is.
    exact = task.strategy in file.iterations_to_target
    ends_s = tuple(one.end_s for one in result.iterations)
    outcome = outcome_of(
        task.strategy,
        scenario,
        result,
        file.stated_target(strategy),
        file.random_target,
        exact=exact,
        exponent=file.contrast_exponent,
    )
    return ComparedStrategy(outcome, result.gpus, ends_s)


def run_tasks(
    tasks: Sequence[SimulationTask], jobs: int, done: Callable[[SimulationTask], None] = lambda task: None
) -> tuple[ComparedStrategy, ...]:
    """Simulate all in at most ``jobs`` processes; ``done`` is called for each result, in order."""
    results = []
    for task, compared in zip(tasks, in_processes(run_task, tasks, jobs), strict=True):
        results.append(compared)
        done(task)
    return tuple(results)
