"""RVM, reward-based velocity matching (arXiv 2608.23664), and RAM (arXiv 2605.10759), its case with β = 1.

Per noise level of a sample, with r = ``reward_scale`` A, v* = e - x0 and an anchor v_a, the initial model or
a moving average of the policy:

    L = w/2 (r <(v - v*)²> + β(r) <(v - v_a)²>)

- ``anchor_rule: constant``: β(r) = ``anchor_weight``. With 1 and the initial model the gradient is that of
  RAM (its equation 17), <(v - sg[v_a + r (v* - v)])²> / 2.
- ``complement``: β(r) = ``anchor_weight`` - r. With a moving average, which makes the rollouts, and
  r = A / A_max the gradient is that of DiffusionNFT without its normalisation, whose β is ``anchor_weight``.
- ``normalise``: w = t / sg<|v - v*|>, that normalisation; else w = 1. Where the moving average is the policy
  and r = 2 A, the gradient is that of :mod:`spotlight.algorithms.diffusion_nft`.

Where r < 0 the loss has no lower bound: it is its gradient that means something, not its value.
"""

from __future__ import annotations

from dataclasses import dataclass

from spotlight.algorithms.base import LossTerms, PolicyModel, Slot, Timesteps, TrainBatch
from spotlight.algorithms.base_algorithm import BaseAlgorithm
from spotlight.algorithms.forward_process import distance_to, mean_square, noised
from spotlight.config.sections.newer_algorithms import RVMConfig


@dataclass(frozen=True, slots=True)
class RVM(BaseAlgorithm):
    config: RVMConfig

    @property
    def rollout_slot(self) -> Slot:
        """The moving average where it is the anchor, as in DiffusionNFT."""
        return "old" if self.config.uses_old_policy else "policy"

    def loss(self, policy: PolicyModel, batch: TrainBatch, timesteps: Timesteps) -> LossTerms:
        config = self.config
        at = noised(batch, timesteps, config.train_timesteps, config.noise_levels)
        velocity = policy.velocity(at.x, at.sigma).float()
        miss = velocity - (at.noise - batch.final)
        reward = config.reward_scale * batch.advantages
        error = mean_square(miss)
        loss = reward * error
        metrics = {"matching_loss": error.detach()}
        if config.anchor_weight > 0:
            pull = config.anchor_weight - (reward if config.anchor_rule == "complement" else 0)
            loss = loss + pull * distance_to(config.anchor, policy, batch, at, velocity, metrics)
        weight = at.sigma / miss.detach().abs().flatten(1).mean(1).clamp(min=1e-5) if config.normalise else 1
        return LossTerms(weight * loss / 2, metrics)
