"""AWM, advantage-weighted matching (arXiv 2509.25050): policy gradient with flow matching as log p.

Per noise level t of a sample, with l = <(v - (e - x0))²>:

    log p̂ = -(t/p) l^p,   L = -(A/5) r + λ <(v - v_ref)²> + κ <(v - v_old)²>,   r = exp(log p̂ - log p̂_0)

With ``old_log_probs: stop_gradient``, and in a batch's first update, log p̂_0 is sg(log p̂): r is 1, so the
gradient is that of flow matching weighted by A/5 and t l^(p-1). With ``recompute`` later updates of a batch
take it from the weights before the first. ``old`` is a moving average of the policy.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from spotlight.algorithms.base import LossTerms, PolicyModel, Slot, Timesteps, TrainBatch
from spotlight.algorithms.base_algorithm import BaseAlgorithm
from spotlight.algorithms.flow_grpo import clipped_surrogate
from spotlight.algorithms.forward_process import Noised, distance_to, mean_square, noised
from spotlight.algorithms.replay import log_probs_before
from spotlight.config.sections.algorithm import AWMConfig

_MATCHING_MIN = 1e-10  # the slope of l^p diverges at 0


@dataclass(frozen=True, slots=True)
class AWM(BaseAlgorithm):
    config: AWMConfig

    @property
    def takes_stale(self) -> bool:
        """Unless there is a ratio, which is to the weights before the batch."""
        return self.config.old_log_probs == "stop_gradient"

    @torch.no_grad()
    def old_log_probs(self, policy: PolicyModel, batch: TrainBatch, timesteps: Timesteps) -> Tensor | None:
        """With ``recompute``, log p̂ under the current policy; else None."""
        if self.config.old_log_probs != "recompute":
            return None
        at = noised(batch, timesteps, self.config.train_timesteps, self.config.noise_levels)
        return self._log_prob(self._matching(policy.velocity(at.x, at.sigma), at, batch), at)

    def loss(self, policy: PolicyModel, batch: TrainBatch, timesteps: Timesteps) -> LossTerms:
        config = self.config
        at = noised(batch, timesteps, config.train_timesteps, config.noise_levels)
        velocity = policy.velocity(at.x, at.sigma).float()
        matching = self._matching(velocity, at, batch)
        log_prob = self._log_prob(matching, at)
        before = log_prob.detach()
        if config.old_log_probs == "recompute":
            before = log_probs_before(batch, timesteps, before, self.name)
        loss, metrics = clipped_surrogate(
            log_prob - before, batch.advantages / config.advantage_scale, config.clip_range or math.inf
        )
        metrics = metrics if config.old_log_probs == "recompute" else {}
        metrics["matching_loss"] = matching.detach()
        for slot, weight in self._anchors():
            if weight > 0:
                loss = loss + weight * distance_to(slot, policy, batch, at, velocity, metrics)
        return LossTerms(loss, metrics)

    def _matching(self, velocity: Tensor, at: Noised, batch: TrainBatch) -> Tensor:
        return mean_square(velocity.float() - (at.noise - batch.final))

    def _log_prob(self, matching: Tensor, at: Noised) -> Tensor:
        power = self.config.power
        return -at.sigma / power * matching.clamp(min=_MATCHING_MIN).pow(power)

    def _anchors(self) -> tuple[tuple[Slot, float], ...]:
        return ("old", self.config.old_weight), ("reference", self.config.reference_weight)
