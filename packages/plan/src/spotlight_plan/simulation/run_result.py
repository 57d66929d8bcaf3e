"""The result of a simulation, at any time."""

from __future__ import annotations

from typing import TYPE_CHECKING

from spotlight.scheduler import events as ev
from spotlight.scheduler.types import WorkerId
from spotlight_plan.simulation.scenario import SimulationResult

if TYPE_CHECKING:
    from spotlight_plan.simulation.virtual_driver import Simulation

CLUSTER = WorkerId("cluster")
"""Worker id under which the GPU-seconds of all nodes are reported."""


def result_of(simulation: Simulation) -> SimulationResult:
    """The result of the run so far."""
    accounts, now, finish = simulation.accounts, simulation.now, simulation.finish
    accounts.check(now)
    ledger = simulation.controller.ledger
    for phase, seconds in accounts.by_phase().items():
        simulation.controller.handle(ev.GpuTimeSpent(CLUSTER, phase, max(0.0, seconds)), now)
    return SimulationResult(
        finished=finish is not None and finish.error is None,
        error=finish.error if finish else None,
        end_s=now,
        iterations=tuple(simulation.iterations),
        phase_s=dict(accounts.seconds),
        cost_usd=dict(accounts.usd),
        gpus=accounts.drawn() if simulation.scenario.timelines else (),
        preemptions=simulation.preemptions + simulation.booting.lost,
        notices=simulation.notices,
        trained=ledger.trained,
        evaluated=ledger.evaluated,
        explored=ledger.explored,
        explorations=tuple(effect.report for effect in simulation.explorations),
        overlaps=tuple(simulation.overlaps),
        dropped=ledger.dropped.total(),
        events=simulation.events,
        other_usd=dict(accounts.other.usd),
        on_demand=simulation.on_demand.taken if simulation.on_demand else 0,
        decisions=tuple((at_s, report.text) for at_s, report in simulation.fleet_reports if report.text),
    )
