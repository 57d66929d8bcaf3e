"""A run's reward specifications. Imports neither the rewards nor torch, so planning can use it."""

from __future__ import annotations

from spotlight.config.schema import RunConfig
from spotlight.rewards.frames import FrameRule
from spotlight.rewards.results import RewardSpec


def make_reward_specs(config: RunConfig) -> tuple[RewardSpec, ...]:
    """The pool's specifications. Raises RewardSetupError for an unknown or reserved name."""
    return tuple(
        RewardSpec(
            reward.name,
            weight=reward.weight,
            deadline_s=reward.deadline_s,
            retries=reward.retries,
            isolation_s=reward.isolation_s,
            label=reward.label,
            params=reward.params,
            frames=FrameRule(reward.frames, reward.combine_frames),
        )
        for reward in config.rewards
    )
