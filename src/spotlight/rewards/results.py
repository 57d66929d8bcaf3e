"""Specifications and results of the reward pool.

Every sample is either scored by all rewards or is one failure with its reason; never a silent zero.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, TypeAlias

from spotlight.config.sections.rewards import TOTAL
from spotlight.rewards import reward_registry as registry
from spotlight.rewards.frames import FrameRule
from spotlight.rewards.reward import RewardScore, RewardSetupError

_ISOLATION_DEADLINES = 4
_DEADLINE_MAX_S = 1e6  # limit of the system's timers


@dataclass(frozen=True, slots=True)
class RewardSpec:
    """One reward of a run.

    Attributes:
        name_or_path: a built-in's name or ``module:function``.
        weight: factor in the weighted sum; 0 only records the curve.
        deadline_s: per call; beyond it the reward's process is killed.
        retries: further attempts at a batch that raised, crashed or hung.
        params: picklable keyword arguments of the function.
        isolation_s: limit for then trying sample by sample, so that one bad image loses only itself; samples
            not reached fail as the batch did. None: four deadlines. 0: never.
        label: name of the reward's curves; empty: the function's name.
        frames: which frames of a video it sees, unless it takes videos.

    Raises:
        ValueError: a number out of range.
        RewardSetupError: an unknown or reserved name.
    """

    name_or_path: str
    weight: float = 1.0
    deadline_s: float = 60.0
    retries: int = 1
    params: Mapping[str, Any] = field(default_factory=dict)
    isolation_s: float | None = None
    label: str = ""
    frames: FrameRule = field(default_factory=FrameRule)

    def __post_init__(self) -> None:
        if not math.isfinite(self.weight):
            raise ValueError(
                f"weight of reward {self.name_or_path!r} is {self.weight}; expected a finite number"
            )
        if not 0 < self.deadline_s <= _DEADLINE_MAX_S:
            raise ValueError(
                f"deadline_s of reward {self.name_or_path!r} is {self.deadline_s}; "
                f"expected seconds, more than 0 and at most {_DEADLINE_MAX_S:,.0f}"
            )
        if self.retries < 0:
            raise ValueError(f"retries of reward {self.name_or_path!r} is {self.retries}; expected 0 or more")
        if self.isolation_s is not None and not (math.isfinite(self.isolation_s) and self.isolation_s >= 0):
            raise ValueError(
                f"isolation_s of reward {self.name_or_path!r} is {self.isolation_s}; expected 0 or more"
            )
        if self.name == TOTAL or "/" in self.name:
            raise RewardSetupError(
                f"reward {self.name_or_path!r} would be called {self.name!r}; {TOTAL!r} is the name of the "
                "weighted sum and '/' divides a reward from its details. Rename the function or set a label."
            )

    @property
    def name(self) -> str:
        """Name of the reward's curves."""
        return self.label or registry.parse(self.name_or_path).name

    @property
    def isolation_limit_s(self) -> float:
        """``isolation_s`` with its default resolved."""
        return _ISOLATION_DEADLINES * self.deadline_s if self.isolation_s is None else self.isolation_s


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
    """

    kind: FailureKind
    reward: str
    message: str


@dataclass(frozen=True, slots=True)
class ScoredSample:
    """A sample that every reward scored.

    Attributes:
        total: weighted sum over the rewards.
        scores: by reward name.
    """

    total: float
    scores: Mapping[str, RewardScore]

    def curves(self) -> dict[str, float]:
        """All values by curve name: ``reward`` (the total), ``<reward>``, ``<reward>/<detail>``."""
        curves = {TOTAL: self.total}
        for name, score in self.scores.items():
            curves[name] = score.value
            curves.update({f"{name}/{detail}": value for detail, value in score.details.items()})
        return curves


SampleResult: TypeAlias = ScoredSample | RewardFailure


@dataclass(frozen=True, slots=True)
class RewardBatch:
    """Results of one call, in the order of its images.

    Attributes:
        wall_s: by reward name, time its process spent on this batch (queueing excluded).
    """

    samples: tuple[SampleResult, ...]
    wall_s: Mapping[str, float]

    @property
    def failures(self) -> dict[int, RewardFailure]:
        """Samples without a reward, by index."""
        return {index: each for index, each in enumerate(self.samples) if isinstance(each, RewardFailure)}


def combine(
    specs: Mapping[str, RewardSpec], outcomes: Mapping[str, RewardScore | RewardFailure]
) -> SampleResult:
    """Weight one sample's scores; the first failure, in the order of ``specs``, wins."""
    scores: dict[str, RewardScore] = {}
    for name in specs:
        outcome = outcomes[name]
        if isinstance(outcome, RewardFailure):
            return outcome
        scores[name] = outcome
    total = sum(specs[name].weight * score.value for name, score in scores.items())
    if not math.isfinite(total):
        parts = " + ".join(
            f"{specs[name].weight:g} x {score.value:g} ({name})" for name, score in scores.items()
        )
        return RewardFailure(
            FailureKind.NOT_FINITE, TOTAL, f"the weighted sum {parts} is {total}; use smaller weights"
        )
    return ScoredSample(total, scores)
