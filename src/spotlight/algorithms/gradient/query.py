"""Shared by algorithms that train at the state where a rollout stopped, with the reward's gradient there."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from spotlight.algorithms.base import TrainBatch


class Query(NamedTuple):
    """Of every row.

    Attributes:
        z: the state at the query, [batch, tokens, channels].
        sigma: its noise level, [batch].
        clean: the clean prediction there of the weights that made the rollout.
        velocity: of those weights.
        gradient: of the reward by ``clean``.
    """

    z: Tensor
    sigma: Tensor
    clean: Tensor
    velocity: Tensor
    gradient: Tensor


def query_of(batch: TrainBatch, algorithm: str) -> Query:
    """The batch's queries. Raises ValueError if it has none."""
    if batch.latents is None or batch.gradient is None:
        raise ValueError(f"{algorithm} trains at queries with reward gradients, but the batch has none")
    z, sigma = batch.latents[:, 0], batch.sigmas[:, 0]
    spread = sigma.view(-1, *[1] * (z.ndim - 1))
    return Query(z, sigma, batch.final, (z - batch.final) / spread, batch.gradient)
