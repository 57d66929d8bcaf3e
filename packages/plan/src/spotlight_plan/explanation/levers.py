"""From the reserved GPUs alone to the recommendation: what each lever brings, one after the other.

The levers are pulled on the scenario's own cluster: spot (or on-demand) GPUs, exploration, each part of the
pipeline; the last one is the search, which leaves that cluster. The recommendation was simulated, the others
are by the closed form, all from every start. A lever's part depends on the order.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from spotlight_plan.candidates import Candidate, own_machine
from spotlight_plan.estimates import Estimates
from spotlight_plan.scenarios.scenario_file import ScenarioFile
from spotlight_plan.scenarios.strategies import (
    STRATEGIES,
    PipelinePart,
    SpotPlaces,
    strategy_named,
    with_parts,
)
from spotlight_plan.search import EvaluatedCandidate
from spotlight_plan.strategy_runs import StrategyRuns

ALONE = "reserved_only"
_PLACES = {
    SpotPlaces.SPOT: ("spot GPUs", "spot_rollout_only"),
    SpotPlaces.ON_DEMAND: ("on-demand GPUs", "all_on_demand"),
    SpotPlaces.ROLLOUT: ("on-demand GPUs", "disaggregated"),
}


@dataclass(frozen=True, slots=True)
class Lever:
    """A step, with the candidate that it leads to.

    Attributes:
        runs: None: it has no time to target, and its part is in the next lever's.
        problem: why; empty if it has.
    """

    name: str
    candidate: Candidate
    runs: StrategyRuns | None
    problem: str = ""


def levers_of(estimates: Estimates, answer: EvaluatedCandidate) -> tuple[Lever, ...]:
    """The steps to the answer, the reserved GPUs alone first and the answer last."""
    *steps, (last, _) = lever_steps(estimates.file, answer.candidate)
    levers = []
    for name, candidate in steps:
        runs = estimates.of(candidate)
        step = Lever(name, candidate, None, runs) if isinstance(runs, str) else Lever(name, candidate, runs)
        levers.append(step)
    return (*levers, Lever(last, answer.candidate, answer.runs))


def lever_steps(file: ScenarioFile, answer: Candidate) -> tuple[tuple[str, Candidate], ...]:
    """Names of the levers and the candidates that they lead to; the first has none pulled."""
    fixed, coming, strategy = file.cluster.reserved, file.cluster.spot, strategy_named(answer.strategy)
    here = own_machine(fixed)
    alone = Candidate(ALONE, here, here, fixed.nodes, 0)
    steps = [("reserved GPUs alone", alone)]
    if strategy.places in _PLACES:
        added, name = _PLACES[strategy.places]
        there = own_machine(coming)
        own = Candidate(name, here, there, fixed.nodes, coming.nodes)
        steps.append((added, own))
        if strategy.explore is not None:
            base = strategy.like or answer.strategy.split("+")[0]
            name = base if STRATEGIES[base].explore else with_parts(name, (PipelinePart.EXPLORATION,))
            steps.append(("exploration", replace(own, strategy=name)))
        for part in PipelinePart:
            if part in strategy.parts and part is not PipelinePart.EXPLORATION:
                name = with_parts(name, (part,))
                steps.append((f"+{part}", replace(own, strategy=name)))
        if strategy.learner_moves:
            nodes = -(-file.ranks // coming.gpus_per_node)
            moved = replace(own, strategy=answer.strategy, reserved=there, reserved_nodes=nodes)
            steps.append(("learner on spot GPUs", moved))
    return tuple(steps) if steps[-1][1] == answer else (*steps, ("search", answer))
