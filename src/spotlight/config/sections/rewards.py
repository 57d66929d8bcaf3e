"""What happens to samples without scores; a reward's own section: `spotlight_rewards.reward_config`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field, PositiveInt

from spotlight.config.section import Section
from spotlight_rewards.base.errors import Problem

if TYPE_CHECKING:
    from spotlight.config.schema import RunConfig


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
