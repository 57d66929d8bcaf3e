"""Noise levels as diffusers' pipelines make them."""

from __future__ import annotations

from spotlight_files.model_errors import ModelError
from spotlight_files.pipeline_files import PipelineFiles


def scheduler_config(files: PipelineFiles) -> dict[str, object]:
    """The scheduler's configuration. Raises :class:`ModelError` if it is not a plain Euler schedule."""
    config = files.config("scheduler", "scheduler_config.json")
    for option in ("stochastic_sampling", "invert_sigmas"):
        if config.get(option):
            raise ModelError(
                f"{files.folder('scheduler')}/scheduler_config.json sets {option}: the samplers here expect "
                "the plain flow-matching Euler schedule; set it to false"
            )
    return config


def shift(tokens: int, base: int, largest: int, base_shift: float, max_shift: float) -> float:
    """diffusers' ``calculate_shift``, in its order of operations."""
    slope = (max_shift - base_shift) / (largest - base)
    return tokens * slope + (base_shift - slope * base)
