"""A fast estimate of a whole run: short exact simulations, integrated over the trace. Pure.

How many iterations an hour a cluster makes depends on the spot nodes that are there. So a strategy is
simulated exactly, for a few iterations, at a few numbers of spot nodes that stay (:class:`SteadyPoint`).
Between these numbers the rate is interpolated linearly, and the rates are added up over the trace:
:func:`estimated`. Dollars are those of the nodes that are there. Left out are work lost without notice and
what depends on the moment of a preemption (a learner on spot nodes works while there are as many nodes as it
needs, or once it has taken a node on demand, and is never restored); checkpoints and evaluations are as often
as in the short simulations.

A cluster of more than :data:`GPUS_MAX` GPUs is simulated at a fraction of its size, with the same work for
each GPU and for each scorer: what is divided among them takes as long. A learner on one node is not charged
for traffic between nodes.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from spotlight.fleet.traces.trace import PricePoint, Trace, TraceEventKind
from spotlight.scheduler.types import WeightKind
from spotlight_plan.compare import ComparedStrategy, SimulationOutcome, SimulationTask
from spotlight_plan.learning_speed import Explored, honest_target, learned_target
from spotlight_plan.scenarios.prepare import Prepared, on_demand_node, with_file
from spotlight_plan.scenarios.pricing import PriceTag
from spotlight_plan.scenarios.profile import Profile
from spotlight_plan.scenarios.scenario_file import AlwaysOn, ScenarioFile, Target
from spotlight_plan.scenarios.side_costs import egress_of, standing_usd_h
from spotlight_plan.scenarios.strategies import SpotPlaces, Strategy, strategy_named
from spotlight_plan.simulation.machines.egress import Egress

GPUS_MAX = 64
"""Larger clusters are simulated at a fraction of their size."""


@dataclass(frozen=True, slots=True)
class SteadyPoint:
    """A strategy with a number of spot nodes that stay.

    Attributes:
        nodes: of the whole cluster; fractions come from scaling.
        first_s, iteration_s: duration of the first iteration, mean of the later ones; infinite: none ends.
        outcome: of the simulation; None: there is nothing that rolls out.
        lengths_s: of the iterations after the first.
    """

    nodes: float
    first_s: float
    iteration_s: float
    outcome: SimulationOutcome | None
    lengths_s: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True)
class SteadyCurve:
    """Points of one strategy on one kind of cluster, by ascending number of spot nodes."""

    points: tuple[SteadyPoint, ...]

    @classmethod
    def of(cls, points: Iterable[SteadyPoint]) -> SteadyCurve:
        """Points in any order; of those with the same number of nodes, the last."""
        by_nodes = {point.nodes: point for point in points}
        return cls(tuple(by_nodes[nodes] for nodes in sorted(by_nodes)))

    @property
    def most(self) -> SteadyPoint:
        """With the most spot nodes."""
        return self.points[-1]

    def between(self, nodes: float, of: Callable[[SteadyPoint], float]) -> float:
        """A figure at a number of nodes, interpolated linearly; at the nearest end beyond all points."""
        places = [point.nodes for point in self.points]
        above = bisect_left(places, nodes)
        if above == len(places):
            return of(self.points[-1])
        if above == 0 or places[above] == nodes:
            return of(self.points[above])
        lower, upper = self.points[above - 1], self.points[above]
        share = (nodes - lower.nodes) / (upper.nodes - lower.nodes)
        return of(lower) + share * (of(upper) - of(lower))


def divisor_of(file: ScenarioFile, strategy: Strategy) -> int:
    """By what a cluster is made smaller: a divisor of its learner's nodes that leaves whole groups."""
    reserved, spot = file.cluster.reserved, file.cluster.spot
    gpus = file.ranks if strategy.is_all_spot else reserved.nodes * reserved.gpus_per_node
    gpus += spot.nodes * spot.gpus_per_node
    nodes = _learner_nodes(strategy, file) if strategy.is_all_spot else reserved.nodes
    fitting = [
        by
        for by in range(1, nodes + 1)
        if nodes % by == 0
        and (file.ranks % by == 0 or not strategy.is_all_spot)
        and file.workload.prompts >= by * max(1, file.workload.updates_per_batch)
    ]
    small = [by for by in fitting if gpus <= by * GPUS_MAX]
    return small[0] if small else fitting[-1]


