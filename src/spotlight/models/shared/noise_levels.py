"""Noise levels as diffusers' pipelines make them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

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


def shift(tokens: int, config: Mapping[str, Any]) -> float:
    """diffusers' ``calculate_shift`` for a scheduler's configuration, in its order of operations."""
    base, largest = config.get("base_image_seq_len", 256), config.get("max_image_seq_len", 4096)
    base_shift, max_shift = config.get("base_shift", 0.5), config.get("max_shift", 1.15)
    slope = (max_shift - base_shift) / (largest - base)
    return float(tokens * slope + (base_shift - slope * base))


def falling(sigmas: Tensor, files: PipelineFiles) -> Tensor:
    """``sigmas``, a scheduler's noise levels; raises :class:`ModelError` unless they fall."""
    if not bool((sigmas.diff() < 0).all()):  # NaN included: one step with shift_terminal divides 0 by 0
        raise ModelError(
            f"{len(sigmas) - 1} denoising steps give the noise levels {sigmas.tolist()} with the scheduler "
            f"of {files.root}; expected falling ones: use at least 2 steps"
        )
    return sigmas
