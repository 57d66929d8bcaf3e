"""Supervised fine-tuning: flow matching on pictures of the training data.

    L = <(v - (e - x0))²>

at noise levels and with noise drawn as by all algorithms on final latents. Rewards do not enter.
"""

from __future__ import annotations

from dataclasses import dataclass

from spotlight.algorithms.base import LossTerms, PolicyModel, Timesteps, TrainBatch
from spotlight.algorithms.base_algorithm import BaseAlgorithm
from spotlight.algorithms.forward_process import mean_square, noised
from spotlight.config.sections.newer_algorithms import SFTConfig


@dataclass(frozen=True, slots=True)
class SFT(BaseAlgorithm):
    config: SFTConfig

    def loss(self, policy: PolicyModel, batch: TrainBatch, timesteps: Timesteps) -> LossTerms:
        config = self.config
        at = noised(batch, timesteps, config.train_timesteps, config.noise_levels)
        error = mean_square(policy.velocity(at.x, at.sigma).float() - (at.noise - batch.final))
        return LossTerms(error, {"matching_loss": error.detach()})
