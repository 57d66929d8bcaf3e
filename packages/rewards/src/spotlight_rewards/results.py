"""Results of the reward pool.

Every sample is either scored by all rewards or is one failure with its reason; never a silent zero.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TypeAlias

import numpy as np

from spotlight_rewards import reward_registry as registry
from spotlight_rewards.reward import Gradient, RewardScore, RewardSetupError
from spotlight_rewards.reward_config import REWARD, RewardConfig

LARGEST = 1e100
"""Of a score: the squares of larger ones overflow."""
_RESERVED = (REWARD, "strict", "graded")
"""What a validation calls the weighted sum and what it is judged by."""


def require_names(rewards: Sequence[RewardConfig]) -> None:
    """Raise RewardSetupError for an unknown or reserved name; imports no reward."""
    for reward in rewards:
        registry.parse(reward.name)
        if reward.curve in _RESERVED or "/" in reward.curve:
            raise RewardSetupError(
                f"reward {reward.name!r} would be called {reward.curve!r}; {', '.join(map(repr, _RESERVED))} "
                "are the names of the weighted sum and of what a validation is judged by, and '/' divides a "
                "reward from its details. Rename the function or set a label."
            )


class FailureKind(StrEnum):
    """Why a sample has no reward."""

    ERROR = "error"
    TIMEOUT = "timeout"
    NOT_FINITE = "not_finite"


@dataclass(frozen=True, slots=True)
class RewardFailure:
    """A sample without a reward.

    Attributes:
        reward: name of the reward that failed.
        message: what happened, with the remote traceback or the process's last output.
        away: what scores does not answer, and may answer later.
    """

    kind: FailureKind
    reward: str
    message: str
    away: bool = False


@dataclass(frozen=True, slots=True)
class ScoredSample:
    """A sample that every reward scored.

    Attributes:
        total: weighted sum over the rewards.
        scores: by reward name.
        gradient: of ``total`` by the pixels, if every reward that weighs in has one.
    """

    total: float
    scores: Mapping[str, RewardScore]
    gradient: Gradient | None = field(default=None, compare=False, repr=False)

    def curves(self) -> dict[str, float]:
        """All values by curve name: ``reward`` (the total), ``<reward>``, ``<reward>/<detail>``."""
        curves = {REWARD: self.total}
        for name, score in self.scores.items():
            curves[name] = score.value
            curves.update({f"{name}/{detail}": value for detail, value in score.details.items()})
        return curves


SampleResult: TypeAlias = ScoredSample | RewardFailure


@dataclass(frozen=True, slots=True)
class RewardBatch:
    """Results of one submission, in the order of its images."""

    samples: tuple[SampleResult, ...]

    @property
    def failures(self) -> dict[int, RewardFailure]:
        """Samples without a reward, by index."""
        return {index: each for index, each in enumerate(self.samples) if isinstance(each, RewardFailure)}


def combine(
    rewards: Mapping[str, RewardConfig], outcomes: Mapping[str, RewardScore | RewardFailure]
) -> SampleResult:
    """Weight one sample's scores; the first failure, in the order of ``rewards``, wins."""
    scores: dict[str, RewardScore] = {}
    for name in rewards:
        outcome = outcomes[name]
        if isinstance(outcome, RewardFailure):
            return outcome
        scores[name] = outcome
    total = sum(rewards[name].weight * score.value for name, score in scores.items())
    if not math.isfinite(total):
        parts = " + ".join(
            f"{rewards[name].weight:g} x {score.value:g} ({name})" for name, score in scores.items()
        )
        return RewardFailure(
            FailureKind.NOT_FINITE, REWARD, f"the weighted sum {parts} is {total}; use smaller weights"
        )
    sample = ScoredSample(total, scores, _weighted_gradient(rewards, scores))
    for curve, value in sample.curves().items():
        if abs(value) > LARGEST:
            message = f"the curve {curve!r} is {value:g}; expected at most {LARGEST:g}, to be averaged"
            return RewardFailure(FailureKind.NOT_FINITE, curve.partition("/")[0], message)
    return sample


def _weighted_gradient(
    rewards: Mapping[str, RewardConfig], scores: Mapping[str, RewardScore]
) -> Gradient | None:
    parts = [
        None if score.gradient is None else np.float32(rewards[name].weight) * score.gradient
        for name, score in scores.items()
        if rewards[name].weight != 0
    ]
    known = [part for part in parts if part is not None]
    return np.sum(known, axis=0, dtype=np.float32) if known and len(known) == len(parts) else None
