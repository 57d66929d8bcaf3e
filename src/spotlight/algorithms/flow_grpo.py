"""Flow-GRPO (arXiv 2505.05470): PPO-clipped policy gradient over the stochastic denoising steps.

Per step of a sample: w max(-A r, -A clip(r, 1 ± c)) + β KL(policy, reference), r = exp(log p - log p_old).
Log-probs are means over the latent, hence the tiny clip ranges. Flow-GRPO-Fast is the same loss on a
short random SDE window, without KL (its rollouts use CPS at 0.8 in a window of 3 steps). w is 1, or with
``step_weights: noise`` the length of the step's kick over its mean over the sample's stochastic steps
(TempFlow-GRPO, arXiv 2508.04324, equation 8).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from spotlight.algorithms.base import LossTerms, PolicyModel, Slot, Timesteps, TrainBatch
from spotlight.algorithms.replay import (
    ReplayAlgorithm,
    Transition,
    log_probs_before,
    replay_metrics,
    transition,
)
from spotlight.config.sections.algorithm import FlowGRPOConfig
from spotlight.diffusion.samplers import Moments, Sampler


@dataclass(frozen=True, slots=True)
class FlowGRPO(ReplayAlgorithm):
    config: FlowGRPOConfig

    @property
    def takes_stale(self) -> bool:
        """Only if the ratio is to the rollout's own log-probs."""
        return self.config.old_log_probs == "rollout"

    @torch.no_grad()
    def old_log_probs(self, policy: PolicyModel, batch: TrainBatch, timesteps: Timesteps) -> Tensor | None:
        """Log-probs of the trained steps under the current policy, with ``recompute``; else None."""
        if self.config.old_log_probs != "recompute" or batch.latents is None:
            return None
        at = transition(batch, timesteps, self.config.train_timesteps)
        return self.sampler.log_prob(at.x_next, self._moments(policy, at, "policy"))

    def loss(self, policy: PolicyModel, batch: TrainBatch, timesteps: Timesteps) -> LossTerms:
        """Clipped surrogate plus KL of one step per row."""
        at = transition(batch, timesteps, self.config.train_timesteps)
        moments = self._moments(policy, at, "policy")
        log_prob = self.sampler.log_prob(at.x_next, moments)
        log_ratio = log_prob - self._old(batch, at, timesteps, log_prob)
        loss, metrics = clipped_surrogate(log_ratio, batch.advantages, self.config.clip_range)
        metrics |= replay_metrics(log_prob.detach(), at, batch)
        if self.config.step_weights == "noise":
            loss = loss * at.pick(kick_weights(self.sampler, batch.sigmas))
        if self.config.kl_weight > 0:
            with torch.no_grad():
                reference = self._moments(policy, at, "reference")
            if self.config.kl_scale == "step":
                moments = replace(moments, kl_std=moments.std)
            kl = self.sampler.kl(moments, reference)
            loss = loss + self.config.kl_weight * kl
            metrics["kl"] = kl.detach()
        return LossTerms(loss, metrics, kept_step=at.index)

    def _moments(self, policy: PolicyModel, at: Transition, slot: Slot) -> Moments:
        velocity = policy.velocity(at.x, at.sigma, slot)
        return self.sampler.moments(at.x, velocity, at.sigma, at.sigma_next)

    def _old(self, batch: TrainBatch, at: Transition, timesteps: Timesteps, log_prob: Tensor) -> Tensor:
        match self.config.old_log_probs:
            case "stop_gradient":
                return log_prob.detach()
            case "recompute":
                return log_probs_before(batch, timesteps, log_prob, self.name)
            case "rollout" if batch.rollout_log_probs is not None:
                return at.pick(batch.rollout_log_probs)
        raise ValueError(
            f"{self.name} with old_log_probs=rollout got none: the rollout must store its log-probs"
        )


def kick_weights(sampler: Sampler, sigmas: Tensor) -> Tensor:
    """[batch, S]: the steps' kicks between ``sigmas`` [batch, S + 1], over their mean."""
    flat = torch.zeros(len(sigmas), 1, 1, device=sigmas.device)
    kicks = torch.stack(
        [
            sampler.moments(flat, flat, sigmas[:, step], sigmas[:, step + 1]).std.flatten()
            for step in range(sigmas.shape[1] - 1)
        ],
        1,
    )
    return kicks / kicks.mean(1, keepdim=True)


def clipped_surrogate(
    log_ratio: Tensor, advantages: Tensor, clip_range: float
) -> tuple[Tensor, dict[str, Tensor]]:
    """max(-A r, -A clip(r, 1 ± c)) [batch], and its metrics (detached, [batch])."""
    ratio = torch.exp(log_ratio)
    clipped = ratio.clamp(1 - clip_range, 1 + clip_range)
    loss = torch.maximum(-advantages * ratio, -advantages * clipped)
    detached, log_ratio = ratio.detach(), log_ratio.detach()
    metrics = {
        "ratio": detached,
        "ratio_deviation": (detached - 1).abs(),
        "clip_fraction": ((detached - 1).abs() > clip_range).float(),
        "approx_kl": 0.5 * log_ratio.square(),
    }
    return loss, metrics
