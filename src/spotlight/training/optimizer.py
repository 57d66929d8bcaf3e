"""AdamW on a learner's trainable parameters, and what its gradients amount to."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.autograd.graph import increment_version
from torch.nn.utils import get_total_norm

from spotlight.config.sections.learner_section import LearnerConfig
from spotlight.models.shared.sharded import is_sharded, whole
from spotlight.models.slots import WeightSlots
from spotlight.training.settings import TrainingError


def adamw(slots: WeightSlots, config: LearnerConfig) -> torch.optim.AdamW:
    """Of one group: all that is trained."""
    optimizer = torch.optim.AdamW(
        list(slots.trainable_parameters().values()),
        lr=config.learning_rate,
        betas=config.betas,
        eps=config.epsilon,
        weight_decay=config.weight_decay,
        fused=True,
    )
    # The fused kernel does not count its writes, which copies of the parameters go by.
    optimizer.register_step_post_hook(lambda done, *_: increment_version(trained(done)))
    return optimizer


def trained(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """Its parameters."""
    return optimizer.param_groups[0]["params"]  # type: ignore[no-any-return]


def bytes_to_come(optimizer: torch.optim.Optimizer) -> int:
    """Bytes of this rank's gradients and moments that are not allocated yet."""
    parameters = trained(optimizer)
    size = sum((each.to_local() if is_sharded(each) else each).nbytes for each in parameters)
    gradients = any(parameter.grad is not None for parameter in parameters)
    return size * (int(not gradients) + (0 if optimizer.state else 2))


def gradient_norm(optimizer: torch.optim.Optimizer) -> tuple[Tensor, int]:
    """Of all gradients, and their number of entries. Raises :class:`TrainingError` if there is none."""
    gradients = [parameter.grad for parameter in trained(optimizer) if parameter.grad is not None]
    if not gradients:
        raise TrainingError("step() without a gradient: accumulate() at least one micro-batch first")
    return whole(get_total_norm(gradients)), sum(gradient.numel() for gradient in gradients)
