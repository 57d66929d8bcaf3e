"""The pace of a run on this machine, emulated nodes included: its own controller in virtual time."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import TypeAlias

from spotlight.cluster.local.emulation import reserved_slots, spot_trace
from spotlight.config.schema import RunConfig
from spotlight.runtime.assembly.controller_plan import cluster_plan_of
from spotlight.scheduler.events import NodeJoined
from spotlight.scheduler.plan import Plan
from spotlight.scheduler.types import Node, NodeId, NodeKind
from spotlight.store.run_estimate import RunPace
from spotlight_plan.calibration.measured_profile import measured_profile, workload_of
from spotlight_plan.calibration.run_times import read_run_times
from spotlight_plan.commands.estimate.like_runs import newest_runs
from spotlight_plan.scenarios.fleet_events import SpotOffer, spot_events
from spotlight_plan.scenarios.profile import Profile, assumptions, load_profile
from spotlight_plan.scenarios.profile_costs import ProfileCosts
from spotlight_plan.simulation.scenario import NodeEvent, Scenario, SimulationResult
from spotlight_plan.simulation.virtual_driver import simulate
from spotlight_rewards.base.errors import ConfigError, Problem, UserError

_Nodes: TypeAlias = tuple[tuple[float, NodeEvent], ...]

_SLOT = "cpu"
_SHIPPED = "testbed-cpu"
_ITERATIONS = 4
_MEASURED_ERROR = (0.9, 1.15)
"""Factors: docs/howto/simulate-and-plan.md has up to 7.7 % beside other work."""
_SHIPPED_ERROR = (0.4, 2.5)
"""Assumed: cores differ so much."""


def simulated_pace(config: RunConfig, ranks: int, train_prompts: int, test_prompts: int) -> RunPace:
    """By what an earlier run on this machine took, else by the shipped cost profile of the testbed.

    Raises:
        ConfigError: no figures for this model or size, or the simulated run does not come to an end.
    """
    fleet, inline = config.fleet, config.fleet.driver == "inline"
    if fleet.target.is_set:
        found = "a deadline or a budget, which decides how many nodes there are"
        raise ConfigError("the estimate", [Problem("fleet.target", found, "none", "Train three iterations.")])
    if inline:
        config = config.model_copy(update={"fleet": fleet.model_copy(update={"learner_ranks": ranks})})
    nodes = tuple(_inline_node(config, ranks) if inline else _emulated(config))
    profile, source, (least, most) = _profile(config, nodes)
    evaluation = config.evaluation.model_copy(update={"every": 0, "at_start": True, "at_end": False})
    plan = replace(cluster_plan_of(config), iterations=_ITERATIONS, evaluation=evaluation)
    scenario = Scenario(
        plan=plan,
        costs=ProfileCosts(profile, workload_of(config, _SLOT, profile)),
        nodes=nodes,
        train_prompts=train_prompts,
        test_prompts=test_prompts,
        commit_every=fleet.commit_every,
        on_demand=None if plan.fleet.on_demand is None else _slots("on-demand", fleet.learner_ranks, config),
    )
    judged, trained = _simulated(scenario), _simulated(replace(scenario, plan=_unjudged(plan)))
    ends = [one.end_s for one in trained.iterations]
    iteration_s = (ends[-1] - ends[0]) / (_ITERATIONS - 1)
    return RunPace(
        start_s=max(0.0, ends[0] - iteration_s),
        iteration_s=iteration_s,
        evaluation_s=max(0.0, judged.iterations[0].end_s - ends[0]),
        usd_s=sum(trained.cost_usd.values()) / trained.end_s,
        least=least,
        most=most,
        rests_on=f"{source}, with which {_ITERATIONS} iterations were simulated",
    )


def _unjudged(plan: Plan) -> Plan:
    return replace(plan, evaluation=plan.evaluation.model_copy(update={"at_start": False}))


def _profile(config: RunConfig, nodes: _Nodes) -> tuple[Profile, str, tuple[float, float]]:
    """Figures, what they are, and the factors by which they may be wrong."""
    for directory in newest_runs(config.runs_dir):
        try:
            times = read_run_times(directory)
            if _model(times.config) != _model(config):
                continue
            profile = measured_profile([times])
            _require_figures(profile, config, nodes)
        except UserError:
            continue  # none that figures can be taken from, or none of this size
        return profile, f"calibration: the figures of the {times.label}", _MEASURED_ERROR
    if config.model.path != "testbed":
        problem = Problem("model.path", config.model.path, "testbed", "Train three iterations.")
        raise ConfigError("the estimate", [problem])
    profile = load_profile(_SHIPPED)
    guessed = len(assumptions(profile, [_SLOT]))
    return profile, f"formulas: the cost profile {profile.name}, {guessed} figures assumed", _SHIPPED_ERROR


def _model(config: RunConfig) -> object:
    return config.model, config.learner.mode, config.rollout.frames


def _require_figures(profile: Profile, config: RunConfig, nodes: _Nodes) -> None:
    """Raise ConfigError where a profile lacks those of this size and of degrees that nodes have slots for."""
    slots = max((event.node.gpus for _, event in nodes if isinstance(event, NodeJoined)), default=1)
    workload = workload_of(config, _SLOT, profile)
    costs = ProfileCosts(profile, workload)
    for degree in config.fleet.sequence_parallel.degrees:
        if degree <= slots:
            costs.denoise_step_s(_SLOT, workload.pixels, 1, degree)
    costs.train_s(_SLOT, workload.pixels, 1, 1)


def _emulated(config: RunConfig) -> Iterator[tuple[float, NodeEvent]]:
    """The reserved node, and spot nodes by the trace."""
    fleet = config.fleet
    if fleet.reserved_ranks:
        rolls_out = config.pipeline.trainers_generate
        yield (
            0.0,
            NodeJoined(_slots("learner", fleet.reserved_ranks, config, trains=True, rolls_out=rolls_out)),
        )
    if rolling := reserved_slots(fleet) - fleet.reserved_ranks:
        yield 0.0, NodeJoined(_slots("reserved", rolling, config))
    trace = spot_trace(fleet)
    if trace.events:
        slots = trace.events[0].gpus
        yield from spot_events(trace, SpotOffer(_SLOT, slots, slots * fleet.spot.price_usd_h))


def _inline_node(config: RunConfig, ranks: int) -> Iterator[tuple[float, NodeEvent]]:
    yield 0.0, NodeJoined(_slots("here", ranks, config, trains=True))


def _slots(name: str, slots: int, config: RunConfig, *, trains: bool = False, rolls_out: bool = True) -> Node:
    usd_h = slots * config.fleet.price_usd_h
    return Node(NodeId(name), NodeKind.RESERVED, slots, _SLOT, usd_h, trains, rolls_out)


def _simulated(scenario: Scenario) -> SimulationResult:
    result = simulate(scenario)
    if not result.finished:
        found = result.error or "no end of the simulated run"
        raise ConfigError("the estimate", [Problem("fleet", found, "nodes that train", "See the fleet.")])
    return result
