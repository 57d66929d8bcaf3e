"""AWM, advantage-weighted matching (arXiv 2509.25050): policy gradient with flow matching as log p.

Per noise level t of a sample, with l = <(v - (e - x0))²>:

    log p̂ = -(t/p) l^p,   L = -(A/5) r + λ <(v - v_ref)²> + κ <(v - v_old)²>,   r = exp(log p̂ - sg(log p̂))

On-policy r is 1, so the gradient is that of flow matching weighted by A/5 and t l^(p-1). ``old`` is a
moving average of the policy.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from spotlight.algorithms.base import LossTerms, Policy, Slot, Timesteps, TrainBatch
from spotlight.algorithms.forward_process import mean_square, noised
from spotlight.config.sections.algorithm import AWMConfig
from spotlight.diffusion.samplers import Sampler

_MATCHING_MIN = 1e-10  # the slope of l^p diverges at 0


@dataclass(frozen=True, slots=True)
class AWM:
    """Implements :class:`~spotlight.algorithms.base.Algorithm`."""

    config: AWMConfig
    sampler: Sampler
    name: str = "awm"
    keeps: Literal["final"] = "final"
    rollout_slot: Slot = "policy"
    takes_stale: Literal[True] = True

    @property
    def extra_slots(self) -> tuple[Slot, ...]:
        """Slots whose distance has a positive weight."""
        return tuple(slot for slot, weight in self._anchors() if weight > 0)

    def timesteps(self, kept_steps: int) -> int:
        """``train_timesteps``."""
        return self.config.train_timesteps

    def old_log_probs(self, policy: Policy, batch: TrainBatch, timesteps: Timesteps) -> None:
        """None: the ratio uses the current pass only."""
        return

    def loss(self, policy: Policy, batch: TrainBatch, timesteps: Timesteps) -> LossTerms:
        """See the module's formula; one noise level per row."""
        config = self.config
        x_t, sigma, noise = noised(batch, timesteps, config.train_timesteps, config.noise_levels)
        velocity = policy.velocity(x_t, sigma).float()
        matching = mean_square(velocity - (noise - batch.final))
        log_prob = -sigma / config.power * matching.clamp(min=_MATCHING_MIN).pow(config.power)
        ratio = torch.exp(log_prob - log_prob.detach())
        loss = -batch.advantages / config.advantage_scale * ratio
        metrics: dict[str, Tensor] = {"matching_loss": matching.detach()}
        for slot, weight in self._anchors():
            if weight > 0:
                with torch.no_grad():
                    anchor = policy.velocity(x_t, sigma, slot).float()
                distance = mean_square(velocity - anchor)
                loss = loss + weight * distance
                metrics[f"{slot}_distance"] = distance.detach()
        return LossTerms(loss, metrics)

    def old_decay(self, batches_trained: int) -> float | None:
        """From ``algorithm.old_policy``; None if ``old_weight`` is 0."""
        return self.config.old_policy.decay(batches_trained) if self.config.old_weight > 0 else None

    def _anchors(self) -> tuple[tuple[Slot, float], ...]:
        return ("old", self.config.old_weight), ("reference", self.config.reference_weight)
