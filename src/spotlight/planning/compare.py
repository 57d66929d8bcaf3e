"""Simulating several scenarios, one after the other or in processes of their own; results in the order asked.

Results do not depend on the number of processes: every simulation is seeded by its scenario alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context

from spotlight.planning.scenarios.prepare import Prepared, scenario_of
from spotlight.planning.scenarios.strategies import strategy_named
from spotlight.planning.simulation_outcome import Outcome, outcome_of
from spotlight.simulation.result import GpuTimeline
from spotlight.simulation.virtual_driver import simulate


@dataclass(frozen=True, slots=True)
class Compared:
    """A strategy's figures, and what its GPUs did if that was asked for.

    Attributes:
        iteration_ends_s: when each iteration ended.
    """

    outcome: Outcome
    gpus: tuple[GpuTimeline, ...]
    iteration_ends_s: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Task:
    """One simulation to run."""

    prepared: Prepared
    strategy: str
    timelines: bool = False


def run_task(task: Task) -> Compared:
    """Simulate one strategy."""
    strategy = strategy_named(task.strategy)
    scenario = scenario_of(task.prepared, strategy, timelines=task.timelines)
    result = simulate(scenario)
    target = task.prepared.file.target_of(strategy)
    ends_s = tuple(one.end_s for one in result.iterations)
    return Compared(outcome_of(task.strategy, scenario, result, target), result.gpus, ends_s)


def run_tasks(
    tasks: Sequence[Task], jobs: int, done: Callable[[Task], None] = lambda task: None
) -> tuple[Compared, ...]:
    """Simulate all, in at most ``jobs`` processes; ``done`` is called as results come, in order."""
    return tuple(_results(tasks, jobs, done))


def _results(tasks: Sequence[Task], jobs: int, done: Callable[[Task], None]) -> Iterator[Compared]:
    if min(jobs, len(tasks)) <= 1:
        for task in tasks:
            yield run_task(task)
            done(task)
        return
    with ProcessPoolExecutor(min(jobs, len(tasks)), mp_context=get_context("spawn")) as pool:
        for task, compared in zip(tasks, pool.map(run_task, tasks), strict=True):
            yield compared
            done(task)
