"""Configuration of rewards and of their failures."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field, PositiveInt

from spotlight.config.errors import Problem
from spotlight.config.section import Section

if TYPE_CHECKING:
    from spotlight.config.schema import RunConfig


REWARD = "reward"
"""Curve of the weighted sum: the score that every trained sample has, and its advantage is made of."""
_ISOLATION_DEADLINES = 4


class RewardConfig(Section):
    """One reward; the run's reward is the weighted sum of all."""

    name: str
    """A built-in reward (``spotlight rewards`` lists them) or ``module:function`` of your own."""
    weight: float = 1.0
    """Factor in the sum."""
    deadline_s: Annotated[float, Field(gt=0, le=1e6)] = 60.0
    """Time limit per call; a call that exceeds it is killed and counts as failed."""
    retries: Annotated[int, Field(ge=0)] = 1
    """Further attempts after a failure."""
    isolation_s: Annotated[float, Field(ge=0)] | None = None
    """Time for retrying a failed batch image by image, to lose only the bad one; default: 4 deadlines."""
    frames: PositiveInt = 4
    """Of a video: how many evenly spaced frames a reward for pictures sees; 1: the middle one."""
    combine_frames: Literal["mean", "min"] = "mean"
    """How the scores of a video's frames become the video's."""
    label: str = ""
    """Name of the reward's curves; default: the function's name."""
    params: dict[str, Any] = {}  # noqa: RUF012 - pydantic copies it
    """Keyword arguments for the function."""

    @property
    def isolation_limit_s(self) -> float:
        """``isolation_s`` with its default resolved."""
        return _ISOLATION_DEADLINES * self.deadline_s if self.isolation_s is None else self.isolation_s

    @property
    def curve(self) -> str:
        """Name of the reward's curves: its label, or the function's name."""
        return self.label or self.name.rpartition(":")[2].rpartition(".")[2]


class RewardPolicyConfig(Section):
    """What happens if a sample cannot be scored. It never counts as zero."""

    on_failure: Literal["stop", "drop"] = "stop"
    """``stop``: end the run with the reward's own error; ``drop``: record the sample as dropped, and why."""
    max_drop_share: Annotated[float, Field(ge=0, le=1)] = 0.25
    """With ``drop``: stop the run if more than this share of an iteration is dropped."""
    workers: PositiveInt = 1
    """Processes per reward."""
    start_deadline_s: Annotated[float, Field(gt=0, le=86400)] = 120.0
    """Time limit for a reward's process to start and load, and for checking the prompts."""

    def problems(self, run: RunConfig) -> Iterator[Problem]:
        """Rewards with equal names, or without any weight."""
        curves = [reward.curve for reward in run.rewards]
        for curve in sorted({curve for curve in curves if curves.count(curve) > 1}):
            yield Problem(
                "rewards", f"{curve!r} twice", "each name once", "Add the weights, or give a label."
            )
        if all(reward.weight == 0 for reward in run.rewards):
            yield Problem(
                "rewards", "only weights of 0", "at least one other weight", "Nothing would be learnt."
            )
