"""AWM, advantage-weighted matching (arXiv 2509.25050): policy gradient with flow matching for log p.

Per noise level t of a sample, with l = <(v - (e - x0))²>:

    log p̂ = -(t/p) l^p,   L = -(A/5) r + λ <(v - v_ref)²> + κ <(v - v_old)²>,   r = exp(log p̂ - sg(log p̂))

On-policy r is 1, so the gradient is that of flow matching weighted by A/5 and t l^(p-1). ``old`` is a
moving average of the policy.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Literal, get_args

import torch
from torch import Tensor

from spotlight.algorithms.algorithm import LossTerms, Policy, Slot, Timesteps, TrainBatch
from spotlight.algorithms.forward_process import NoiseLevels, OldPolicy, mean_square, noised
from spotlight.diffusion.samplers import Sampler

_MATCHING_MIN = 1e-10  # below it l^p has no usable slope


@dataclass(frozen=True, slots=True)
class AWMParams:
    """Settings of AWM.

    Attributes:
        power: p of the pseudo log-prob; 1 is plain flow matching.
        advantage_scale: advantages are divided by this.
        reference_weight: λ of the distance to the starting model (0.001 to 0.003).
        old_weight: κ of the distance to the moving average.
        train_timesteps: noise levels trained a sample, stratified.
        noise_levels: their distribution: "uniform" over (0, 1), or "schedule": that of the rollout's sigmas.
        old_policy: how the moving average follows.
    """

    power: float = 0.25
    advantage_scale: float = 5.0
    reference_weight: float = 1e-3
    old_weight: float = 1.0
    train_timesteps: int = 3
    noise_levels: NoiseLevels = "uniform"
    old_policy: OldPolicy = field(default_factory=lambda: OldPolicy(slope=0.001, cap=0.3))

    def __post_init__(self) -> None:
        for key, value in (("power", self.power), ("advantage_scale", self.advantage_scale)):
            if not 0 < value < math.inf:
                raise ValueError(f"{key} is {value}; expected a number above 0")
        for key, value in (("reference_weight", self.reference_weight), ("old_weight", self.old_weight)):
            if not 0 <= value < math.inf:
                raise ValueError(f"{key} is {value}; expected a number >= 0")
        if self.train_timesteps < 1:
            raise ValueError(f"train_timesteps is {self.train_timesteps}; expected at least 1")
        if self.noise_levels not in get_args(NoiseLevels):
            known = ", ".join(get_args(NoiseLevels))
            raise ValueError(f"noise_levels is {self.noise_levels!r}; expected one of {known}")


@dataclass(frozen=True, slots=True)
class AWM:
    """Implements :class:`~spotlight.algorithms.algorithm.Algorithm`."""

    params: AWMParams
    sampler: Sampler
    name: str = "awm"
    keeps: Literal["final"] = "final"
    rollout_slot: Slot = "policy"
    takes_stale: Literal[True] = True

    @property
    def extra_slots(self) -> tuple[Slot, ...]:
        """The slots whose distance has a weight."""
        return tuple(slot for slot, weight in self._anchors() if weight > 0)

    def timesteps(self, kept_steps: int) -> int:
        """``train_timesteps``, whatever the rollout kept."""
        return self.params.train_timesteps

    def old_log_probs(self, policy: Policy, batch: TrainBatch, timesteps: Timesteps) -> None:
        """None: the ratio is that of the pass itself."""
        return

    def loss(self, policy: Policy, batch: TrainBatch, timesteps: Timesteps) -> LossTerms:
        """Advantage-weighted matching at one noise level of every row."""
        params = self.params
        x_t, sigma, noise = noised(batch, timesteps, params.train_timesteps, params.noise_levels)
        velocity = policy.velocity(x_t, sigma).float()
        matching = mean_square(velocity - (noise - batch.final))
        log_prob = -sigma / params.power * matching.clamp(min=_MATCHING_MIN).pow(params.power)
        ratio = torch.exp(log_prob - log_prob.detach())
        loss = -batch.advantages / params.advantage_scale * ratio
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
        """The decay of :class:`OldPolicy`; None when the average is not used."""
        return self.params.old_policy.decay(batches_trained) if self.params.old_weight > 0 else None

    def _anchors(self) -> tuple[tuple[Slot, float], ...]:
        return ("old", self.params.old_weight), ("reference", self.params.reference_weight)
