"""ReFL (arXiv 2304.05977) and DRaFT-1 (arXiv 2309.17400): up a reward's gradient through one denoising step.

A rollout stops at a query, the state z of noise level s before its last step, and goes straight to the clean
prediction there, whose picture is scored. With g, the reward's gradient by it, kept from the rollout:

    L = -(g · ŷ),   ŷ = z - s v

In a batch's first update this is the gradient of -R(ŷ), in later ones its linearisation. Where the query is
the last step of the whole schedule (``query_steps`` = ``rollout.steps``) it is DRaFT-1; with an earlier one,
ReFL without its hinge, and with a fixed step where ReFL draws one of the last.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from spotlight.algorithms.base import Keeps, LossTerms, PolicyModel, Timesteps, TrainBatch
from spotlight.algorithms.base_algorithm import BaseAlgorithm
from spotlight.algorithms.forward_process import mean_square
from spotlight.algorithms.gradient.query import query_of
from spotlight.config.sections.gradient_algorithms import ReFLConfig
from spotlight.diffusion.samplers import predict_x0


@dataclass(frozen=True, slots=True)
class ReFL(BaseAlgorithm):
    config: ReFLConfig
    keeps: ClassVar[Keeps] = "query"

    def loss(self, policy: PolicyModel, batch: TrainBatch, timesteps: Timesteps) -> LossTerms:
        at = query_of(batch, self.name)
        velocity = policy.velocity(at.z, at.sigma).float()
        # To first order the reward that is gained since the rollout.
        gain = (at.gradient * (predict_x0(at.z, velocity, at.sigma) - at.clean)).flatten(1).sum(1)
        loss, metrics = -gain, {"reward_gain": gain.detach()}
        if self.config.reference_weight > 0:
            reference = policy.velocity(at.z, at.sigma, "reference").float().detach()
            distance = mean_square(velocity - reference)
            loss = loss + self.config.reference_weight * distance
            metrics["reference_distance"] = distance.detach()
        return LossTerms(loss, metrics)
