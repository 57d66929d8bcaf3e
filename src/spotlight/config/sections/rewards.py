"""What happens to samples without scores; a reward's own section: `spotlight_rewards.reward_config`."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, PositiveInt

from spotlight.config.requires import UNSET, Requires, That, other_than
from spotlight.config.section import Section
from spotlight_rewards.base.strict_section import WORK


class RewardPolicyConfig(Section):
    """What happens if a sample cannot be scored. It never counts as zero."""

    on_failure: Annotated[Literal["stop", "drop"], WORK] = "stop"
    """``stop``: end the run with the reward's own error; ``drop``: record the sample as dropped, and why."""
    max_drop_share: Annotated[float, Field(ge=0, le=1), WORK] = 0.25
    """With ``drop``: stop the run if more than this share of an iteration is dropped."""
    workers: Annotated[PositiveInt | None, WORK] = None
    """Processes per reward without ``replicas``; default: 1, or what the reward declares (``ocr-onnx``:
    one per two cores).
    """
    start_deadline_s: Annotated[float, Field(gt=0, le=86400), WORK] = 120.0
    """Time limit for a reward's process to start and load, and for checking the prompts."""

    requires = (
        Requires("rewards.*.device", {"fleet.driver": "inline"}, other_than("spot"),
                 "A single process has no spot nodes: set device: cpu, or fleet.driver=ray."),
        Requires("rewards.*.device", {"rewards.*.name": "vote"},
                 other_than("spot", "cuda", "learner"),
                 "It needs the run directory, so its process runs beside the command that trains: leave the "
                 "device out."),
        Requires("rewards.*.device", {"fleet.driver": "ray", "fleet.address": UNSET}, other_than("cuda"),
                 "A cluster on this machine has only CPU slots: set device: cpu, or name a cluster in "
                 "fleet.address."),
        Requires("rewards", {},
                 That("each name once", lambda run: len({reward.curve for reward in run.rewards})
                      == len(run.rewards)), "Add up their weights in one, or give one a label."),
        Requires("rewards", {},
                 That("at least one weight other than 0", lambda run: any(one.weight for one in run.rewards)),
                 "Nothing would be learnt: set one."),
    )  # fmt: skip
