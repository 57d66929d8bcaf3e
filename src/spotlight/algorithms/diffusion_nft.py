"""DiffusionNFT (arXiv 2509.16117): negative-aware fine-tuning on the forward process.

Rollouts are made by a slowly following ``old`` policy with any ODE solver and keep only x0. The loss
noises x0 again, x_t = (1-t) x0 + t e, and contrasts an implicit positive and negative policy around the
old one, weighted by ρ = clip(A / 2A_max + ½, 0, 1):

    v+ = βv + (1-β)v_old,   v- = (1+β)v_old - βv,   x̂0± = x_t - t v±
    l± = <(x̂0± - x0)²> / max(stopgrad <|x̂0± - x0|>, 1e-5)
    L  = A_max (ρ l+ + (1-ρ) l-) / β + λ <(v - v_ref)²>
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Literal, get_args

import torch
from torch import Tensor

from spotlight.algorithms.algorithm import LossTerms, Policy, Slot, Timesteps, TrainBatch
from spotlight.algorithms.forward_process import NoiseLevels, OldPolicy, mean_square, noised
from spotlight.diffusion.samplers import Sampler, predict_x0


@dataclass(frozen=True, slots=True)
class DiffusionNFTParams:
    """Settings of DiffusionNFT.

    Attributes:
        beta: distance of the implicit policies from the old one; 0.1 for OCR and several rewards.
        advantage_max: A_max: advantages beyond it do not count.
        reference_weight: λ of the distance to the starting model; above 0 costs one more forward.
        train_timesteps: noise levels trained a sample, stratified.
        noise_levels: their distribution: "uniform" over (0, 1), or "schedule": that of the rollout's
            sigmas (so shifted like them).
        old_policy: how the behaviour policy follows.
    """

    beta: float = 1.0
    advantage_max: float = 5.0
    reference_weight: float = 1e-4
    train_timesteps: int = 3
    noise_levels: NoiseLevels = "uniform"
    old_policy: OldPolicy = field(default_factory=OldPolicy)

    def __post_init__(self) -> None:
        for key, value in (("beta", self.beta), ("advantage_max", self.advantage_max)):
            if not 0 < value < math.inf:
                raise ValueError(f"{key} is {value}; expected a number above 0")
        if not 0 <= self.reference_weight < math.inf:
            raise ValueError(f"reference_weight is {self.reference_weight}; expected a number >= 0")
        if self.train_timesteps < 1:
            raise ValueError(f"train_timesteps is {self.train_timesteps}; expected at least 1")
        if self.noise_levels not in get_args(NoiseLevels):
            known = ", ".join(get_args(NoiseLevels))
            raise ValueError(f"noise_levels is {self.noise_levels!r}; expected one of {known}")


@dataclass(frozen=True, slots=True)
class DiffusionNFT:
    """Implements :class:`~spotlight.algorithms.algorithm.Algorithm`."""

    params: DiffusionNFTParams
    sampler: Sampler
    name: str = "diffusion-nft"
    keeps: Literal["final"] = "final"
    rollout_slot: Slot = "old"
    takes_stale: Literal[True] = True

    @property
    def extra_slots(self) -> tuple[Slot, ...]:
        """The old policy, and the reference when it has a weight."""
        return ("old", "reference") if self.params.reference_weight > 0 else ("old",)

    def timesteps(self, kept_steps: int) -> int:
        """``train_timesteps``, whatever the rollout kept."""
        return self.params.train_timesteps

    def old_log_probs(self, policy: Policy, batch: TrainBatch, timesteps: Timesteps) -> None:
        """None: there are no ratios."""
        return

    def loss(self, policy: Policy, batch: TrainBatch, timesteps: Timesteps) -> LossTerms:
        """Contrastive flow-matching loss at one noise level of every row."""
        params = self.params
        x_t, sigma, _ = noised(batch, timesteps, params.train_timesteps, params.noise_levels)
        velocity = policy.velocity(x_t, sigma).float()
        with torch.no_grad():
            old = policy.velocity(x_t, sigma, "old").float()
        away = params.beta * (velocity - old)
        rho = (batch.advantages / (2 * params.advantage_max) + 0.5).clamp(0, 1)
        positive = _weighted_error(predict_x0(x_t, old + away, sigma), batch.final)
        negative = _weighted_error(predict_x0(x_t, old - away, sigma), batch.final)
        loss = params.advantage_max * (rho * positive + (1 - rho) * negative) / params.beta
        metrics = {
            "rho": rho,
            "positive_loss": positive.detach(),
            "negative_loss": negative.detach(),
            "old_distance": mean_square(velocity.detach() - old),
        }
        if params.reference_weight > 0:
            with torch.no_grad():
                reference = policy.velocity(x_t, sigma, "reference").float()
            distance = mean_square(velocity - reference)
            loss = loss + params.reference_weight * distance
            metrics["reference_distance"] = distance.detach()
        return LossTerms(loss, metrics)

    def old_decay(self, batches_trained: int) -> float:
        """The decay of :class:`OldPolicy`."""
        return self.params.old_policy.decay(batches_trained)


def _weighted_error(x0_predicted: Tensor, x0: Tensor) -> Tensor:
    """<(x̂0 - x0)²> over its own (constant) mean absolute error, so that noise levels weigh alike."""
    error = x0_predicted - x0
    weight = error.detach().abs().flatten(1).mean(1).clamp(min=1e-5)
    return mean_square(error) / weight
