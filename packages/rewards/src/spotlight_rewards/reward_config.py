"""Configuration of one reward."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, PositiveInt

from spotlight_rewards.base.strict_section import COURSE, WORK, StrictSection

REWARD = "reward"
"""Curve of the weighted sum: the score that every trained sample has, and its advantage is made of."""
_ISOLATION_DEADLINES = 4
RewardDevice = Literal["auto", "cpu", "spot", "cuda", "learner"]


class RewardConfig(StrictSection):
    """One reward; the run's reward is the weighted sum of all."""

    name: str
    """A built-in reward (``spotlight rewards`` lists them) or ``module:function`` of your own."""
    weight: Annotated[float, COURSE] = 1.0
    """Factor in the sum."""
    deadline_s: Annotated[float, Field(gt=0, le=1e6), WORK] = 60.0
    """Time limit per call; a call that exceeds it is killed and counts as failed."""
    retries: Annotated[int, Field(ge=0), WORK] = 1
    """Further attempts after a failure."""
    outage_s: Annotated[float, Field(ge=0, le=1e6), WORK] = 1800.0
    """How long a server that does not answer (no connection, time-outs, status 408, 429, 502 to 504) is asked
    again, with growing pauses, before its samples fail; 0: not at all.
    """
    isolation_s: Annotated[Annotated[float, Field(ge=0)] | None, WORK] = None
    """Time for retrying a failed batch image by image, to lose only the bad one; default: 4 deadlines."""
    device: Annotated[RewardDevice, WORK] = "auto"
    """Where its processes run. ``auto``: beside this command, with the GPUs there, under torchrun its rank's
    alone (``cpu`` with ``fleet.address``); ``cpu``: without GPUs, on a cluster on reserved nodes; ``spot``:
    idle CPUs of spot nodes, of reserved ones while there are none; ``cuda``: a GPU of its own for each, on a
    cluster of nodes started with the resource ``spotlight_reward``; ``learner``: beside the trainer on the
    device that it trains on, whose GPU all share; with several learner ranks on a cluster, in turn.
    """
    replicas: Annotated[PositiveInt | None, WORK] = None
    """Processes of this reward; default: ``reward_policy.workers``."""
    batch_size: Annotated[PositiveInt | None, WORK] = None
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
    def scores_one(self) -> bool:
        """Whether it scores a picture alone in its group, although it compares: nobody is asked about it."""
        return self.name == "vote"

    @property
    def reads_file_of(self) -> str | None:
        """Key of metadata that names a file which it reads, beside ``references``."""
        if field := self.params.get("reference"):
            return str(field)
        return "reference" if self.name in ("edit-score", "first-frame") else None

    @property
    def isolation_limit_s(self) -> float:
        """``isolation_s`` with its default resolved."""
        return _ISOLATION_DEADLINES * self.deadline_s if self.isolation_s is None else self.isolation_s

    @property
    def curve(self) -> str:
        """Name of the reward's curves: its label, or the function's name."""
        return self.label or self.name.rpartition(":")[2].rpartition(".")[2]
