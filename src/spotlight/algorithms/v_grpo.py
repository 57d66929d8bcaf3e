"""V-GRPO (arXiv 2604.23380): clipped policy gradient with the ELBO as log-prob, on final latents.

Of a sample, with n noise levels t_j and noises e_j that all samples of its group share:

    x̂0_j = x_j - t_j v(x_j, t_j),   s_j = -<(x̂0_j - x0)²> / stopgrad max(<|x̂0_j - x0|>, 1e-5)
    r = exp(1/n Σ_j (s_j - s_j,old)),   L = max(-A r, -A clip(r, 1 ± c))

with A or, softly clipped, η tanh(A/η). ``old`` are the weights before the batch: in its first update r is 1
and every level's gradient is that of -A exp(s_j - sg s_j), so that levels may be in different passes. Later
updates evaluate all levels of a sample in one pass. Without the paper's optional KL penalty.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from spotlight.algorithms.base import LossTerms, PolicyModel, Timesteps, TrainBatch, timestep_of_rows
from spotlight.algorithms.base_algorithm import BaseAlgorithm
from spotlight.algorithms.flow_grpo import clipped_surrogate
from spotlight.algorithms.forward_process import noised, weighted_error
from spotlight.algorithms.replay import log_probs_before
from spotlight.config.sections.newer_algorithms import VGRPOConfig
from spotlight.diffusion.samplers import predict_x0


@dataclass(frozen=True, slots=True)
class VGRPO(BaseAlgorithm):
    config: VGRPOConfig
    takes_stale: ClassVar[bool] = False

    @torch.no_grad()
    def old_log_probs(self, policy: PolicyModel, batch: TrainBatch, timesteps: Timesteps) -> Tensor:
        """s of every row under the current policy."""
        return self._surrogate(policy, batch, timesteps)

    def loss(self, policy: PolicyModel, batch: TrainBatch, timesteps: Timesteps) -> LossTerms:
        """See the module's formula; one noise level per row.

        Raises:
            ValueError: in a later update, not all noise levels of the samples.
        """
        config, advantages = self.config, batch.advantages
        if config.soft_clip is not None:
            advantages = config.soft_clip * torch.tanh(advantages / config.soft_clip)
        surrogate = self._surrogate(policy, batch, timesteps)
        log_ratio = surrogate - log_probs_before(batch, timesteps, surrogate, self.name)
        if not batch.first_update:
            log_ratio = self._over_levels(log_ratio, timesteps)
        loss, metrics = clipped_surrogate(log_ratio, advantages, config.clip_range)
        return LossTerms(loss, {**metrics, "surrogate": surrogate.detach()})

    def _surrogate(self, policy: PolicyModel, batch: TrainBatch, timesteps: Timesteps) -> Tensor:
        config = self.config
        x_t, sigma, _ = noised(batch, timesteps, config.train_timesteps, config.noise_levels)
        predicted = predict_x0(x_t, policy.velocity(x_t, sigma).float(), sigma)
        return -weighted_error(predicted, batch.final)

    def _over_levels(self, values: Tensor, timesteps: Timesteps) -> Tensor:
        """[batch]: of every row, the mean over its sample's rows."""
        at, wanted = timestep_of_rows(timesteps, len(values)), self.config.train_timesteps
        if len(set(at)) != wanted:
            raise ValueError(
                f"a pass has {len(set(at))} of the {wanted} noise levels of its samples, but {self.name}'s "
                f"ratio is of their mean: set learner.timesteps_per_pass to {wanted}"
            )
        # Rows are the whole batch, timestep by timestep.
        return values.view(wanted, -1).mean(0).repeat(wanted)