def steady_task(prepared: Prepared, strategy: str, nodes: int) -> SimulationTask | None:
    """The short simulation at a number of spot nodes of the cluster, rounded if it is made smaller.

    None: nothing rolls out there.
    """
    file, named = prepared.file, strategy_named(strategy)
    by = divisor_of(file, named)
    if not _can_roll_out(named, file, nodes):
        return None
    fixed, coming = file.cluster.reserved, file.cluster.spot
    rolling = nodes - _learner_nodes(named, file)
    learner = file.learner
    if named.is_all_spot:
        learner = learner.model_copy(update={"gpus": file.ranks // by})
    else:
        fixed = fixed.model_copy(update={"nodes": fixed.nodes // by})
    cluster = file.cluster.model_copy(
        update={
            "reserved": fixed,
            "spot": coming.model_copy(update={"nodes": _made_small(rolling, by)}),
        }
    )
    work = file.workload.model_copy(update={"prompts": max(1, round(file.workload.prompts / by))})
    if work.evaluation is not None:
        fewer = max(1, round(work.evaluation.prompts / by))
        work = work.model_copy(update={"evaluation": work.evaluation.model_copy(update={"prompts": fewer})})
    run = file.run.model_copy(update={"iterations": file.plan.iterations})
    changes = {"cluster": cluster, "learner": learner, "workload": work, "run": run, "trace": AlwaysOn()}
    pricing = prepared.pricing
    if pricing.spot is None:  # a price over time: nodes that stay have none, and dollars are added up later
        pricing = replace(pricing, spot=PriceTag(0.0, "the trace's"))
    smaller = replace(prepared, profile=_slower_rewards(prepared.profile, by), pricing=pricing)
    return SimulationTask(with_file(smaller, file.model_copy(update=changes)), strategy)


def _slower_rewards(profile: Profile, by: int) -> Profile:
    """So many times fewer scorers, with the same work for each."""
    figure = profile.rewards.s_per_sample
    scaled = figure.model_copy(update={"value": figure.value * by})
    return profile.model_copy(update={"rewards": profile.rewards.model_copy(update={"s_per_sample": scaled})})


def point_of(prepared: Prepared, strategy: str, nodes: int, compared: ComparedStrategy | None) -> SteadyPoint:
    """What a task's simulation says of the whole cluster."""
    file, named = prepared.file, strategy_named(strategy)
    by, learner = divisor_of(file, named), _learner_nodes(named, file)
    rolling = nodes - learner
    place = float(learner + _made_small(rolling, by) * by if rolling > 0 else nodes)
    if compared is None or not compared.iteration_ends_s:
        return SteadyPoint(place, math.inf, math.inf, compared.outcome if compared else None)
    # Where groups are not divided evenly, the work of each GPU is not quite the same.
    work = file.workload.prompts / by / max(1, round(file.workload.prompts / by))
    ends_s = (0.0, *compared.iteration_ends_s)
    first_s, *later_s = (work * (after - before) for before, after in pairwise(ends_s))
    mean_s = sum(later_s) / len(later_s) if later_s else math.inf
    return SteadyPoint(place, first_s, mean_s, compared.outcome, tuple(later_s))


def counts_wanted(prepared: Sequence[Prepared], strategy: str) -> tuple[int, ...]:
    """Numbers of spot nodes that a curve needs points at: all of them, and fewer where nodes are missing."""
    file, named = prepared[0].file, strategy_named(strategy)
    most, places = file.spot_nodes(named), named.places
    if places is SpotPlaces.NOTHING:
        return (0,)
    if places.stays:
        return (most,)
    least = min((count for one in prepared for count in _counts(one.trace_of(named))), default=most)
    found, below = {most}, _learner_nodes(named, file)
    while most > least:
        # A learner on spot nodes needs some of them; with one fewer, nothing is done.
        most = below + (most - below) // 2 if most > below else 0
        found |= {most, below - 1} if most == below > 0 else {most}
    return tuple(sorted(found))


def estimated(prepared: Prepared, strategy: str, curve: SteadyCurve) -> SimulationOutcome:
    """The outcome of a whole run from this start; ``prepared.trace`` is its trace.

    Iterations to target are those that the integrated shares of previews and early groups allow.
    """
    outcome = curve.most.outcome or next(one.outcome for one in curve.points if one.outcome)
    named, file = strategy_named(strategy), prepared.file
    stated = file.target_of(named)
    wanted = stated.iterations if stated else file.run.iterations
    run = _integrated(prepared, named, curve, wanted)
    target, no_target = _promised(file, strategy, run)
    if target is not None and target.iterations != wanted:
        wanted = target.iterations
        run = _integrated(prepared, named, curve, wanted)
    return _as_outcome(prepared, replace(outcome, strategy=strategy), run, wanted, target, no_target)


def iterations_in(prepared: Prepared, strategy: str, curve: SteadyCurve, seconds: float) -> float:
    """Iterations done after so many seconds of the trace."""
    done = 0.0
    for since_s, until_s, useful, _ in _served(prepared, strategy_named(strategy)):
        at_s, until_s = since_s, min(until_s, seconds)
        while at_s < until_s:
            per_s = curve.between(useful, _first_rate if done < 1 else _rate)
            left_s = (1 - done) / per_s if done < 1 and per_s > 0 else math.inf
            step_s = min(until_s - at_s, left_s)
            done = 1.0 if step_s == left_s else done + per_s * step_s
            at_s += step_s
    return done


@dataclass(slots=True)
class _WholeRun:
    """An integrated run; infinite times if it does not end within the trace."""

    first_s: float = math.inf
    first_usd: float = math.inf
    total_s: float = math.inf
    total_usd: float = math.inf
    previews: float = math.nan
    explored: Explored | None = None
    early: float = 0.0
    preemptions: int = 0


def _promised(file: ScenarioFile, strategy: str, run: _WholeRun) -> tuple[Target | None, str]:
    """Iterations to target."""
    named = strategy_named(strategy)
    stated = file.stated_target(named)
    if stated is not None or named.explore is None:
        early = 0.0 if strategy in file.iterations_to_target else run.early
        return honest_target(stated, file.random_target, run.previews, early)
    return learned_target(file.random_target, run.previews, run.explored, file.contrast_exponent)


def _integrated(prepared: Prepared, strategy: Strategy, curve: SteadyCurve, iterations: int) -> _WholeRun:
    """Add up iterations, dollars and previews over the stretches of the trace."""
    run = _WholeRun()
    explores = strategy.explore is not None
    usd_s, standing = _standing_usd_s(prepared, strategy)
    done = usd = previews = early = coverage = gained = 0.0
    for since_s, until_s, useful, usd_h in _served(prepared, strategy):
        nodes = float(standing) if strategy.places.stays else useful
        rate_usd = usd_s + usd_h / 3600
        at_s = since_s
        while at_s < until_s and done < iterations:
            goal = 1 if done < 1 else iterations
            per_s = curve.between(nodes, _first_rate if goal == 1 and done < 1 else _rate)
            left_s = (goal - done) / per_s if per_s > 0 else math.inf
            step_s = min(left_s, until_s - at_s)
            more = goal - done if left_s <= step_s else per_s * step_s
            usd += rate_usd * step_s + more * _crossing_usd(prepared, strategy, useful)
            if explores and goal > 1:
                previews += more * curve.between(nodes, _preview_share)
                coverage += more * curve.between(nodes, _coverage)
                gained += more * curve.between(nodes, _gained)
            early += more * curve.between(nodes, _early_share)
            at_s += step_s
            done = float(goal) if left_s <= step_s else done + more
            if done == 1 and goal == 1:
                run.first_s, run.first_usd = at_s, usd
        if done >= iterations:
            run.total_s, run.total_usd = at_s, usd
            break
    spot = prepared.trace_of(strategy).events if strategy.places is SpotPlaces.SPOT else ()
    during = Counter(event.kind for event in spot if event.time_s <= run.total_s)
    run.preemptions = during[TraceEventKind.REMOVE]
    run.total_usd += _models_usd(prepared, strategy, during[TraceEventKind.ADD])
    later = max(done - 1, 0.0)
    if explores:
        # The first iteration has no window before it that previews could use, except on the critical path.
        if not later:
            previews, coverage, gained = (of(curve.most) for of in (_preview_share, _coverage, _gained))
        run.previews = previews / (later or 1)
        run.explored = Explored(gained / coverage, coverage / (later or 1)) if gained else None
    run.early = early / done if done else 0.0
    return run


def _standing_usd_s(prepared: Prepared, strategy: Strategy) -> tuple[float, int]:
    """Dollars a second of all nodes that stay, and the number of those in the spot nodes' places."""
    cluster, pricing = prepared.file.cluster, prepared.pricing
    usd_h, standing = 0.0, 0
    if not strategy.is_all_spot:
        assert pricing.reserved is not None, "prepared for a strategy with reserved nodes"
        usd_h += cluster.reserved.nodes * cluster.reserved.gpus_per_node * pricing.reserved.usd_gpu_h
    usd_h += sum(standing_usd_h(prepared.file, prepared.profile, strategy).values())
    if strategy.places.stays:
        assert pricing.on_demand is not None, "prepared for a strategy that rents on demand"
        standing = cluster.spot.nodes
        usd_h += standing * cluster.spot.gpus_per_node * pricing.on_demand.usd_gpu_h
    return usd_h / 3600, standing


def _served(prepared: Prepared, strategy: Strategy) -> Iterator[tuple[float, float, float, float]]:
    """Stretches of the run: from, until, nodes that work in spot nodes' places, dollars an hour of these.

    A learner that takes a node on demand does so when spot nodes have had no room for it for long enough; it
    works there as on spot nodes, and all of these roll out.
    """
    node = on_demand_node(prepared) if strategy.placement == "spot_then_on_demand" else None
    learner, warm_s = _learner_nodes(strategy, prepared.file), _warm_s(prepared, strategy)
    alone_s: float | None = None
    for since_s, until_s, there, useful, node_usd_h in _stretches(prepared, strategy):
        usd_h = there * node_usd_h
        if node is None or useful >= learner:
            alone_s = None
            yield since_s, until_s, useful, usd_h
            continue
        alone_s = since_s if alone_s is None else alone_s
        taken_s = alone_s + prepared.file.learner.on_demand.after_s
        works_s = taken_s + warm_s
        for at_s, next_s in pairwise(
            sorted({since_s, until_s, *_within(since_s, until_s, taken_s, works_s)})
        ):
            nodes = learner + useful if at_s >= works_s else useful
            yield at_s, next_s, nodes, usd_h + (node.price_usd_h if at_s >= taken_s else 0.0)


def _within(since_s: float, until_s: float, *moments_s: float) -> list[float]:
    return [at_s for at_s in moments_s if since_s < at_s < until_s]


def _stretches(prepared: Prepared, strategy: Strategy) -> Iterator[tuple[float, float, int, float, float]]:
    """Stretches of the run: from, until, spot nodes that are paid, those that work, dollars a node-hour.

    A node that joins later works once its processes have started and pulled the weights; those of the first
    moment are in the first iteration's time.
    """
    until_s = prepared.file.run.until_h * 3600
    if strategy.places is not SpotPlaces.SPOT:
        yield 0.0, until_s, 0, 0.0, 0.0
        return
    trace, spot = prepared.trace_of(strategy), prepared.file.cluster.spot
    warm_s = _warm_s(prepared, strategy)
    changes: list[tuple[float, int, int]] = []
    joined: dict[str, float] = {}
    for event in trace.events:
        if event.kind is TraceEventKind.ADD:
            ready_s = event.time_s + (warm_s if event.time_s > 0 else 0.0)
            joined[event.node] = ready_s
            changes += [(event.time_s, 1, 0), (ready_s, 0, 1)]
        elif event.kind is TraceEventKind.REMOVE:
            ready_s = joined.pop(event.node)
            if ready_s > event.time_s:
                changes.remove((ready_s, 0, 1))
            changes.append((event.time_s, -1, -1 if ready_s <= event.time_s else 0))
    stated = prepared.pricing.spot
    prices = () if stated is not None else trace.prices
    node_usd_h = stated.usd_gpu_h * spot.gpus_per_node if stated is not None else 0.0
    yield from _swept(sorted(changes), prices, node_usd_h, until_s)


def _swept(
    changes: Sequence[tuple[float, int, int]],
    prices: Sequence[PricePoint],
    node_usd_h: float,
    until_s: float,
) -> Iterator[tuple[float, float, int, float, float]]:
    points = [(point.time_s, point.usd_h) for point in prices]
    if points:
        node_usd_h = points[0][1]
    moments = sorted({0.0, until_s, *(at_s for at_s, *_ in changes), *(at_s for at_s, _ in points)})
    there = useful = change = price = 0
    for since_s, next_s in pairwise(moments):
        while change < len(changes) and changes[change][0] <= since_s:
            there, useful = there + changes[change][1], useful + changes[change][2]
            change += 1
        while price < len(points) and points[price][0] <= since_s:
            node_usd_h = points[price][1]
            price += 1
        if since_s < until_s:
            yield since_s, min(next_s, until_s), there, float(useful), node_usd_h


def _warm_s(prepared: Prepared, strategy: Strategy) -> float:
    """From a node's arrival until it rolls out: it boots, starts its processes, and pulls the weights."""
    site, weights, boot_s = (
        prepared.profile.infrastructure,
        prepared.profile.weights,
        prepared.file.cluster.boot_s,
    )
    if boot_s is None:
        boot_s = sum(figure.value for figure in (site.boot_s, site.image_s) if figure is not None)
    moved = weights.full_bytes.value
    if WeightKind(prepared.file.workload.publishes) is WeightKind.ADAPTER:
        moved += weights.adapter_bytes.value
    crossing = _egress(prepared, strategy)
    rates = [site.network_bytes_s.value, site.store_bytes_s.value, *([crossing.bytes_s] if crossing else [])]
    starts_s = site.process_start_s.value + site.imports_s.value + site.model_load_s.value
    return boot_s + starts_s + moved / min(rates)


def _egress(prepared: Prepared, strategy: Strategy) -> Egress | None:
    return egress_of(prepared.file, prepared.profile, prepared.pricing, strategy)


def _models_usd(prepared: Prepared, strategy: Strategy, joins: int) -> float:
    """For the whole model, which every node that joins pulls."""
    crossing = _egress(prepared, strategy)
    if crossing is None:
        return 0.0
    return joins * crossing.weight_bytes[WeightKind.FULL] / 1e9 * crossing.to_spot_usd_gb


def _crossing_usd(prepared: Prepared, strategy: Strategy, nodes: float) -> float:
    """Of one iteration: a version to every spot node, and their share of the samples and previews back."""
    crossing = _egress(prepared, strategy)
    if crossing is None or not nodes:
        return 0.0
    work, pools, explore = prepared.file.workload, prepared.file.cluster, prepared.file.exploration
    spot = nodes * pools.spot.gpus_per_node
    both = strategy.trainers_roll_out(pools.reserved.rolls_out)
    share = spot / (spot + both * pools.reserved.nodes * pools.reserved.gpus_per_node)
    previews = (
        work.prompts * max(explore.arms(work.group_size, work.steps)[0])
        if explore and strategy.explore
        else 0
    )
    sent = share * work.prompts * work.group_size * crossing.sample_bytes + previews * crossing.picture_bytes
    pulled = nodes * crossing.weight_bytes[WeightKind(work.publishes)]
    return (pulled * crossing.to_spot_usd_gb + sent * crossing.from_spot_usd_gb) / 1e9


def _as_outcome(
    prepared: Prepared,
    outcome: SimulationOutcome,
    run: _WholeRun,
    wanted: int,
    target: Target | None,
    no_target: str,
) -> SimulationOutcome:
    ends = math.isfinite(run.total_s)
    hours = prepared.file.run.until_h
    problem = None if ends else f"not done after {hours:g} h, when run.until_h was over"
    later = max(1, wanted - 1)
    known = ends and target is not None
    return replace(
        outcome,
        problem=problem,
        iterations=wanted if ends else 0,
        iteration_s=(run.total_s - run.first_s) / later if ends else math.nan,
        iteration_usd=(run.total_usd - run.first_usd) / later if ends else math.nan,
        first_h=run.first_s / 3600 if ends else math.nan,
        first_usd=run.first_usd if ends else math.nan,
        target=target,
        no_target=no_target,
        target_h=run.total_s / 3600 if known else math.nan,
        target_usd=run.total_usd if known else math.nan,
        simulated_h=run.total_s / 3600 if ends else hours,
        simulated_usd=run.total_usd if ends else math.nan,
        preview_share=run.previews,
        contrast=run.explored.contrast if run.explored else math.nan,
        coverage=run.explored.coverage if run.explored else math.nan,
        early_share=run.early,
        preemptions=run.preemptions,
    )


def _learner_nodes(strategy: Strategy, file: ScenarioFile) -> int:
    """Spot nodes that the learner is on."""
    return file.spot_nodes(strategy) - file.cluster.spot.nodes


def _can_roll_out(strategy: Strategy, file: ScenarioFile, nodes: int) -> bool:
    rolling = nodes - _learner_nodes(strategy, file)
    if rolling < 0:
        return False
    alone = rolling == 0 or strategy.places is SpotPlaces.NOTHING
    return not alone or strategy.trainers_roll_out(file.cluster.reserved.rolls_out)


def _made_small(nodes: int, by: int) -> int:
    return max(1, round(nodes / by)) if nodes else 0


def _counts(trace: Trace) -> Iterator[int]:
    """Numbers of nodes that are there: at the start, and after each later moment with an event."""
    present = 0
    found = {0.0: 0}
    for event in trace.events:
        present += (event.kind is TraceEventKind.ADD) - (event.kind is TraceEventKind.REMOVE)
        found[event.time_s] = present
    yield from found.values()


def _rate(point: SteadyPoint) -> float:
    return 1 / point.iteration_s


def _first_rate(point: SteadyPoint) -> float:
    return 1 / point.first_s


def _preview_share(point: SteadyPoint) -> float:
    share = point.outcome.preview_share if point.outcome else 0.0
    return 0.0 if math.isnan(share) else share


def _coverage(point: SteadyPoint) -> float:
    """Share of the groups that were explored; 0 where nothing was."""
    return point.outcome.coverage if point.outcome and _gained(point) else 0.0


def _gained(point: SteadyPoint) -> float:
    """Coverage times contrast; 0 where nothing was explored."""
    found = point.outcome.coverage * point.outcome.contrast if point.outcome else 0.0
    return 0.0 if math.isnan(found) else found


def _early_share(point: SteadyPoint) -> float:
    return point.outcome.early_share if point.outcome else 0.0
