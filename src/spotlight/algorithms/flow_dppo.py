"""Flow-DPPO (arXiv 2606.11025): Flow-GRPO with a divergence mask in place of the ratio's clip.

A step's policy is a Gaussian, so its divergence from the one before the batch is known exactly:

    D = <(μ - μ_old)²> / 2k²,   r = exp(log p - log p_old),   L = -A r

A row with D >= ``divergence_max`` contributes no gradient if it is pushed further: if A > 0 and r > 1, or
A < 0 and r < 1. In a batch's first update D is 0 and r is 1. As log-probs, D is a mean over the latent.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from spotlight.algorithms.base import LossTerms, PolicyModel, Timesteps, TrainBatch
from spotlight.algorithms.replay import ReplayAlgorithm, replay_metrics, transition
from spotlight.config.sections.newer_algorithms import FlowDPPOConfig


@dataclass(frozen=True, slots=True)
class FlowDPPO(ReplayAlgorithm):
    """``old`` is the policy before the batch, so a batch's first update does not evaluate it."""

    config: FlowDPPOConfig

    def loss(self, policy: PolicyModel, batch: TrainBatch, timesteps: Timesteps) -> LossTerms:
        """-A r of one step per row, without gradient where the mask blocks it."""
        at, advantages = transition(batch, timesteps, self.config.train_timesteps), batch.advantages
        velocity = policy.velocity(at.x, at.sigma)
        moments = self.sampler.moments(at.x, velocity, at.sigma, at.sigma_next)
        log_prob = self.sampler.log_prob(at.x_next, moments)
        with torch.no_grad():
            old_velocity = velocity if batch.first_update else policy.velocity(at.x, at.sigma, "old")
            old = self.sampler.moments(at.x, old_velocity, at.sigma, at.sigma_next)
            old_log_prob = self.sampler.log_prob(at.x_next, old)
        ratio = torch.exp(log_prob - old_log_prob)
        with torch.no_grad():
            drift = (moments.mean - old.mean).square() / (2 * old.std.square())
            divergence = drift.flatten(1).mean(1)
            outward = (ratio - 1) * advantages > 0
            blocked = (divergence >= self.config.divergence_max) & outward
        loss = -advantages * torch.where(blocked, ratio.detach(), ratio)
        detached = ratio.detach()
        metrics = {
            "ratio": detached,
            "ratio_deviation": (detached - 1).abs(),
            "divergence": divergence,
            "masked_fraction": blocked.float(),
            **replay_metrics(log_prob.detach(), at, batch),
        }
        return LossTerms(loss, metrics, kept_step=at.index)
