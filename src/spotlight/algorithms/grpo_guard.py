"""GRPO-Guard (arXiv 2510.22319): Flow-GRPO with ratios of mean 1 and steps of equal weight.

Flow-GRPO's mean-reduced ratio lies below 1 by <(μ - μ_old)²>/2k² and its spread varies with the noise level,
so clipping acts on one side. The guarded ratio of a sample is

    ln r̂ = k (Δlog p + <(μ - μ_old)²>/2k²) = <e (μ - μ_old)>,   e = (x' - μ_old)/k

and the loss is divided by the step length d. The published script averages ln r̂ over the batch, which
couples unrelated samples; here it is per sample. The right-hand form is exactly 0 before the first update
and avoids cancellation.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from spotlight.algorithms.base import LossTerms, PolicyModel, Timesteps, TrainBatch
from spotlight.algorithms.flow_grpo import clipped_surrogate
from spotlight.algorithms.replay import ReplayAlgorithm, replay_metrics, transition
from spotlight.config.sections.algorithm import GRPOGuardConfig


@dataclass(frozen=True, slots=True)
class GRPOGuard(ReplayAlgorithm):
    """``old`` is the policy before the batch and gives μ_old: a batch's first update does not evaluate it."""

    config: GRPOGuardConfig

    def loss(self, policy: PolicyModel, batch: TrainBatch, timesteps: Timesteps) -> LossTerms:
        """Clipped surrogate of the guarded ratio, divided by the step length."""
        at = transition(batch, timesteps, self.config.train_timesteps)
        velocity = policy.velocity(at.x, at.sigma)
        with torch.no_grad():
            old_velocity = velocity if batch.first_update else policy.velocity(at.x, at.sigma, "old")
            old = self.sampler.moments(at.x, old_velocity, at.sigma, at.sigma_next)
        kick = (at.x_next - old.mean) / old.std
        moments = self.sampler.moments(at.x, velocity, at.sigma, at.sigma_next)
        log_ratio = (kick * (moments.mean - old.mean)).flatten(1).mean(1)
        loss, metrics = clipped_surrogate(log_ratio, batch.advantages, self.config.clip_range)
        with torch.no_grad():
            metrics |= replay_metrics(self.sampler.log_prob(at.x_next, moments), at, batch)
        return LossTerms(loss / (at.sigma - at.sigma_next), metrics, kept_step=at.index)
