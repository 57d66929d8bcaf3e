"""Baselines that train and roll out on all of a trace's spot nodes, as other systems do. Pure.

Not our controller runs here, but a model over the trace. Its input is an undisturbed iteration of as many
GPUs, which all roll out and then all train; with n of N nodes it takes N / n times as long.

    checkpoints    a loss stops the job: it restarts on the nodes that are left, from the last checkpoint
    redundancy     as Bamboo (NSDI 23): each node also computes its neighbour's part, which takes over after a
                   short pause; a second loss within that pause costs the work since the last checkpoint

A node that joins boots, and is then taken in after a pause. Notices are not used.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field

from spotlight.scheduler.events import NodeJoined, NodeLost
from spotlight.scheduler.types import NodeId, NodeKind, Phase
from spotlight_plan.simulation.scenario import IterationTime, NodeEvent, PriceChanged, SimulationResult

_HOUR_S = 3600


@dataclass(frozen=True, slots=True)
class BaselineModel:
    """How a job runs.

    Attributes:
        iterations: to be done.
        nodes: that an undisturbed iteration is of.
        start_s: until the first iteration begins.
        iteration_s: of an undisturbed iteration, redundancy included.
        checkpoint_every: iterations.
        pause_s: after a loss, and for a node that joins.
        boot_s: until a node that joins can be used.
        survives_one: whether a loss alone costs no work.
    """

    iterations: int
    nodes: int
    start_s: float
    iteration_s: float
    checkpoint_every: int
    pause_s: float
    boot_s: float
    survives_one: bool


def replay(
    model: BaselineModel, events: Iterable[tuple[float, NodeEvent]], until_s: float
) -> SimulationResult:
    """The job on these nodes, until it is done or the time is over."""
    job = _Job(model, pause_until_s=model.start_s)
    for at_s, event in events:
        if at_s > until_s or job.go_on(at_s):
            break
        job.happen(event)
    job.go_on(until_s)
    return job.result()


@dataclass(slots=True)
class _Job:
    model: BaselineModel
    pause_until_s: float
    now: float = 0.0
    progress: float = 0.0
    """Iterations done, with the part of the current one."""
    prices_h: dict[NodeId, float] = field(default_factory=dict)
    booting: dict[NodeId, float] = field(default_factory=dict)
    """When each that boots can be used."""
    gpus: dict[NodeId, int] = field(default_factory=dict)
    seconds: dict[tuple[NodeKind, Phase], float] = field(default_factory=lambda: defaultdict(float))
    usd: dict[tuple[NodeKind, Phase], float] = field(default_factory=lambda: defaultdict(float))
    ended: list[IterationTime] = field(default_factory=list)
    losses: int = 0
    vulnerable_until_s: float = 0.0
    _counted: tuple[float, float] = (0.0, 0.0)
    """When the last iteration ended, and what was paid until then."""

    @property
    def is_done(self) -> bool:
        return self.progress >= self.model.iterations - 1e-9

    @property
    def paid_usd(self) -> float:
        return sum(self.usd.values())

    def go_on(self, until_s: float) -> bool:
        """Work and pay until then, or until the job is done; returns whether it is."""
        while self.now < until_s and not self.is_done:
            self._step(min(until_s, min(self.booting.values(), default=until_s)))
            for name in [name for name, at_s in self.booting.items() if at_s <= self.now]:
                del self.booting[name]
                self.pause_until_s = max(self.pause_until_s, self.now + self.model.pause_s)
        return self.is_done

    def _step(self, until_s: float) -> None:
        working = len(self.prices_h) - len(self.booting)
        if not working:
            self._spend(until_s, Phase.SETUP)
        elif self.now < self.pause_until_s:
            self._spend(min(until_s, self.pause_until_s), Phase.RECONFIGURATION)
        else:
            rate = working / self.model.nodes / self.model.iteration_s
            left = int(self.progress + 1e-9) + 1 - self.progress
            end_s = min(until_s, self.now + left / rate)
            self.progress += (end_s - self.now) * rate
            self._spend(end_s, Phase.TRAINING, booting=Phase.SETUP)
            if abs(self.progress - round(self.progress)) < 1e-9:
                self.progress = float(round(self.progress))
                self._count()

    def _spend(self, until_s: float, phase: Phase, booting: Phase | None = None) -> None:
        passed_s = until_s - self.now
        for name, price_h in self.prices_h.items():
            spent = NodeKind.SPOT, booting or phase if name in self.booting else phase
            self.seconds[spent] += passed_s * self.gpus[name]
            self.usd[spent] += passed_s * price_h / _HOUR_S
        self.now = until_s

    def _count(self) -> None:
        since_s, paid = self._counted
        number = round(self.progress) - 1
        self.ended.append(IterationTime(number, since_s, self.now, self.paid_usd - paid, 0))
        self._counted = self.now, self.paid_usd

    def happen(self, event: NodeEvent) -> None:
        """A node comes, goes or changes its price."""
        match event:
            case NodeJoined(node):
                self.prices_h[node.id], self.gpus[node.id] = node.price_usd_h, node.gpus
                if self.now > 0:
                    self.booting[node.id] = self.now + self.model.boot_s
            case PriceChanged(name, price_usd_h) if name in self.prices_h:
                self.prices_h[name] = price_usd_h
            case NodeLost(name) if self.prices_h.pop(name, None) is not None:
                self.losses += 1
                if self.booting.pop(name, None) is None:
                    self._lose()

    def _lose(self) -> None:
        model, survives = self.model, self.model.survives_one and self.now >= self.vulnerable_until_s
        if not survives or not self.prices_h:
            safe = int(self.progress + 1e-9) // model.checkpoint_every * model.checkpoint_every
            lost_s = (self.progress - safe) * model.iteration_s * model.nodes * max(self.gpus.values())
            self._move(lost_s)
            self.progress = float(safe)
        self.pause_until_s = max(self.pause_until_s, self.now + model.pause_s)
        self.vulnerable_until_s = self.now + model.pause_s

    def _move(self, lost_s: float) -> None:
        """Of the seconds worked, so many were in vain."""
        work, lost = (NodeKind.SPOT, Phase.TRAINING), (NodeKind.SPOT, Phase.LOST)
        share = min(1.0, lost_s / self.seconds[work]) if self.seconds[work] else 0.0
        for amounts in (self.seconds, self.usd):
            amounts[lost] += share * amounts[work]
            amounts[work] *= 1 - share

    def result(self) -> SimulationResult:
        return SimulationResult(
            finished=self.is_done,
            end_s=self.now,
            iterations=tuple(self.ended),
            phase_s=dict(self.seconds),
            cost_usd=dict(self.usd),
            preemptions=self.losses,
        )
