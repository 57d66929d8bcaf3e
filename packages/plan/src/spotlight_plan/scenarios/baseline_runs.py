"""Baselines on spot nodes: from an undisturbed run to one on the scenario's trace. Pure."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import replace
from typing import TypeAlias

from spotlight.scheduler.types import NodeKind, Phase
from spotlight_plan.scenarios.prepared_scenario import Prepared
from spotlight_plan.scenarios.profile_costs import ProfileCosts
from spotlight_plan.scenarios.strategies import Strategy
from spotlight_plan.simulation.scenario import IterationTime, Scenario, SimulationResult
from spotlight_plan.simulation.spot_baselines import BaselineModel, replay

Spent: TypeAlias = Mapping[tuple[NodeKind, Phase], float]


def on_spot_nodes(
    prepared: Prepared, strategy: Strategy, scenario: Scenario, undisturbed: SimulationResult
) -> SimulationResult:
    """What becomes of an undisturbed run; as it is if it did not make two iterations."""
    if len(undisturbed.iterations) < 2:
        return undisturbed
    result = replay(
        _model(prepared, strategy, scenario, undisturbed),
        prepared.spot_nodes(strategy),
        prepared.file.run.until_h * 3600,
    )
    shares, standing_usd_h = _shares(undisturbed), sum(scenario.standing_usd_h.values())
    return replace(
        result,
        iterations=tuple(_with(one, standing_usd_h) for one in result.iterations),
        trained=undisturbed.trained * len(result.iterations) // len(undisturbed.iterations),
        phase_s=_divided(result.phase_s, shares),
        cost_usd=_divided(result.cost_usd, shares),
        other_usd={name: usd_h * result.end_s / 3600 for name, usd_h in scenario.standing_usd_h.items()},
    )


def _with(iteration: IterationTime, usd_h: float) -> IterationTime:
    """The same, with what is paid all the time."""
    hours = (iteration.end_s - iteration.start_s) / 3600
    return replace(iteration, cost_usd=iteration.cost_usd + hours * usd_h)


def _shares(undisturbed: SimulationResult) -> Mapping[Phase, float]:
    """Of the time after the start, by phase."""
    spent: dict[Phase, float] = defaultdict(float)
    for (_, phase), seconds in undisturbed.phase_s.items():
        if phase is not Phase.SETUP:
            spent[phase] += seconds
    return {phase: seconds / sum(spent.values()) for phase, seconds in spent.items()}


def _divided(amounts: Spent, shares: Mapping[Phase, float]) -> Spent:
    """With work divided as in the undisturbed run."""
    found: dict[tuple[NodeKind, Phase], float] = defaultdict(float)
    for (kind, phase), amount in amounts.items():
        parts = shares if phase is Phase.TRAINING else {phase: 1.0}
        for part, share in parts.items():
            found[kind, part] += share * amount
    return dict(found)


def _model(
    prepared: Prepared, strategy: Strategy, scenario: Scenario, undisturbed: SimulationResult
) -> BaselineModel:
    """Pauses: a restart loads checkpoint and model; a neighbour that takes over has both, and forms new
    groups, into which a part of the model is copied.
    """
    costs, file = scenario.costs, prepared.file
    assert isinstance(costs, ProfileCosts), "made from a profile"
    first, *later = [one.end_s - one.start_s for one in undisturbed.iterations]
    iteration_s = sum(later) / len(later)
    pause_s = costs.restore_s()
    if strategy.baseline == "redundancy":
        gpu_s = undisturbed.phase_s
        training_s = sum(s for (_, phase), s in gpu_s.items() if phase is Phase.TRAINING)
        gpus = file.spot_nodes(strategy) * file.cluster.spot.gpus_per_node
        iteration_s += file.baselines.redundant_share * training_s / gpus / len(undisturbed.iterations)
        site, shape = prepared.profile.infrastructure, costs.workload.learner
        copied_s = prepared.profile.weights.full_bytes.value / shape.parts / site.network_bytes_s.value
        pause_s = site.group_setup_s.value + copied_s
    return BaselineModel(
        iterations=file.run.iterations,
        nodes=file.spot_nodes(strategy),
        start_s=max(0.0, first - iteration_s),
        iteration_s=iteration_s,
        checkpoint_every=scenario.plan.checkpoint_every,
        pause_s=pause_s,
        boot_s=scenario.boot_s,
        survives_one=strategy.baseline == "redundancy",
    )
