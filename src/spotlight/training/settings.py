"""What the learner needs besides its configuration section."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from spotlight.config.sections.learner_section import LearnerConfig
from spotlight.models.condition import Condition
from spotlight.scheduler.types import Phase
from spotlight_rewards.base.errors import UserError


class TrainingError(UserError, RuntimeError):
    """Training cannot continue; names the problem and the remedy. No optimizer step was applied."""


@dataclass(frozen=True, slots=True, eq=False)
class TrainingGuidance:
    """Guidance during training, equal to the rollouts'.

    Attributes:
        scale: of true classifier-free guidance; above 1, every evaluation takes two forwards.
        negative: embeddings of the negative prompt.
        embedded: input of a guidance-distilled model; None for others.
    """

    scale: float
    negative: Condition
    embedded: float | None = None


def traced_phases(config: LearnerConfig, device: torch.device, note: Callable[[str], None]) -> list[Phase]:
    """What ``--profile`` traces. On CPUs ``auto`` measures memory by torch's profiler: two at once crash."""
    if device.type == "cuda" or "auto" not in (config.recompute, config.timesteps_per_pass):
        return [Phase.ROLLOUT, Phase.TRAINING]
    note("training is not traced: on a CPU, `auto` of learner.recompute or timesteps_per_pass excludes it")
    return [Phase.ROLLOUT]


def compute_type(config: LearnerConfig) -> torch.dtype | None:
    """Dtype of the DiT's matrix products in rollouts and training; None: that of its weights."""
    return torch.bfloat16 if config.autocast == "bfloat16" else None


def autocast_type(config: LearnerConfig, weights: torch.dtype) -> torch.dtype | None:
    """Dtype to autocast to; None: no autocast. A model in the dtype to compute in needs none.

    Args:
        weights: dtype of the model.
    """
    compute = compute_type(config)
    return None if compute == weights else compute


def adapter_type(config: LearnerConfig, weights: torch.dtype) -> torch.dtype | None:
    """Dtype in which float32 adapters are applied to a model in it; None: in float32, or as autocast says."""
    compute = compute_type(config)
    return compute if compute == weights else None
