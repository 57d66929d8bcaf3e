"""A small configuration to plan."""

from __future__ import annotations

from spotlight.config.load import build_config
from spotlight.config.schema import RunConfig

ROLLOUT = {"prompts_per_iteration": 3, "group_size": 4, "steps": 5}
PROMPTS = {"train": "testbed", "test": "testbed"}


def config(**sections: object) -> RunConfig:
    return build_config({"rollout": ROLLOUT, "data": PROMPTS, **sections}, "the test")
