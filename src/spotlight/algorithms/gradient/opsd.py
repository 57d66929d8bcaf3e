"""DiffusionOPSD (https://github.com/worldbench/DiffusionOPSD): self-distillation from reward gradients.

A rollout of the slowly following ``old`` policy stops at a query, the state z of noise level s before its
last step, and goes straight to the clean prediction there, the anchor y0 = z - s v_old. The picture of y0 is
scored, and the reward's gradient g by y0 makes two bounded targets, which the policy fits as DiffusionNFT
fits x0:

    y± = y0 ± radius ‖y0‖ g / ‖g‖
    ρ  = clip(A / 2A_max + ½, 0, 1),   v± = v_old ± β (v - v_old),   ŷ± = z - s v±
    L  = A_max (ρ l+ + (1-ρ) l-),      l± = <(ŷ± - y±)²> / max(stopgrad <|ŷ± - y±|>, 1e-5)

These are the formulas of the authors' ``scripts/train_opsd_ri_sd3.py`` with one ascent step, as in their
second version. There A is of the finished rollout's reward, and the second version stops rollouts at the
query; what it takes for A is not known to us: here, the reward of the anchor's picture.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from spotlight.algorithms.base import Keeps, LossTerms, PolicyModel, Slot, Timesteps, TrainBatch
from spotlight.algorithms.base_algorithm import BaseAlgorithm
from spotlight.algorithms.forward_process import mean_square, weighted_error
from spotlight.algorithms.gradient.query import query_of
from spotlight.config.sections.gradient_algorithms import OPSDConfig
from spotlight.diffusion.samplers import predict_x0


@dataclass(frozen=True, slots=True)
class OPSD(BaseAlgorithm):
    config: OPSDConfig
    keeps: ClassVar[Keeps] = "query"
    rollout_slot: ClassVar[Slot] = "old"

    def loss(self, policy: PolicyModel, batch: TrainBatch, timesteps: Timesteps) -> LossTerms:
        config, clip = self.config, self.config.advantage.clip
        at = query_of(batch, self.name)
        velocity = policy.velocity(at.z, at.sigma).float()
        away = config.beta * (velocity - at.velocity)
        rho = (batch.advantages / (2 * clip) + 0.5).clamp(0, 1)
        step = config.radius * _norm(at.clean) * at.gradient / (_norm(at.gradient) + 1e-12)
        positive = weighted_error(predict_x0(at.z, at.velocity + away, at.sigma), at.clean + step)
        negative = weighted_error(predict_x0(at.z, at.velocity - away, at.sigma), at.clean - step)
        loss = clip * (rho * positive + (1 - rho) * negative)
        moved = predict_x0(at.z, velocity.detach(), at.sigma) - at.clean
        gain, promised = ((each * at.gradient).flatten(1).sum(1) for each in (moved, step))
        metrics = {
            "rho": rho,
            "positive_loss": positive.detach(),
            "negative_loss": negative.detach(),
            "old_distance": mean_square(velocity.detach() - at.velocity),
            # To first order, of the reward that the target has more than the anchor: 1 is all of it.
            "realised_gain": gain / promised.clamp(min=1e-12),
        }
        return LossTerms(loss, metrics)


def _norm(x: Tensor) -> Tensor:
    """‖x‖ over all dimensions but the batch, shaped to multiply x."""
    norm: Tensor = torch.linalg.vector_norm(x.flatten(1), dim=1)
    return norm.view(-1, *[1] * (x.ndim - 1))
