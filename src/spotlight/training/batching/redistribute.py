"""Which rank trains which sample: equally many of every micro-batch.

A rank holds the samples it denoised. After some are dropped, a micro-batch may be uneven, or absent on a rank
that must join its forwards. So surplus samples move to ranks that need them; nothing moves while nothing is
dropped.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from spotlight.rollout.state import SampleTensors
from spotlight.scheduler.types import MicroBatch, RolloutId
from spotlight.training.sharding import Ranks


@dataclass(frozen=True, slots=True)
class Move:
    """A sample to be trained on another rank than the one that made it."""

    rollout: RolloutId
    source: int
    target: int


def even_moves(
    micro_batches: Sequence[MicroBatch], holder: Mapping[RolloutId, int], world: int
) -> list[Move]:
    """The fewest moves that give every rank equally many samples of each micro-batch.

    Args:
        micro_batches: with sizes divisible by ``world`` (ensured by the controller).
        holder: rank with each sample's tensors.
    """
    moves: list[Move] = []
    for micro_batch in micro_batches:
        share = len(micro_batch.rollouts) // world
        held: list[list[RolloutId]] = [[] for _ in range(world)]
        for rollout in micro_batch.rollouts:
            held[holder[rollout]].append(rollout)
        surplus = [(rollout, rank) for rank, mine in enumerate(held) for rollout in mine[share:]]
        wanting = [rank for rank, mine in enumerate(held) for _ in range(share - len(mine))]
        moves += [
            Move(rollout, source, target) for (rollout, source), target in zip(surplus, wanting, strict=True)
        ]
    return moves


def deal(
    micro_batches: Sequence[MicroBatch], held: Mapping[RolloutId, SampleTensors], ranks: Ranks
) -> dict[RolloutId, SampleTensors]:
    """This rank's share of every micro-batch; every rank must call this.

    Args:
        held: samples whose tensors this rank has.
    """
    if ranks.world == 1:
        return dict(held)
    layout = [list(tensor.shape) for tensor in _flat(next(iter(held.values())))] if held else None
    shapes = next(each for each in ranks.share(layout) if each is not None)
    holder = {rollout: rank for rank, each in enumerate(ranks.share(list(held))) for rollout in each}
    moves = even_moves(micro_batches, holder, ranks.world)
    dealt = dict(held)
    for source in range(ranks.world):
        leaving = [move for move in moves if move.source == source]
        if not leaving:
            continue
        rows = torch.zeros(len(leaving), sum(math.prod(shape) for shape in shapes))
        if source == ranks.rank:
            for row, move in zip(rows, leaving, strict=True):
                torch.cat([tensor.reshape(-1) for tensor in _flat(dealt.pop(move.rollout))], out=row)
        for row, move in zip(ranks.broadcast(rows, source), leaving, strict=True):
            if move.target == ranks.rank:
                dealt[move.rollout] = _sample(row, shapes)
    return dealt


def _flat(sample: SampleTensors) -> list[Tensor]:
    tensors = (sample.final, sample.sigmas, sample.latents, sample.log_probs)
    return [tensor for tensor in tensors if tensor is not None]


def _sample(row: Tensor, shapes: Sequence[Sequence[int]]) -> SampleTensors:
    parts = torch.split(row, [math.prod(shape) for shape in shapes])
    final, sigmas, *trajectory = (part.reshape(*shape) for part, shape in zip(parts, shapes, strict=True))
    latents, log_probs = trajectory or (None, None)
    return SampleTensors(final, sigmas, latents, log_probs)
