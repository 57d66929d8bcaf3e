"""Shared by trajectory algorithms: choosing which stored steps to train, and reading them from a batch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from spotlight.algorithms.base import Keeps, Timesteps, TrainBatch, timestep_of_rows
from spotlight.algorithms.base_algorithm import BaseAlgorithm
from spotlight.diffusion.noise import Stream, uniform


@dataclass(frozen=True, slots=True)
class Transition:
    """One denoising step per row, as the rollout stored it.

    Attributes:
        rows: [batch], 0 .. batch - 1.
        index: [batch], which of the S stored steps it is.
        x: [batch, tokens, channels], the state before.
        x_next: the state after, rounded as stored.
        sigma: [batch], before.
        sigma_next: [batch], after.
    """

    rows: Tensor
    index: Tensor
    x: Tensor
    x_next: Tensor
    sigma: Tensor
    sigma_next: Tensor

    def pick(self, per_step: Tensor) -> Tensor:
        """[batch]: the entries of ``per_step`` [batch, S] that belong to this transition."""
        return per_step[self.rows, self.index]


@dataclass(frozen=True, slots=True)
class ReplayAlgorithm(BaseAlgorithm):
    """Trains stochastic steps of its rollouts, of the version before the batch.

    Raises:
        ValueError: the sampler is deterministic.
    """

    keeps: ClassVar[Keeps] = "trajectory"

    @property
    def takes_stale(self) -> bool:
        return False

    def __post_init__(self) -> None:
        if not self.sampler.stochastic:
            raise ValueError(
                f"{self.name} needs rollouts with noise, but the sampler is {self.sampler}; "
                "use flow-sde, cps or dance with a noise level above 0"
            )

    def timesteps(self, kept_steps: int) -> int:
        return timestep_count(kept_steps, self.config.train_timesteps)


def timestep_count(kept_steps: int, train_timesteps: int | None) -> int:
    """How many of the stored steps are trained. Raises ValueError if there are fewer."""
    wanted = kept_steps if train_timesteps is None else train_timesteps
    if not 1 <= wanted <= kept_steps:
        raise ValueError(
            f"train_timesteps is {wanted}, but a rollout keeps {kept_steps} stochastic step(s); "
            "lower it, or widen the SDE window"
        )
    return wanted


def transition(batch: TrainBatch, timesteps: Timesteps, train_timesteps: int | None) -> Transition:
    """The transition each row trains; timesteps index the sample's trained steps.

    Raises:
        ValueError: the batch has no trajectory, or a timestep is out of range.
    """
    if batch.latents is None:
        raise ValueError("the batch holds no trajectory (latents is None), but the algorithm replays one")
    kept_steps = batch.latents.shape[1] - 1
    count = timestep_count(kept_steps, train_timesteps)
    at = timestep_of_rows(timesteps, len(batch.seeds))
    for timestep in at:
        if not 0 <= timestep < count:
            raise ValueError(f"training timestep is {timestep}; expected 0 <= timestep < {count}")
    chosen = [
        trained_steps(seed, version, kept_steps, count)[timestep]
        for seed, version, timestep in zip(batch.seeds, batch.versions, at, strict=True)
    ]
    device = batch.latents.device
    rows, index = torch.arange(len(chosen), device=device), torch.tensor(chosen, device=device)
    return Transition(
        rows=rows,
        index=index,
        x=batch.latents[rows, index],
        x_next=batch.latents[rows, index + 1],
        sigma=batch.sigmas[rows, index],
        sigma_next=batch.sigmas[rows, index + 1],
    )


def replay_metrics(log_prob: Tensor, at: Transition, batch: TrainBatch) -> dict[str, Tensor]:
    """The replayed log-prob [batch], detached, and its distance from the rollout's."""
    metrics = {"log_prob": log_prob}
    if batch.rollout_log_probs is not None:
        metrics["log_prob_rollout_difference"] = (log_prob - at.pick(batch.rollout_log_probs)).abs()
    return metrics


def trained_steps(seed: int, version: int, kept_steps: int, count: int) -> list[int]:
    """``count`` distinct stored steps in ascending order; a pure function of seed and policy version."""
    if count == kept_steps:
        return list(range(kept_steps))
    order = np.argsort(uniform(seed, Stream.TRAIN_TIMESTEPS, version, kept_steps), kind="stable")
    return sorted(int(step) for step in order[:count])


def log_probs_before(batch: TrainBatch, timesteps: Timesteps, log_prob: Tensor, algorithm: str) -> Tensor:
    """[batch]: every row's log-prob before the batch's first update; ``log_prob`` itself in that update.

    Raises:
        ValueError: they were not computed.
    """
    if batch.first_update:
        return log_prob.detach()  # same weights and rows as a recomputation: bitwise equal
    if batch.old_log_probs is None:
        raise ValueError(
            f"{algorithm} got no old log-probs: fill them from old_log_probs() before the first update is "
            "applied"
        )
    column = timestep_of_rows(timesteps, len(batch.seeds))
    rows = torch.arange(len(column), device=log_prob.device)
    return batch.old_log_probs[rows, torch.tensor(column, device=log_prob.device)]
