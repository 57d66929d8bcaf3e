"""From the reserved GPUs alone to the recommendation: what each lever brings, one after the other.

The levers are pulled on the scenario's own cluster: spot (or on-demand) GPUs, exploration, each part of the
pipeline; the last one is the search, which leaves that cluster. The recommendation was simulated to its
target, the others are for ``run.iterations``, all from every start. A lever's part depends on the order.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from datetime import datetime

from spotlight_plan.candidates import Candidate, own_machine, prepared_for
from spotlight_plan.compare import SimulationTask, run_tasks
from spotlight_plan.prices.quotes import PriceError
from spotlight_plan.scenarios.scenario_file import ScenarioFile
from spotlight_plan.scenarios.strategies import (
    STRATEGIES,
    PipelinePart,
    SpotPlaces,
    strategy_named,
    with_parts,
)
from spotlight_plan.search import EvaluatedCandidate, useless
from spotlight_plan.strategy_runs import StrategyRuns, grouped, tasks_from_starts
from spotlight_rewards.base.errors import ConfigError

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


def levers_of(
    file: ScenarioFile,
    answer: EvaluatedCandidate,
    now: datetime,
    *,
    jobs: int = 1,
    progress: Callable[[str], None] = lambda strategy: None,
) -> tuple[Lever, ...]:
    """The steps to the answer, the reserved GPUs alone first and the answer last."""
    *steps, (last, _) = lever_steps(file, answer.candidate)
    problems: dict[Candidate, str] = {}
    tasks: list[SimulationTask] = []
    for _, candidate in steps:
        try:
            prepared = prepared_for(file, candidate, file.run.iterations, now)
        except (ConfigError, PriceError) as error:
            problems[candidate] = str(error).splitlines()[-1].strip(" -")
            continue
        tasks += tasks_from_starts(prepared, (candidate.strategy,))
    results = run_tasks(tasks, jobs, lambda task: progress(task.strategy))
    found = iter(grouped([one.outcome for one in results], file.run.starts))
    levers = []
    for name, candidate in steps:
        runs = None if candidate in problems else next(found)
        why = problems.get(candidate) or next(filter(None, map(useless, runs.outcomes if runs else ())), "")
        levers.append(Lever(name, candidate, None if why else runs, why))
    return (*levers, Lever(last, answer.candidate, answer.runs))


def lever_steps(file: ScenarioFile, answer: Candidate) -> tuple[tuple[str, Candidate], ...]:
    """Names of the levers and the candidates that they lead to; the first has none pulled."""
    return tuple(_steps(file, answer))


def _steps(file: ScenarioFile, answer: Candidate) -> Iterator[tuple[str, Candidate]]:
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
    *before, (last, own) = steps
    yield from before if own == answer else steps
    yield (last if own == answer else "search"), answer
