"""DGPO, direct group preference optimization (arXiv 2510.08425), on final latents.

All samples i of a group G are noised with the same e to the same t. With d = <(v - (e - x0))²>:

    s_G = β/|G| Σ_i A_i (d_i - d_ref,i),   L_i = stopgrad σ(s_G) A_i d_i + λ <(v - v_ref)²>

s_G falls as samples with A > 0 are matched better than by the initial model, and others worse, so groups that
are ordered well already count less. A row whose ratio exp(d_old - d) has left 1 ± ``clip_range`` in the
direction of its advantage contributes no gradient of the first term. ``old`` follows the policy and makes the
rollouts.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from spotlight.algorithms.base import LossTerms, PolicyModel, Slot, Timesteps, TrainBatch
from spotlight.algorithms.base_algorithm import BaseAlgorithm
from spotlight.algorithms.forward_process import mean_square
from spotlight.algorithms.preference.matching import groups_of, match
from spotlight.config.sections.newer_algorithms import DGPOConfig


@dataclass(frozen=True, slots=True)
class DGPO(BaseAlgorithm):
    config: DGPOConfig

    @property
    def rollout_slot(self) -> Slot:
        """The old policy, if there is one."""
        return "policy" if self.config.clip_range is None else "old"

    def loss(self, policy: PolicyModel, batch: TrainBatch, timesteps: Timesteps) -> LossTerms:
        config, groups, advantages = self.config, groups_of(batch, self.name), batch.advantages
        found = match(policy, batch, timesteps, config)
        error = found.error
        gain = advantages * (error.detach() - found.reference_error)
        score = config.beta * groups.table(gain).sum(1) / groups.sizes
        weight = groups.pick(torch.sigmoid(score))
        metrics = {"matching_loss": error.detach(), "group_weight": weight}
        metrics["velocity_norm_ratio"] = found.norm_ratio
        if config.clip_range is not None:
            ratio = torch.exp(found.error_of(policy, "old", batch) - error.detach())
            away = torch.where(advantages > 0, ratio > 1 + config.clip_range, ratio < 1 - config.clip_range)
            error = torch.where(away, error.detach(), error)
            metrics |= {"ratio": ratio, "clip_fraction": away.float()}
        loss = weight * advantages * error
        if config.reference_weight > 0:
            distance = mean_square(found.velocity - found.reference_velocity)
            loss = loss + config.reference_weight * distance
            metrics["reference_distance"] = distance.detach()
        return LossTerms(loss, metrics)
