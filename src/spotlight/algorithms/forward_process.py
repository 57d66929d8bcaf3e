"""Shared by forward-process algorithms: noising samples at stratified levels.

Draws are counter-based functions of (seed, policy version, training timestep), so they do not depend on
micro-batches or ranks.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from spotlight.algorithms.base import Timesteps, TrainBatch, timestep_of_rows
from spotlight.config.sections.algorithm import NoiseLevels
from spotlight.diffusion.noise import Stream, normal_batch, uniform
from spotlight.diffusion.samplers import interpolate

_TIMESTEPS_MAX = 2**16  # indices of TRAIN_NOISE reserved per policy version


class Noised(NamedTuple):
    """x_t [batch, tokens, channels], its noise levels t [batch], and the noise e in it."""

    x: Tensor
    sigma: Tensor
    noise: Tensor


def noised(batch: TrainBatch, timesteps: Timesteps, train_timesteps: int, levels: NoiseLevels) -> Noised:
    """x_t = (1-t) x0 + t e per row, at the noise level of its timestep.

    Raises:
        ValueError: a timestep is not within [0, train_timesteps).
    """
    at = timestep_of_rows(timesteps, len(batch.seeds))
    for timestep in at:
        if not 0 <= timestep < train_timesteps <= _TIMESTEPS_MAX:
            raise ValueError(
                f"training timestep is {timestep} of {train_timesteps}; "
                f"expected 0 <= timestep < train_timesteps <= {_TIMESTEPS_MAX}"
            )
    device = batch.final.device
    positions = [
        stratified(seed, version, timestep, train_timesteps)
        for seed, version, timestep in zip(batch.seeds, batch.versions, at, strict=True)
    ]
    if levels == "uniform":
        sigma = torch.tensor(positions, dtype=torch.float32, device=device)
    else:
        sigma = _on_schedule(torch.tensor(positions, dtype=torch.float32, device=device), batch.sigmas)
    indices = [
        version * _TIMESTEPS_MAX + timestep for version, timestep in zip(batch.versions, at, strict=True)
    ]
    shape = batch.final.shape[1:]
    noise = normal_batch(batch.seeds, Stream.TRAIN_NOISE, indices, shape, device)
    return Noised(interpolate(batch.final, noise, sigma), sigma, noise)


def mean_square(x: Tensor) -> Tensor:
    """<x²> over all dimensions but the batch: [batch]."""
    return x.square().flatten(1).mean(1)


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
