"""Predict a run that was made, with its own nodes, and compare it with what it took. Pure.

Replayed are the run's settings, and its nodes as they joined, were noticed and left; as the simulator has no
warming up, times after the first iteration are counted from its end. Not replayed are crashes of workers and
learner, and rewards that failed.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from spotlight.scheduler.events import NodeJoined, NodeLost, NodeNoticed, NoticeCancelled
from spotlight.scheduler.plan import Plan
from spotlight.scheduler.types import Node, Phase
from spotlight.store.ledger.ledger_schema import Incident
from spotlight_plan.calibration.measured_profile import workload_of
from spotlight_plan.calibration.run_times import NodeIncident, RunTimes
from spotlight_plan.scenarios.profile import Profile
from spotlight_plan.scenarios.profile_costs import ProfileCosts
from spotlight_plan.simulation.scenario import NodeEvent, Scenario, SimulationResult
from spotlight_plan.simulation.virtual_driver import Simulation

_LEAD = re.compile(r"([\d.]+) s before")
_SHORT_S = 1e-3
_PATIENCE = 5
"""The simulation is given up after this many times the run's seconds."""


@dataclass(frozen=True, slots=True)
class RunPrediction:
    """A run in the simulator.

    Attributes:
        iteration_s: mean of the iterations after the first.
        usd: after the first iteration, to the end.
        phase_s: GPU-seconds of the whole run.
        error: why the simulated run did not finish; None: it did.
    """

    iteration_ends_s: tuple[float, ...]
    iteration_s: float
    usd: float
    phase_s: Mapping[Phase, float]
    preemptions: int
    error: str | None

    def deviation(self, run: RunTimes) -> float:
        """Predicted over measured time of an iteration, minus 1."""
        return self.iteration_s / run.iteration_s - 1


def predict_run(run: RunTimes, plan: Plan, profile: Profile) -> RunPrediction:
    """Simulate a run.

    Args:
        plan: the controller's, of the run's configuration.
        profile: measured in this run, or in others.

    Raises:
        ConfigError: the profile lacks a figure.
    """
    wanted = len(run.iteration_ends_s)
    result = _simulated(replayed(run, plan, profile), wanted)
    if result.iterations:
        result = _simulated(replayed(run, plan, profile, result.iterations[0].end_s), wanted)
    ends = tuple(one.end_s for one in result.iterations)
    later = len(ends) - 1
    phase_s = dict.fromkeys(Phase, 0.0)
    for (_, phase), seconds in result.phase_s.items():
        phase_s[phase] += seconds
    return RunPrediction(
        iteration_ends_s=ends,
        iteration_s=(ends[-1] - ends[0]) / later if later > 0 else float("nan"),
        usd=sum(result.cost_usd.values()) - sum(one.cost_usd for one in result.iterations[:1]),
        phase_s=phase_s,
        preemptions=result.preemptions,
        error=_problem(result, wanted),
    )


def _simulated(scenario: Scenario, iterations: int) -> SimulationResult:
    """Up to the end, or to where a run stopped before its end."""
    simulation = Simulation(scenario)
    simulation.begin()
    stopped = iterations < scenario.plan.iterations
    while not (stopped and len(simulation.iterations) == iterations) and simulation.step():
        pass
    return simulation.result()


def replayed(run: RunTimes, plan: Plan, profile: Profile, first_s: float | None = None) -> Scenario:
    """A run as a scenario of the simulator, which begins when the learner's first node joins.

    Args:
        first_s: simulated length of the first iteration, which was longer; None: as it was.
    """
    train, test = run.prompts
    return Scenario(
        plan=plan,
        costs=ProfileCosts(profile, workload_of(run.config, run.learner.gpu_type, profile)),
        nodes=tuple(sorted(_events(run, first_s), key=lambda item: item[0])),
        train_prompts=train,
        test_prompts=test,
        seed=run.config.run_seed,
        commit_every=run.config.fleet.commit_every,
        until_s=_PATIENCE * run.iteration_ends_s[-1],
    )


def _events(run: RunTimes, first_s: float | None) -> Iterator[tuple[float, NodeEvent]]:
    trained = [one for one in run.incidents if one.node in run.nodes and run.nodes[one.node].trained]
    began = trained[0].at  # the nodes of its ranks joined, or there would be none
    whole = next((one.at for one in trained if one.kind is Incident.NODE_LOST), math.inf)
    measured_s = max(run.iteration_ends_s[0], _SHORT_S)
    simulated_s = measured_s if first_s is None else first_s

    def simulated(at: float) -> float:
        at_s = max(0.0, at - began)
        within = min(at_s, measured_s)
        return within * simulated_s / measured_s + at_s - within

    for one in run.incidents:
        if one.node not in run.nodes:
            continue  # it was noticed or lost before it joined
        # The learner starts when all its nodes are there; one that comes back later does so in its time.
        joins_first = one.kind is Incident.NODE_JOINED and run.nodes[one.node].trained and one.at < whole
        at_s = 0.0 if joins_first else simulated(one.at)
        yield at_s, _event(run, one, at_s)


def _event(run: RunTimes, one: NodeIncident, at_s: float) -> NodeEvent:
    match one.kind:
        case Incident.NODE_JOINED:
            seen = run.nodes[one.node]
            rolls_out = not seen.trained or run.config.pipeline.trainers_generate
            return NodeJoined(
                Node(one.node, seen.kind, seen.gpus, seen.gpu_type, seen.usd_h, seen.trained, rolls_out)
            )
        case Incident.NODE_NOTICED:
            lead = _LEAD.match(one.detail)
            return NodeNoticed(one.node, at_s + (float(lead[1]) if lead else 0.0))
        case Incident.NOTICE_CANCELLED:
            return NoticeCancelled(one.node)
        case _:
            return NodeLost(one.node)


def _problem(result: SimulationResult, iterations: int) -> str | None:
    if result.finished or len(result.iterations) == iterations:
        return None
    return result.error or f"{len(result.iterations)} iterations in {result.end_s:,.0f} s, then given up"
