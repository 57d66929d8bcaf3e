"""DiffusionNFT (arXiv 2509.16117): negative-aware fine-tuning on the forward process.

Rollouts come from a slowly following ``old`` policy with any ODE solver and store only x0. The loss noises
x0 again, x_t = (1-t) x0 + t e, and contrasts implicit positive and negative policies around the old one:

    ρ  = clip(A / 2A_max + ½, 0, 1)
    v+ = βv + (1-β)v_old,   v- = (1+β)v_old - βv,   x̂0± = x_t - t v±
    l± = <(x̂0± - x0)²> / max(stopgrad <|x̂0± - x0|>, 1e-5)
    L  = A_max (ρ l+ + (1-ρ) l-) / β + λ <(v - v_ref)²>
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from spotlight.algorithms.base import LossTerms, PolicyModel, Slot, Timesteps, TrainBatch
from spotlight.algorithms.base_algorithm import BaseAlgorithm
from spotlight.algorithms.forward_process import (
    distance_to,
    mean_square,
    noised,
    velocity_under,
    weighted_error,
)
from spotlight.config.sections.algorithm import DiffusionNFTConfig
from spotlight.diffusion.samplers import predict_x0


@dataclass(frozen=True, slots=True)
class DiffusionNFT(BaseAlgorithm):
    config: DiffusionNFTConfig
    rollout_slot: ClassVar[Slot] = "old"

    def loss(self, policy: PolicyModel, batch: TrainBatch, timesteps: Timesteps) -> LossTerms:
        config, clip = self.config, self.config.advantage.clip
        x_t, sigma, _ = at = noised(batch, timesteps, config.train_timesteps, config.noise_levels)
        velocity = policy.velocity(x_t, sigma).float()
        old = velocity_under(policy, "old", batch, at, velocity)
        away = config.beta * (velocity - old)
        rho = (batch.advantages / (2 * clip) + 0.5).clamp(0, 1)
        positive = weighted_error(predict_x0(x_t, old + away, sigma), batch.final)
        negative = weighted_error(predict_x0(x_t, old - away, sigma), batch.final)
        loss = clip * (rho * positive + (1 - rho) * negative) / config.beta
        metrics = {
            "rho": rho,
            "positive_loss": positive.detach(),
            "negative_loss": negative.detach(),
            "old_distance": mean_square(velocity.detach() - old),
        }
        if config.reference_weight > 0:
            distance = distance_to("reference", policy, batch, at, velocity, metrics)
            loss = loss + config.reference_weight * distance
        return LossTerms(loss, metrics)
