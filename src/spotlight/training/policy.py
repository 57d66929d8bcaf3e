"""The DiT as an algorithm's loss sees it: bound to one micro-batch's prompts, evaluated by weight slot.

Invariant: after every evaluation the policy slot is active again, because the backward pass recomputes
checkpointed activations with the active slot.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext

import torch
from torch import Tensor

from spotlight.algorithms.base import Slot
from spotlight.models.condition import Condition, Guidance
from spotlight.models.family import ModelFamily
from spotlight.models.media import MediaSize
from spotlight.models.shared.flop_count import ForwardLog
from spotlight.models.slots import WeightSlots
from spotlight.training.settings import TrainingGuidance


class MicroBatchPolicy:
    """Implements :class:`spotlight.algorithms.base.Policy` for a micro-batch's prompts, in order."""

    def __init__(
        self,
        family: ModelFamily,
        slots: WeightSlots,
        conditions: Sequence[Condition],
        *,
        size: MediaSize,
        guidance: TrainingGuidance | None,
        autocast: torch.dtype | None,
        log: ForwardLog | None = None,
    ) -> None:
        self._family, self._slots, self._log = family, slots, log
        self._size, self._autocast = size, autocast
        self._condition = family.collate(conditions)
        self._guidance: Guidance | None = None
        if guidance is not None:
            twice = guidance.scale > 1
            negative = family.negatives(conditions, guidance.negative) if twice else None
            self._guidance = Guidance(guidance.scale, negative, guidance.embedded)

    def velocity(self, latents: Tensor, sigma: Tensor, slot: Slot = "policy") -> Tensor:
        """Float32, shape of ``latents`` [batch, ...]. Frozen slots never build a graph."""
        frozen = nullcontext() if slot == "policy" else torch.no_grad()
        autocast = torch.autocast(
            self._family.device.type, dtype=self._autocast, enabled=self._autocast is not None
        )
        with frozen, autocast, self._slots.use(slot) as model:
            return self._family.velocity(
                model, latents, sigma, self._condition, self._guidance, self._size, self._log
            )
