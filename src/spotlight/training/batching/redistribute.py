"""Which rank denoises and trains which sample.

A rank gets neighbours (:func:`neighbours`), which are of one prompt or of few: samples of one prompt need no
padding and no mask. It trains the samples that it denoised, equally many of every micro-batch: an update's
micro-batches are put together again for that (:func:`regrouped`). Only what is left over moves to another
rank: after drops, or where leases and updates do not divide.
"""

from __future__ import annotations

import dataclasses
import math
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import TypeVar

import torch
from torch import Tensor

from spotlight.rollout.state import SampleTensors
from spotlight.scheduler.effects import PrepareBatch
from spotlight.scheduler.types import MicroBatch, RolloutId
from spotlight.training.sharding import Ranks

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Move:
    """A sample to be trained on another rank than the one that made it."""

    rollout: RolloutId
    source: int
    target: int


def neighbours(items: Sequence[T], rank: int, world: int, block: int | None = None) -> Sequence[T]:
    """A rank's share, as even as possible: of each ``block`` items, those that stand together.

    No rank gets more than ``ceil(len(items) / world)``, so that all run equally many forwards.

    Args:
        block: items that must be spread over all ranks, e.g. those of an update, rounded to a multiple of
            ``world``; default: all.
    """
    size = max(1, len(items)) if block is None else max(world, block - block % world)
    mine: list[T] = []
    for start in range(0, len(items), size):
        part = items[start : start + size]
        mine += part[len(part) * rank // world : len(part) * (rank + 1) // world]
    return mine


def even_shares(
    items: Sequence[T], rank: int, world: int, block: int | None = None
) -> tuple[Sequence[T], Sequence[T]]:
    """A rank's share (:func:`neighbours`), and as many of others' items as a longer share has more.

    With these too, all ranks have equally many: of a sharded model every rank takes part in each forward, and
    some models make one for each row.
    """
    shares = [neighbours(items, each, world, block) for each in range(world)]
    missing = max(map(len, shares)) - len(shares[rank])
    others = (item for at, share in enumerate(shares) if at != rank for item in share)
    return shares[rank], list(islice(others, missing))


def regrouped(
    micro_batches: Sequence[MicroBatch], holder: Mapping[RolloutId, int], world: int
) -> list[MicroBatch]:
    """The same samples in as many micro-batches of the same sizes, so that ranks have equal parts of each.

    Within an update, whose gradient is a sum, it does not matter which micro-batch a sample is in.

    Args:
        micro_batches: with sizes divisible by ``world``.
        holder: rank with each sample's tensors.
    """
    found: list[MicroBatch] = []
    for update in dict.fromkeys(micro_batch.update for micro_batch in micro_batches):
        mine = [micro_batch for micro_batch in micro_batches if micro_batch.update == update]
        order = {name: i for i, name in enumerate(name for each in mine for name in each.rollouts)}
        held = [deque(name for name in order if holder[name] == rank) for rank in range(world)]
        for micro_batch in mine:
            share = len(micro_batch.rollouts) // world
            taken = [queue.popleft() for queue in held for _ in range(min(share, len(queue)))]
            while len(taken) < len(micro_batch.rollouts):  # a rank has too few: of those who have most left
                taken.append(max(held, key=len).popleft())
            rollouts = tuple(sorted(taken, key=order.__getitem__))
            found.append(dataclasses.replace(micro_batch, rollouts=rollouts))
    return found


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


def share_of(effect: PrepareBatch, rank: int, world: int, planned: int = 0) -> tuple[RolloutId, ...]:
    """Samples whose tensors a rank receives: equally many of every micro-batch, so none must move later, and
    neighbours, so that they share prompts.

    Args:
        planned: see :func:`passes_of`.
    """
    return tuple(
        rollout
        for micro_batch in effect.micro_batches
        for each in passes_of(micro_batch, world, planned)
        for rollout in neighbours(each.rollouts, rank, world)
    )


def passes_of(micro_batch: MicroBatch, world: int, planned: int = 0) -> tuple[MicroBatch, ...]:
    """A micro-batch for ``planned`` ranks, as fewer ranks train it: in turn, as many samples at a time.

    Args:
        planned: a multiple of ``world`` that divides its samples; 0: ``world``.
    """
    times = (planned or world) // world
    size = len(micro_batch.rollouts) // times
    return tuple(
        dataclasses.replace(micro_batch, rollouts=micro_batch.rollouts[start : start + size])
        for start in range(0, size * times, size)
    )


def deal(
    micro_batches: Sequence[MicroBatch],
    held: Mapping[RolloutId, SampleTensors],
    ranks: Ranks,
    *,
    whole_groups: bool = False,
) -> tuple[list[MicroBatch], dict[RolloutId, SampleTensors]]:
    """The micro-batches to train, and this rank's share of each; every rank must call this.

    Args:
        held: samples whose tensors this rank has.
        whole_groups: micro-batches hold groups, and must stay as they are.
    """
    if ranks.world == 1:
        return list(micro_batches), dict(held)
    first = next(iter(held.values()), None)
    layout = None if first is None else {name: list(each.shape) for name, each in first.by_name().items()}
    shapes = next(each for each in ranks.share(layout) if each is not None)
    holder = {rollout: rank for rank, each in enumerate(ranks.share(list(held))) for rollout in each}
    trained = list(micro_batches) if whole_groups else regrouped(micro_batches, holder, ranks.world)
    moves = even_moves(trained, holder, ranks.world)
    dealt = dict(held)
    for source in range(ranks.world):
        leaving = [move for move in moves if move.source == source]
        if not leaving:
            continue
        rows = torch.zeros(len(leaving), sum(math.prod(shape) for shape in shapes.values()))
        if source == ranks.rank:
            for row, move in zip(rows, leaving, strict=True):
                parts = dealt.pop(move.rollout).by_name().values()
                torch.cat([each.reshape(-1) for each in parts], out=row)
        for row, move in zip(ranks.broadcast(rows, source), leaving, strict=True):
            if move.target == ranks.rank:
                dealt[move.rollout] = _sample(row, shapes)
    return trained, dealt


def _sample(row: Tensor, shapes: Mapping[str, Sequence[int]]) -> SampleTensors:
    parts = torch.split(row, [math.prod(shape) for shape in shapes.values()])
    return SampleTensors(
        **{name: part.reshape(*shape) for (name, shape), part in zip(shapes.items(), parts, strict=True)}
    )
