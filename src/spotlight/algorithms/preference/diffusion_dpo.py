"""Online Diffusion-DPO (arXiv 2311.12908): preferences between pairs of a group, on final latents.

The better sample w and the worse sample l of a pair are noised with the same e to the same t. With
d = <(v - (e - x0))²>:

    z = -β/2 ((d_w - d_ref,w) - (d_l - d_ref,l)),   L = -ln σ(z)

The loss of a group is the mean over its pairs. The gradient of L, σ(-z) β/2 (∇d_w - ∇d_l), is a sum over
samples with weights that need only values of the other one, so a pair's samples may be on two ranks.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from spotlight.algorithms.base import GroupRows, LossTerms, PolicyModel, Timesteps, TrainBatch
from spotlight.algorithms.base_algorithm import BaseAlgorithm
from spotlight.algorithms.preference.matching import groups_of, match
from spotlight.config.sections.newer_algorithms import DiffusionDPOConfig


@dataclass(frozen=True, slots=True)
class DiffusionDPO(BaseAlgorithm):
    config: DiffusionDPOConfig

    def loss(self, policy: PolicyModel, batch: TrainBatch, timesteps: Timesteps) -> LossTerms:
        """See the module's formula: a row has its pair's loss, with twice the gradient of its own error."""
        groups = groups_of(batch, self.name)
        found = match(policy, batch, timesteps, self.config)
        behind = groups.table(found.error - found.reference_error)
        partner, sign = pairs(groups, None if self.config.pairs == "ranks" else 1)
        margin = -self.config.beta / 2 * sign * (behind - behind.gather(1, partner))
        # The mean over a group's rows is that over its pairs.
        share = groups.sizes / sign.abs().sum(1).clamp(min=1)
        paired, share_of = groups.pick(sign), groups.pick(share)
        margin_of = groups.pick(margin)
        pull = self.config.beta * torch.sigmoid(-margin_of) * paired
        value = -F.logsigmoid(margin_of) * paired.abs()
        loss = share_of * (value + pull * (found.error - found.error.detach()))
        trained = paired.abs() * share_of  # of mean 1 over a group with pairs
        metrics = {
            "matching_loss": found.error.detach(),
            "preference_accuracy": trained * (margin_of > 0),
            "preference_margin": trained * margin_of,
            "paired_fraction": paired.abs(),
            "velocity_norm_ratio": found.norm_ratio,
        }
        return LossTerms(loss, metrics)


def pairs(groups: GroupRows, most: int | None) -> tuple[Tensor, Tensor]:
    """Pairs of the i-th best with the i-th worst sample of each group.

    Args:
        most: pairs per group; None: as many as possible.

    Returns:
        [N, K], the partner of each sample (itself, if none), and 1 for the better, -1 for the worse of a
        pair, 0 for samples without a pair or with a partner of equal advantage.
    """
    count = groups.present.shape[1]
    absent = torch.full_like(groups.advantages, -torch.inf)
    ordered = torch.where(groups.present, groups.advantages, absent)
    best_first = ordered.argsort(stable=True, dim=1, descending=True)
    rank = best_first.argsort(1)
    opposite = groups.sizes[:, None] - 1 - rank
    own = torch.arange(count, device=rank.device).expand_as(rank)
    partner = torch.where(groups.present, best_first.gather(1, opposite.clamp(min=0)), own)
    depth = torch.minimum(rank, opposite)
    used = groups.present if most is None else groups.present & (depth < most)
    sign = torch.sign(groups.advantages - groups.advantages.gather(1, partner))
    return partner, torch.where(used, sign, torch.zeros_like(sign))
