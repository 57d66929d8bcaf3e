"""The reward that a command is about, with its parameters."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, TypeAlias

import typer

if TYPE_CHECKING:
    from spotlight_rewards.reward_config import RewardConfig

START_DEADLINE_S = 86400.0
"""A day: who waits for a download at a terminal can end it."""

ParamOption: TypeAlias = Annotated[
    list[str] | None,
    typer.Option("--param", "-p", metavar="KEY=VALUE", help="A parameter of the reward, in YAML syntax."),
]
DeadlineOption: TypeAlias = Annotated[
    float, typer.Option("--deadline-s", min=0.1, max=1e6, help="Time limit per call of the reward.")
]


def reward_of(name: str, params: list[str] | None, deadline_s: float) -> RewardConfig:
    """The reward as a run's configuration has it. Raises ConfigError or RewardSetupError."""
    from spotlight_rewards.base.yaml_tree import parse_override, section_of
    from spotlight_rewards.results import require_names
    from spotlight_rewards.reward_config import RewardConfig

    tree: dict[str, Any] = {}
    for override in params or []:
        key, value = parse_override(override)
        node, leaf = section_of(tree, key)
        node[leaf] = value
    reward = RewardConfig(name=name, params=tree, deadline_s=deadline_s, retries=0, outage_s=0)
    require_names([reward])
    return reward
