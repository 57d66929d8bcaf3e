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
RewardDevice = Literal["auto", "cpu", "spot", "cuda", "learner"]


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
    device: RewardDevice = "auto"
    """Where its processes run. ``auto``: beside this command, with the GPUs there, under torchrun its rank's
    alone (``cpu`` with ``fleet.address``); ``cpu``: without GPUs, on a cluster on reserved nodes; ``spot``:
    idle CPUs of spot nodes, of reserved ones while there are none; ``cuda``: a GPU of its own for each, on a
    cluster of nodes started with the resource ``spotlight_reward``; ``learner``: beside the trainer on the
    device that it trains on, whose GPU all share; with several learner ranks on a cluster, in turn.
    """
    replicas: PositiveInt | None = None
    """Processes of this reward; default: ``reward_policy.workers``."""
    batch_size: PositiveInt | None = None
    """Most samples in a call; default: what the reward declares, else all that are ready at once."""
    frames: PositiveInt = 4
    """Of a video: how many evenly spaced frames a reward for pictures sees; 1: the middle one."""
    combine_frames: Literal["mean", "min"] = "mean"
    """How the scores of a video's frames become the video's."""
    label: str = ""
    """Name of the reward's curves; default: the function's name."""
    params: dict[str, Any] = {}  # noqa: RUF012 - pydantic copies it
    """Keyword arguments for the function."""

    @property
    def is_beside_command(self) -> bool:
        """Whether its process is always where the run directory is, in which people find what is asked."""
        return self.name == "vote"

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
    workers: PositiveInt | None = None
    """Processes per reward that names no ``replicas``; default: 1, or what the reward declares (``ocr``: one
    per two cores).
    """
    start_deadline_s: Annotated[float, Field(gt=0, le=86400)] = 120.0
    """Time limit for a reward's process to start and load, and for checking the prompts."""

    def problems(self, run: RunConfig) -> Iterator[Problem]:
        """Rewards with equal names, or without any weight."""
        yield from _device_problems(run)
        curves = [reward.curve for reward in run.rewards]
        for curve in sorted({curve for curve in curves if curves.count(curve) > 1}):
            yield Problem(
                "rewards", f"{curve!r} twice", "each name once", "Add the weights, or give a label."
            )
        if all(reward.weight == 0 for reward in run.rewards):
            yield Problem(
                "rewards", "only weights of 0", "at least one other weight", "Nothing would be learnt."
            )


def _device_problems(run: RunConfig) -> Iterator[Problem]:
    for index, reward in enumerate(run.rewards):
        key, ray = f"rewards[{index}].device", run.fleet.driver == "ray"
        if reward.device == "spot" and not ray:
            yield Problem(
                key, "'spot'", "another with fleet.driver=inline, which has no spot nodes",
                "Set device: cpu, or fleet.driver=ray.",
            )  # fmt: skip
        if reward.is_beside_command and reward.device in ("spot", "cuda", "learner"):
            yield Problem(
                key, repr(reward.device), f"'auto': {reward.name!r} needs the run directory",
                "Leave it out: its process runs beside the command that trains.",
            )  # fmt: skip
        if reward.device == "cuda" and ray and run.fleet.address is None:
            yield Problem(
                key, "'cuda'", "another on a cluster of this machine alone, whose nodes have CPU slots",
                "Set device: cpu, or name a cluster in fleet.address.",
            )  # fmt: skip
