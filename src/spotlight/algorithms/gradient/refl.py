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
from typing import Literal

from spotlight.algorithms.base import LossTerms, PolicyModel, Slot, Timesteps, TrainBatch
from spotlight.algorithms.forward_process import mean_square
from spotlight.algorithms.gradient.query import query_of
from spotlight.config.sections.gradient_algorithms import ReFLConfig
from spotlight.diffusion.samplers import Sampler, predict_x0


@dataclass(frozen=True, slots=True)
class ReFL:
    config: ReFLConfig
    sampler: Sampler
    name: str = "refl"
    keeps: Literal["query"] = "query"
    rollout_slot: Slot = "policy"
    takes_stale: Literal[True] = True

    @property
    def extra_slots(self) -> tuple[Slot, ...]:
        """The reference, if its weight is positive."""
        return ("reference",) if self.config.reference_weight > 0 else ()

    def timesteps(self, kept_steps: int) -> int:
        return 1

    def old_log_probs(self, policy: PolicyModel, batch: TrainBatch, timesteps: Timesteps) -> None:
        return

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

    def old_decay(self, n: float) -> None:
        return
