"""The rewards of a run, by name: nothing of them is imported, so a plan may ask too. Imports no torch."""

from __future__ import annotations

from spotlight.config.schema import RunConfig
from spotlight.rewards.results import RewardSpec


def make_reward_specs(config: RunConfig) -> tuple[RewardSpec, ...]:
    """The rewards as the pool wants them. Raises RewardSetupError for a name that is none, or reserved."""
    return tuple(
        RewardSpec(
            reward.name,
            weight=reward.weight,
            deadline_s=reward.deadline_s,
            retries=reward.retries,
            isolation_s=reward.isolation_s,
            label=reward.label,
            params=reward.params,
        )
        for reward in config.rewards
    )
