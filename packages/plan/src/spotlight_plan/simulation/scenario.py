"""Input of a simulation (plan, node events, costs) and its result."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TypeAlias

from spotlight.scheduler.effects import ReportPipeline
from spotlight.scheduler.events import NodeJoined, NodeLost, NodeNoticed, NoticeCancelled
from spotlight.scheduler.plan import Plan
from spotlight.scheduler.types import Node, NodeId, NodeKind, Phase
from spotlight_plan.simulation.costs import CostModel
from spotlight_plan.simulation.machines.egress import Egress
from spotlight_plan.simulation.virtual_rewards import RewardModel


@dataclass(frozen=True, slots=True)
class PriceChanged:
    """New price of a whole node."""

    node: NodeId
    price_usd_h: float


NodeEvent: TypeAlias = NodeJoined | NodeNoticed | NoticeCancelled | NodeLost | PriceChanged


@dataclass(frozen=True, slots=True)
class Scenario:
    """One simulated run.

    Attributes:
        nodes: node events as (seconds, event), ascending; training nodes join at 0, unless the
            learner moves.
        boot_s: from a machine's arrival, billed, until the cluster can use it; what is there at 0 s has
            booted.
        on_demand: a node on demand as it joins; its name gets a number. With ``FleetSettings.on_demand``.
        spot_first: with ``FleetSettings.target``, spot nodes that the run has at first; None: those at 0 s.
        spot_delay_s: likewise, until one that it takes has joined.
        egress: None: all nodes are in one region.
        standing_usd_h: what is paid all the time beside machines with GPUs, by what it is for.
        train_prompts: number of training prompts.
        test_prompts: number of held-out prompts per evaluation.
        seed: of the noise on durations; the plan's run seed fixes everything else.
        noise: standard deviation of log durations, per GPU and reward; 0: exact.
        commit_every: denoising steps between commits of a lease.
        until_s: time limit; None: run to the end.
        timelines: record every GPU's segments.
    """

    plan: Plan
    costs: CostModel
    nodes: tuple[tuple[float, NodeEvent], ...]
    train_prompts: int
    test_prompts: int
    seed: int = 0
    noise: float = 0.0
    commit_every: int = 5
    until_s: float | None = None
    rewards: RewardModel = field(default_factory=RewardModel)
    timelines: bool = False
    boot_s: float = 0.0
    on_demand: Node | None = None
    spot_first: int | None = None
    spot_delay_s: float = 60.0
    egress: Egress | None = None
    standing_usd_h: Mapping[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        times = [at_s for at_s, _ in self.nodes]
        if times != sorted(times) or (times and times[0] < 0):
            raise ValueError("scenario.nodes must be ordered by time and start at 0 s or later")
        first = [event.node for at_s, event in self.nodes if isinstance(event, NodeJoined) and at_s == 0]
        ranks = sum(node.gpus for node in first if node.trains)
        if self.plan.cluster.learner_moves:
            self._require_no_roles()
        elif ranks != self.plan.ranks:
            raise ValueError(
                f"the plan has {self.plan.ranks} learner ranks, but the nodes that train and join at 0 s "
                f"have {ranks} GPUs; give plan.ranks their number"
            )
        if (self.on_demand is None) != (self.plan.fleet.on_demand is None):
            raise ValueError("a node on demand, and when one is taken, go together: set both or none")
        joining = [event.node for _, event in self.nodes if isinstance(event, NodeJoined)]
        if not any(node.rolls_out for node in joining):
            raise ValueError("no node rolls out: nothing would ever be trained; set rolls_out on some node")

    def _require_no_roles(self) -> None:
        """A learner that moves chooses its nodes."""
        for node in (event.node for _, event in self.nodes if isinstance(event, NodeJoined)):
            if node.trains:
                raise ValueError(f"node {node.id} trains, but the learner moves; set trains on no node")


@dataclass(frozen=True, slots=True)
class Segment:
    """One phase of one GPU."""

    start_s: float
    end_s: float
    phase: Phase


@dataclass(frozen=True, slots=True)
class GpuTimeline:
    """All segments of one GPU, without gaps, from its node's arrival to its departure (one per stay)."""

    node: NodeId
    gpu: int
    kind: NodeKind
    segments: tuple[Segment, ...]


@dataclass(frozen=True, slots=True)
class IterationTime:
    """One iteration, from the previous publication to its own. A repeated iteration appears twice.

    Attributes:
        cost_usd: of all nodes.
        trained: samples that entered an optimizer step.
    """

    iteration: int
    start_s: float
    end_s: float
    cost_usd: float
    trained: int


@dataclass(slots=True)
class IterationTimes:
    """The iterations that have ended, each from the end of the one before."""

    ended: list[IterationTime] = field(default_factory=list)
    _usd: float = 0.0
    _trained: int = 0

    def end(self, iteration: int, now: float, usd: float, trained: int) -> None:
        """One ends; dollars and samples are totals of the run."""
        start_s = self.ended[-1].end_s if self.ended else 0.0
        self.ended.append(IterationTime(iteration, start_s, now, usd - self._usd, trained - self._trained))
        self._usd, self._trained = usd, trained


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulationResult:
    """Result of a run.

    Attributes:
        finished: whether it reached its planned end.
        error: why the controller stopped it, if it did.
        phase_s: GPU-seconds by kind of node and phase; LOST is repeated work.
        cost_usd: the same, priced.
        other_usd: what was paid beside machines with GPUs, by what it was for.
        gpus: empty unless the scenario asked for timelines.
        preemptions: nodes lost, but for those on demand.
        on_demand: nodes on demand that were taken.
        decisions: what was said of the number of nodes, and when, in seconds.
        notices: notices given.
        events: handled by the controller.
        explorations: from :class:`~spotlight.scheduler.effects.ReportExploration`, in order, including undone
            ones.
        overlaps: from :class:`~spotlight.scheduler.effects.ReportPipeline`, likewise.
    """

    finished: bool
    error: str | None = None
    end_s: float
    iterations: tuple[IterationTime, ...]
    phase_s: Mapping[tuple[NodeKind, Phase], float]
    cost_usd: Mapping[tuple[NodeKind, Phase], float]
    gpus: tuple[GpuTimeline, ...] = ()
    preemptions: int
    notices: int = 0
    trained: int = 0
    evaluated: int = 0
    explored: int = 0
    dropped: int = 0
    events: int = 0
    explorations: tuple[Mapping[str, object], ...] = ()
    overlaps: tuple[ReportPipeline, ...] = ()
    on_demand: int = 0
    decisions: tuple[tuple[float, str], ...] = ()
    other_usd: Mapping[str, float] = field(default_factory=dict)

    @property
    def gpu_hours(self) -> float:
        """Of all nodes."""
        return sum(self.phase_s.values()) / 3600
