"""Rewards of simulated samples: seeded numbers with measured rank correlations.

A seed has a standard normal quality, which its regenerated reward shows exactly. A preview of T of S steps
shows it with correlation 1 - (1 - T/S) ** e, slightly less under weights one iteration old. e = 1.66 fits the
testbed's ODE rollouts (.42, .58, .68, .76, .90 at 3, 4, 5, 6 and 8 of 10 steps; formula: .45, .57, .68, .78,
.93), e = 0.82 its full-SDE rollouts on one Brownian path (.38, .43, .52, .72 at 4, 5, 6 and 8; formula: .34,
.43, .53, .73).

Prompts differ in mean and spread of rewards; some have no spread. Learning is not simulated.

Invariant: a reward is a function of the model and of the sample's prompt, seed, purpose and steps.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from statistics import NormalDist
from typing import TYPE_CHECKING

from spotlight.scheduler.events import RewardFailed, SamplesRewarded
from spotlight.scheduler.plan import Plan
from spotlight.scheduler.records import REWARD
from spotlight.scheduler.seeds import derive_seed
from spotlight.scheduler.types import DropReason, Purpose, Rollout, RolloutId

if TYPE_CHECKING:
    from spotlight_plan.simulation.virtual_processes import VirtualWeights

CONTENT = "content"
"""Score that identifies the weights that generated the scored sample."""
_NORMAL = NormalDist()


@dataclass(frozen=True, slots=True)
class RewardModel:
    """Parameters of simulated rewards.

    Attributes:
        exponent: e; if smaller, short previews are less informative.
        staleness: correlation of rewards under weights one iteration apart.
        spread: median standard deviation of a prompt's rewards.
        variety: standard deviation of the logarithm of the prompts' spreads.
        flat_share: share of prompts whose rewards are all equal.
    """

    exponent: float = 1.66
    staleness: float = 0.97
    spread: float = 0.2
    variety: float = 0.5
    flat_share: float = 0.0

    def __post_init__(self) -> None:
        shares = 0 <= self.staleness <= 1 and 0 <= self.flat_share <= 1
        if not (self.exponent > 0 and shares and self.spread >= 0 and self.variety >= 0):
            raise ValueError(
                f"{self}; expected an exponent above 0, staleness and flat_share within 0..1, and spread and "
                "variety of 0 or more"
            )

    def correlation(self, steps: int, full_steps: int, *, stale: bool) -> float:
        """Correlation between previews of ``steps`` steps and regenerated rewards."""
        left = max(0.0, 1 - steps / full_steps)
        found: float = 1 - left**self.exponent
        return found * self.staleness if stale else found

    def reward(self, rollout: Rollout, plan: Plan) -> float:
        """Reward of a sample."""
        quality = _normal("quality", rollout.seed)
        if rollout.purpose is Purpose.EXPLORE:
            stale = plan.exploration is not None and plan.exploration.where == "idle"
            rho = self.correlation(rollout.steps, plan.rollout_steps, stale=stale)
            noise = _normal("preview", rollout.seed, rollout.steps)
            quality = rho * quality + math.sqrt(1 - rho * rho) * noise
        flatness, width, level = _prompt(rollout.prompt_id)
        if flatness < self.flat_share:
            return 0.5
        return 0.5 + self.spread * (level + math.exp(self.variety * width) * quality)


@dataclass(slots=True)
class ScorerQueue:
    """The scorers share each request's samples, and take requests in order."""

    free_s: float = 0.0

    def answered_s(self, now: float, answer_s: float, busy_s: float) -> float:
        """Seconds until a request is answered, of which the scorers are busy with it for ``busy_s``."""
        waits_s = max(0.0, self.free_s - now)
        self.free_s = now + waits_s + busy_s
        return waits_s + answer_s


def judged(
    rollouts: Sequence[Rollout],
    made_by: Sequence[VirtualWeights | None],
    lineage: int,
    plan: Plan,
    rewards: RewardModel,
    fails: Callable[[], bool],
) -> Iterator[RewardFailed | SamplesRewarded]:
    """Score samples that these weights made, when it is asked for; those that fail come first."""
    scores: dict[RolloutId, dict[str, float]] = {}
    for rollout, sample in zip(rollouts, made_by, strict=True):
        if fails():
            yield RewardFailed(rollout.id, DropReason.REWARD_TIMEOUT, "no answer in time", lineage)
        else:
            scores[rollout.id] = {
                REWARD: rewards.reward(rollout, plan),
                CONTENT: float(sample.content) if sample else -1.0,
            }
    if scores:
        yield SamplesRewarded(scores, lineage)


@lru_cache(maxsize=1024)
def _prompt(prompt: str) -> tuple[float, float, float]:
    return _uniform("flat", prompt), _normal("spread", prompt), _normal("mean", prompt)


def _uniform(*fields: str | int) -> float:
    return (derive_seed(0, *fields) + 0.5) / 2**63


def _normal(*fields: str | int) -> float:
    return _NORMAL.inv_cdf(min(_uniform(*fields), 1 - 2**-53))
