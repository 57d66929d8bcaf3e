"""``spotlight train --vote``: people judge the pictures on the dashboard; the recipe's rewards are curves."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from spotlight.cli.runs.dashboard_beside import missing_package
from spotlight.config.training_stages import settings_in
from spotlight.data.datasets import load_held_out
from spotlight_rewards.base.errors import UserError
from spotlight_rewards.base.yaml_tree import parse_override

if TYPE_CHECKING:
    from spotlight.config.schema import RunConfig

_SHOWN = 4
"""Pictures of a prompt, of which a person picks the best."""
_DEADLINE_S = 900
_EVALUATED = 3
"""Held-out prompts with a picture each, drawn after every round; nobody is asked about them."""


class VoteError(UserError, ValueError):
    """Nobody could vote."""


def vote_overrides(config: RunConfig, given: Sequence[str]) -> list[str]:
    """Overrides that make people the judges.

    Args:
        given: overrides of the command, which hold but for rewards: these become curves, too.

    Raises:
        VoteError: no dashboard is installed.
        ConfigError, PromptFileError: see :func:`spotlight.data.datasets.load_held_out`.
    """
    if (missing := missing_package()) is not None:
        package, remedy = missing
        raise VoteError(f"--vote needs the package {package!r}: people vote on the dashboard. {remedy}")
    settings = [dict([parse_override(each)]) for each in given if "=" in each]
    chosen = {key for each in settings for key, _ in settings_in(each)} - {"rewards"}
    return [f"{key}={value}" for key, value in _changes(config) if key not in chosen]


def _changes(config: RunConfig) -> Iterator[tuple[str, object]]:
    rollout, asked = config.rollout, {"name": "vote", "deadline_s": _DEADLINE_S, "retries": 0}
    others = [
        reward.model_dump(mode="json", exclude_defaults=True) | {"weight": 0.0}
        for reward in config.rewards
        if reward.name != "vote"
    ]
    # All groups of an iteration can wait at the same time.
    yield "rewards", json.dumps([asked | {"replicas": rollout.prompts_per_iteration}, *others])
    yield "reward_policy.on_failure", "drop"
    if rollout.group_size > _SHOWN:
        yield "rollout.group_size", _SHOWN
    yield "evaluation.every", 1
    yield "evaluation.images_per_prompt", 1
    if (config.evaluation.prompts or len(load_held_out(config))) > _EVALUATED:
        yield "evaluation.prompts", _EVALUATED
    if config.evaluation.grid_images is not None:
        yield "evaluation.grid_images", 1
