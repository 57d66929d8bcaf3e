"""Supervised fine-tuning: flow matching on pictures of the training data.

    L = <(v - (e - x0))²>

at noise levels and with noise drawn as by all algorithms on final latents. Rewards do not enter.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from spotlight.algorithms.base import LossTerms, PolicyModel, Slot, Timesteps, TrainBatch
from spotlight.algorithms.forward_process import mean_square, noised
from spotlight.config.sections.newer_algorithms import SFTConfig
from spotlight.diffusion.samplers import Sampler


@dataclass(frozen=True, slots=True)
class SFT:
    config: SFTConfig
    sampler: Sampler
    name: str = "sft"
    keeps: Literal["final"] = "final"
    rollout_slot: Slot = "policy"
    extra_slots: tuple[Slot, ...] = ()
    takes_stale: Literal[True] = True

    def timesteps(self, kept_steps: int) -> int:
        return self.config.train_timesteps

    def old_log_probs(self, policy: PolicyModel, batch: TrainBatch, timesteps: Timesteps) -> None:
        return

    def loss(self, policy: PolicyModel, batch: TrainBatch, timesteps: Timesteps) -> LossTerms:
        config = self.config
        at = noised(batch, timesteps, config.train_timesteps, config.noise_levels)
        error = mean_square(policy.velocity(at.x, at.sigma).float() - (at.noise - batch.final))
        return LossTerms(error, {"matching_loss": error.detach()})

    def old_decay(self, n: float) -> None:
        return
