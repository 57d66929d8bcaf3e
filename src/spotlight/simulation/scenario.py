"""What is simulated: a plan, nodes that come and go, and what everything costs."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TypeAlias

from spotlight.scheduler.events import NodeJoined, NodeLost, NodeNoticed, NoticeCancelled
from spotlight.scheduler.plan import Plan
from spotlight.scheduler.types import NodeId
from spotlight.simulation.costs import CostModel
from spotlight.simulation.virtual_rewards import RewardModel


@dataclass(frozen=True, slots=True)
class PriceChanged:
    """From here on a node costs ``price_usd_h`` (the whole node)."""

    node: NodeId
    price_usd_h: float


NodeEvent: TypeAlias = NodeJoined | NodeNoticed | NoticeCancelled | NodeLost | PriceChanged


@dataclass(frozen=True, slots=True)
class Scenario:
    """One simulated run.

    Attributes:
        nodes: what happens to nodes, as (seconds, event), ascending; nodes that train join at 0.
        train_prompts: number of prompts to train on.
        test_prompts: number of held-out prompts of each evaluation.
        seed: of the noise on durations; the plan's run seed fixes everything else.
        noise: standard deviation of the logarithm of durations, of each GPU's and each reward's; 0 makes them
            exact. The learner waits for its slowest rank.
        commit_every: denoising steps between two commits of a lease.
        until_s: stop there, though the run is not over; None runs to the end.
        rewards: what simulated samples score.
        timelines: keep every GPU's segments, for a picture.
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

    def __post_init__(self) -> None:
        """Raise ValueError for a scenario that cannot be simulated."""
        times = [at_s for at_s, _ in self.nodes]
        if times != sorted(times) or (times and times[0] < 0):
            raise ValueError("scenario.nodes must be ordered by time and start at 0 s or later")
        first = [event.node for at_s, event in self.nodes if isinstance(event, NodeJoined) and at_s == 0]
        ranks = sum(node.gpus for node in first if node.trains)
        if ranks != self.plan.ranks:
            raise ValueError(
                f"the plan has {self.plan.ranks} learner ranks, but the nodes that train and join at 0 s "
                f"have {ranks} GPUs; give plan.ranks their number"
            )
        joining = [event.node for _, event in self.nodes if isinstance(event, NodeJoined)]
        if not any(node.rolls_out for node in joining):
            raise ValueError("no node rolls out: nothing would ever be trained; set rolls_out on some node")
