"""Shared by forward-process algorithms: noising samples at chosen levels.

Draws are counter-based functions of (seed, policy version, training timestep), so they do not depend on
micro-batches or ranks.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from spotlight.algorithms.base import PolicyModel, Slot, Timesteps, TrainBatch, timestep_of_rows
from spotlight.algorithms.replay import trained_steps
from spotlight.config.sections.algorithm import NoiseLevels
from spotlight.diffusion.noise import Stream, normal_batch, uniform
from spotlight.diffusion.samplers import interpolate

_TIMESTEPS_MAX = 2**16  # indices of TRAIN_NOISE reserved per policy version


class Noised(NamedTuple):
    """x_t [batch, tokens, channels], its noise levels t [batch], and the noise e in it."""

    x: Tensor
    sigma: Tensor
    noise: Tensor


def noised(
    batch: TrainBatch,
    timesteps: Timesteps,
    train_timesteps: int,
    levels: NoiseLevels,
    among: int | None = None,
) -> Noised:
    """x_t = (1-t) x0 + t e per row, at the noise level of its timestep.

    Args:
        among: of the schedule's levels, only the first so many; None: all but the last, 0.

    Raises:
        ValueError: a timestep is not within [0, train_timesteps), or the schedule has fewer levels.
    """
    at = timestep_of_rows(timesteps, len(batch.seeds))
    for timestep in at:
        if not 0 <= timestep < train_timesteps <= _TIMESTEPS_MAX:
            raise ValueError(
                f"training timestep is {timestep} of {train_timesteps}; "
                f"expected 0 <= timestep < train_timesteps <= {_TIMESTEPS_MAX}"
            )
    device = batch.final.device
    sigma = _levels(batch, at, train_timesteps, levels, among)
    indices = [
        version * _TIMESTEPS_MAX + timestep for version, timestep in zip(batch.versions, at, strict=True)
    ]
    shape = batch.final.shape[1:]
    noise = normal_batch(batch.seeds, Stream.TRAIN_NOISE, indices, shape, device)
    return Noised(interpolate(batch.final, noise, sigma), sigma, noise)


def velocity_under(
    policy: PolicyModel, slot: Slot, batch: TrainBatch, at: Noised, velocity: Tensor
) -> Tensor:
    """Float32, without gradient; ``velocity`` is that of the policy, which the old one may equal."""
    if slot == "old" and batch.old_is_policy:
        return velocity.detach()
    with torch.no_grad():
        return policy.velocity(at.x, at.sigma, slot).float()


def distance_to(
    slot: Slot, policy: PolicyModel, batch: TrainBatch, at: Noised, velocity: Tensor, into: dict[str, Tensor]
) -> Tensor:
    """<(v - v_slot)²>, [batch]; ``into`` gets it as a metric, and the ratio of norms to the initial model."""
    anchor = velocity_under(policy, slot, batch, at, velocity)
    distance = mean_square(velocity - anchor)
    into[f"{slot}_distance"] = distance.detach()
    if slot == "reference":
        into["velocity_norm_ratio"] = norm_ratio(velocity, anchor)
    return distance


def _levels(
    batch: TrainBatch, at: list[int], train_timesteps: int, levels: NoiseLevels, among: int | None
) -> Tensor:
    device, rows = batch.final.device, list(zip(batch.seeds, batch.versions, at, strict=True))
    if levels in ("uniform", "schedule"):
        positions = [stratified(seed, version, t, train_timesteps) for seed, version, t in rows]
        uniformly = torch.tensor(positions, dtype=torch.float32, device=device)
        return uniformly if levels == "uniform" else _on_schedule(uniformly, batch.sigmas)
    steps = batch.sigmas.shape[1] - 1
    count = steps if among is None else min(among, steps)
    if train_timesteps > count:
        raise ValueError(f"train_timesteps is {train_timesteps}, but there are {count} noise levels")
    draw = _one_of_each_part if levels == "stratified_steps" else trained_steps
    chosen = [draw(seed, version, count, train_timesteps)[t] for seed, version, t in rows]
    return batch.sigmas[torch.arange(len(rows), device=device), torch.tensor(chosen, device=device)]


def _one_of_each_part(seed: int, version: int, levels: int, parts: int) -> list[int]:
    """One index below ``levels`` of each of ``parts`` consecutive parts, the first ones longer by one."""
    draws = uniform(seed, Stream.TRAIN_TIMESTEPS, version, parts)
    pieces = np.array_split(np.arange(levels), parts)
    return [int(piece[int(draw * len(piece))]) for piece, draw in zip(pieces, draws, strict=True)]


def mean_square(x: Tensor) -> Tensor:
    """<x²> over all dimensions but the batch: [batch]."""
    return x.square().flatten(1).mean(1)


def norm_ratio(velocity: Tensor, reference: Tensor) -> Tensor:
    """|v| / |v_ref|, [batch], without gradient: above 1, quality falls (NormGuard, arXiv 2606.27771)."""
    return (mean_square(velocity.detach()) / mean_square(reference).clamp(min=1e-12)).sqrt()


def weighted_error(x0_predicted: Tensor, x0: Tensor) -> Tensor:
    """<(x̂0 - x0)²> / max(stopgrad <|x̂0 - x0|>, 1e-5): [batch]."""
    error = x0_predicted - x0
    # Dividing by the mean absolute error makes noise levels count equally.
    weight = error.detach().abs().flatten(1).mean(1).clamp(min=1e-5)
    return mean_square(error) / weight


def stratified(seed: int, version: int, timestep: int, train_timesteps: int) -> float:
    """A uniform draw within the ``timestep``-th of ``train_timesteps`` equal parts of (0, 1)."""
    draws = uniform(seed, Stream.TRAIN_TIMESTEPS, version, train_timesteps)
    return float(np.float64(timestep + draws[timestep]) / train_timesteps)


def _on_schedule(position: Tensor, sigmas: Tensor) -> Tensor:
    """Noise levels [batch] at quantiles ``position`` of schedules [batch, T + 1], interpolated linearly."""
    steps = sigmas.shape[1] - 1
    place = (1 - position) * steps  # schedules descend from noise to clean
    left = place.floor().clamp(0, steps - 1)
    index = left.long()
    rows = torch.arange(len(index), device=sigmas.device)
    return torch.lerp(sigmas[rows, index], sigmas[rows, index + 1], place - left)
