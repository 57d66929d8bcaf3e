"""Holds a run's deadline and budget by the number of spot nodes that are wanted.

an iteration is billed ─► model of the iterations ─► forecast for every number of nodes ─► which is wanted
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from pydantic import FiniteFloat, PositiveFloat, TypeAdapter

from spotlight.config.section import Section
from spotlight.config.sections.target import TargetConfig
from spotlight.scheduler import events as ev
from spotlight.scheduler.effects import ReportFleet
from spotlight.scheduler.fleet.fleet_machine import Fleet, FleetPolicy
from spotlight.scheduler.fleet.supply import Supply
from spotlight.scheduler.plan import Plan
from spotlight.scheduler.policies.target.choose_nodes import NodesChooser, Rest, TargetDecision
from spotlight.scheduler.policies.target.iteration_model import MeasuredIteration
from spotlight.scheduler.policies.target.pace_meter import PaceMeter
from spotlight.scheduler.types import NodeKind
from spotlight_rewards.base.typed_json import typed


@dataclass(frozen=True, slots=True)
class _SavedPace:
    wanted: int | None
    done: int
    measured: Sequence[tuple[PositiveFloat, FiniteFloat, FiniteFloat, FiniteFloat, int | None]]


_SAVED = TypeAdapter(_SavedPace)


class HoldTarget(FleetPolicy):
    """Decides :attr:`Supply.wanted` of spot nodes."""

    name = "target"

    @classmethod
    def of(cls, plan: Plan, settings: Section | None) -> list[FleetPolicy]:
        """The policies of a run with a deadline or a budget."""
        assert plan.fleet.target is not None
        supply = Supply(NodeKind.SPOT, plan.fleet.move_s, plan.fleet.drain_s)
        return [cls(plan.fleet.target, plan, supply), supply]

    def __init__(self, settings: TargetConfig, plan: Plan, supply: Supply) -> None:
        self.settings, self.supply = settings, supply
        self.chooser = NodesChooser(settings.nodes_min, settings.nodes_max)
        self.meter = PaceMeter(settings.node_s, plan.cluster.start_s)
        self.decision: TargetDecision | None = None
        self._iterations, self._done = plan.iterations, 0
        self._spot_gpus, self._spot_usd_h = plan.fleet.spot_gpus, plan.fleet.spot_usd_h
        self._billed: tuple[ev.IterationBilled, float] | None = None
        self._reported_s: float | None = None
        self._recalled: int | None = None
        """How many an earlier attempt wanted."""

    def observe(self, event: ev.Event, fleet: Fleet) -> None:
        """See :class:`FleetPolicy`."""
        match event:
            case ev.NodesProvided(NodeKind.SPOT, nodes) if self.supply.wanted is None:
                self._reported_s = fleet.now
                wanted = nodes if self._recalled is None else self._recalled
                self.supply.wanted = self.settings.clipped(wanted)
                self.meter.begin(fleet.now, self.supply.wanted)
            case ev.IterationBilled():
                self._iterated(event, fleet)

    def place(self, fleet: Fleet) -> None:
        """See :class:`FleetPolicy`."""
        self._measure(fleet)
        due_s = self.next_s(fleet)
        if due_s is not None and fleet.now >= due_s:
            self._reported_s = fleet.now
            rest = self._rest(fleet)
            if rest is not None and (outlook := self.chooser.outlook(rest, self.meter)) is not None:
                fleet.effects.append(ReportFleet(NodeKind.SPOT, forecast_words(outlook, rest)))

    def _measure(self, fleet: Fleet) -> None:
        cluster, working, workers = fleet.cluster, 0, 0
        for machine in fleet.machines.values():
            hosts = (cluster.hosts[part.id] for part in machine.parts)
            able = sum(cluster.able(host) for host in hosts if not host.draining)
            workers += able
            working += machine.node.kind is NodeKind.SPOT and (able > 0 or machine.ranks > 0)
        self.meter.observe(fleet.now, workers, working)

    def _iterated(self, event: ev.IterationBilled, fleet: Fleet) -> None:
        if self.supply.wanted is None:
            return  # the provider has not answered yet
        self._measure(fleet)
        self._billed, self._done = (event, fleet.now), event.iteration + 1
        measured = self.meter.end_iteration(fleet.now, event.work_s)
        rest, before = self._rest(fleet), self.decision
        decision = None if rest is None else self.chooser.decide(rest, self.meter)
        self.decision, text = decision, ""
        if rest is not None and decision is not None:
            changes = decision.nodes != rest.asked
            if changes:
                self.supply.wanted = decision.nodes
                self.meter.ask(fleet.now, decision.nodes)
            if changes or before is None or before.reachable != decision.reachable:
                self._reported_s, text = fleet.now, forecast_words(decision, rest)
        row = {"target/nodes_asked": float(self.supply.wanted)} | _measured_row(measured) | _row(decision)
        fleet.effects.append(ReportFleet(NodeKind.SPOT, text, row))

    def _rest(self, fleet: Fleet) -> Rest | None:
        """None: nothing is billed yet."""
        if self._billed is None or self.supply.wanted is None:
            return None
        (billed, at_s), settings = self._billed, self.settings
        parts = [part for machine in fleet.machines.values() for part in machine.parts]
        spot = fleet.kind(NodeKind.SPOT)
        others = [part for part in parts if part.kind is not NodeKind.SPOT]
        held = sum(part.gpus for part in parts if part not in others and part.trains and not part.rolls_out)
        usd_h = sum(part.price_usd_h for part in parts)
        spent_usd = billed.spent_usd + usd_h * (fleet.now - at_s) / 3600
        left_s = (
            None
            if settings.deadline_h is None
            else 3600 * settings.deadline_h - billed.run_s - fleet.now + at_s
        )
        return Rest(
            iterations=self._iterations - self._done,
            left_s=left_s,
            left_usd=None if settings.budget_usd is None else settings.budget_usd - spent_usd,
            asked=self.supply.wanted,
            other_workers=sum(part.gpus for part in others if part.rolls_out) - held,
            node_workers=_mean([machine.node.gpus for machine in spot], self._spot_gpus),
            other_usd_h=sum(part.price_usd_h for part in others),
            node_usd_h=_mean([machine.node.price_usd_h for machine in spot], self._spot_usd_h),
        )

    def next_s(self, fleet: Fleet) -> float | None:
        """See :class:`FleetPolicy`: when the next message is due."""
        return None if self._reported_s is None else self._reported_s + self.settings.report_s

    def roll_back(self, iteration: int) -> None:
        """See :class:`FleetPolicy`."""
        self.meter.interrupt(self._done - iteration)
        self._done = iteration

    def snapshot(self) -> Mapping[str, object]:
        """See :class:`FleetPolicy`."""
        measured = [
            [each.seconds, each.workers, each.work_s, each.spot_nodes, each.asked]
            for each in self.meter.iterations
        ]
        return {"wanted": self.supply.wanted, "done": self._done, "measured": measured}

    def restore(self, state: Mapping[str, object]) -> None:
        """See :class:`FleetPolicy`."""
        saved = typed(_SAVED, state, self.name)
        self._recalled, self._done = saved.wanted, saved.done
        self.meter.recall(MeasuredIteration(*each) for each in saved.measured)


def _measured_row(measured: MeasuredIteration | None) -> dict[str, float]:
    if measured is None:
        return {}
    return {
        "target/iteration_s": measured.seconds,
        "target/workers": measured.workers,
        "target/work_s": measured.work_s,
        "target/spot_nodes": measured.spot_nodes,
    }


def _row(decision: TargetDecision | None) -> dict[str, float]:
    """Forecast of the rest; empty before anything is forecast."""
    if decision is None:
        return {}
    then = decision.then
    return {
        "target/left_s": then.seconds,
        "target/left_s_low": then.range_s[0],
        "target/left_s_high": then.range_s[1],
        "target/left_usd": then.usd,
        "target/left_usd_low": then.range_usd[0],
        "target/left_usd_high": then.range_usd[1],
        "target/reachable": float(decision.reachable),
    }


def _mean(values: list[int] | list[float], default: float) -> float:
    return sum(values) / len(values) if values else float(default)


# -- what the rest of a run takes and costs, in a sentence. Pure -------------------------------------------


_MINUTE_S, _HOUR_S = 60.0, 3600.0


def forecast_words(decision: TargetDecision, rest: Rest) -> str:
    """``4 spot nodes instead of 2: the rest (28 iterations) takes 2.1 to 2.6 h and costs $41 to $52; ...``"""
    nodes = _plural(decision.nodes, "spot node")
    if decision.nodes != rest.asked:
        nodes += f" instead of {rest.asked}"
    then = decision.then
    if math.isinf(then.seconds):
        return f"{nodes}: nothing rolls out"
    takes, costs = _span(then.range_s), _dollars(then.range_usd)
    left = [
        *([] if rest.left_s is None else [f"{_one_span(rest.left_s)} to the deadline"]),
        *([] if rest.left_usd is None else [f"{_one_sum(rest.left_usd)} of the budget"]),
    ]
    iterations = _plural(rest.iterations, "iteration")
    forecast = f"{nodes}: the rest ({iterations}) takes {takes} and costs {costs}"
    return f"{forecast}; there are {' and '.join(left)} left: {_verdict(decision, rest)}"


def _verdict(decision: TargetDecision, rest: Rest) -> str:
    best = decision.best
    if decision.reachable:
        if decision.nodes == best.nodes or (
            _fits(decision.then.range_s[1], rest.left_s) and _fits(decision.then.range_usd[1], rest.left_usd)
        ):
            return "that holds"
        return f"{_plural(best.nodes, 'node')} would hold, and come next"
    over: list[str] = []
    if rest.left_s is not None and best.seconds > rest.left_s:
        over.append(f"{_one_span(best.seconds - rest.left_s)} late")
    if rest.left_usd is not None and best.usd > rest.left_usd:
        over.append(f"{_one_sum(best.usd - rest.left_usd)} over")
    by = f", about {' and '.join(over)}" if over else ", with too little to spare"
    return f"out of reach; what comes nearest is {_plural(best.nodes, 'node')}{by}"


def _fits(needed: float, left: float | None) -> bool:
    return left is None or needed <= left


def _plural(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def _span(seconds: tuple[float, float]) -> str:
    low, high = seconds
    if high < 2 * _MINUTE_S:
        unit, size, digits = "s", 1.0, 0
    elif high < 2 * _HOUR_S:
        unit, size, digits = "min", _MINUTE_S, 0 if high >= 10 * _MINUTE_S else 1
    else:
        unit, size, digits = "h", _HOUR_S, 1
    return f"{_range(f'{low / size:.{digits}f}', f'{high / size:.{digits}f}')} {unit}"


def _one_span(seconds: float) -> str:
    return _span((max(0.0, seconds), max(0.0, seconds)))


def _one_sum(usd: float) -> str:
    return _dollars((max(0.0, usd), max(0.0, usd)))


def _dollars(usd: tuple[float, float]) -> str:
    digits = 0 if usd[1] >= 100 else 2 if usd[1] >= 0.1 else 4
    return _range(f"${usd[0]:.{digits}f}", f"${usd[1]:.{digits}f}")


def _range(low: str, high: str) -> str:
    return low if low == high else f"{low} to {high}"
