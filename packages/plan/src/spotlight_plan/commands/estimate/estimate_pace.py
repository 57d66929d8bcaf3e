"""The pace of a run that has not begun, by like runs, the simulator or its operations."""

from __future__ import annotations

from spotlight.config.schema import RunConfig
from spotlight.data.datasets import load_prompts
from spotlight.store.run_estimate import RunPace
from spotlight.testbed import TESTBEDS
from spotlight_plan.commands.estimate.counted_pace import counted_pace
from spotlight_plan.commands.estimate.like_runs import like_runs_pace
from spotlight_plan.commands.estimate.simulated_pace import simulated_pace
from spotlight_rewards.base.errors import ConfigError

_THREE = "three iterations of it, or a run like it in runs_dir"


def estimate_pace(config: RunConfig, ranks: int) -> RunPace | str:
    """An entry of :data:`spotlight.registry.PACES`.

    Raises:
        ConfigError, PromptFileError, ModelError: as the dry run.
    """
    prompts = load_prompts(config)
    pictures = len(prompts.test) * config.evaluation.images_per_prompt
    if (pace := like_runs_pace(config, ranks, pictures)) is not None:
        return pace
    if config.fleet.driver == "ray" and config.fleet.address is not None:
        return f"{_THREE}: which nodes join {config.fleet.address} is not known before"
    if config.fleet.driver == "ray" or config.model.path in TESTBEDS:
        try:
            return simulated_pace(config, ranks, len(prompts.train), len(prompts.test))
        except ConfigError as error:
            found = "; ".join(f"{problem.key}: {problem.found}" for problem in error.problems)
            return f"{_THREE}: it cannot be simulated ({found})"
    return counted_pace(config, ranks, pictures) or (
        f"{_THREE}: no GPU whose rate is known is here, or the model's sizes are not"
    )
