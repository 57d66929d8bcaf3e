"""Shared by preference losses: how well policy and reference match a sample's velocity."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from spotlight.algorithms.base import GroupRows, PolicyModel, Slot, Timesteps, TrainBatch
from spotlight.algorithms.forward_process import Noised, mean_square, noised, norm_ratio, velocity_under
from spotlight.config.sections.algorithm import ForwardProcessSection


class Matching(NamedTuple):
    """Of every row, at a noise level and with a noise that its group shares.

    Attributes:
        at: the noised samples.
        velocity: of the policy.
        error: <(v - (e - x0))²>, [batch], with gradient.
        reference_velocity: of the initial model, without gradient.
        reference_error: the same error of the initial model.
    """

    at: Noised
    velocity: Tensor
    error: Tensor
    reference_velocity: Tensor
    reference_error: Tensor

    @property
    def norm_ratio(self) -> Tensor:
        """[batch], of the policy's velocity to the initial model's."""
        return norm_ratio(self.velocity, self.reference_velocity)

    def error_of(self, policy: PolicyModel, slot: Slot, batch: TrainBatch) -> Tensor:
        """[batch], under other weights, without gradient."""
        velocity = velocity_under(policy, slot, batch, self.at, self.velocity)
        return mean_square(velocity - (self.at.noise - batch.final))


def match(
    policy: PolicyModel, batch: TrainBatch, timesteps: Timesteps, config: ForwardProcessSection
) -> Matching:
    at = noised(batch, timesteps, config.train_timesteps, config.noise_levels, config.levels)
    target = at.noise - batch.final
    velocity = policy.velocity(at.x, at.sigma).float()
    reference = velocity_under(policy, "reference", batch, at, velocity)
    return Matching(at, velocity, mean_square(velocity - target), reference, mean_square(reference - target))


def groups_of(batch: TrainBatch, algorithm: str) -> GroupRows:
    """The batch's groups. Raises ValueError if it has none."""
    if batch.groups is None:
        raise ValueError(f"{algorithm} compares the samples of a group, but the batch knows no groups")
    return batch.groups
