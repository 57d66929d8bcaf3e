"""Whatever was dropped, each rank gets equally many samples of every micro-batch, by the fewest moves."""

from __future__ import annotations

import dataclasses

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from spotlight.rollout.state import SampleTensors
from spotlight.scheduler.types import MicroBatch, RolloutId
from spotlight.training.batching.redistribute import deal, even_moves, even_shares, neighbours, regrouped
from spotlight.training.sharding import Ranks


@st.composite
def held(draw: st.DrawFn) -> tuple[list[MicroBatch], dict[RolloutId, int], int]:
    world = draw(st.integers(1, 5))
    shares = draw(st.lists(st.integers(1, 4), min_size=1, max_size=4))
    names = (RolloutId(f"r{number}") for number in range(10**6))
    batches = [
        MicroBatch(0, update, tuple(next(names) for _ in range(share * world)), share * world)
        for update, share in enumerate(shares)
    ]
    holder = {rollout: draw(st.integers(0, world - 1)) for batch in batches for rollout in batch.rollouts}
    return batches, holder, world


@settings(deadline=None, max_examples=200)
@given(held())
def test_every_rank_gets_its_share_by_the_fewest_moves(
    case: tuple[list[MicroBatch], dict[RolloutId, int], int],
) -> None:
    batches, holder, world = case
    moves = even_moves(batches, holder, world)
    after = dict(holder)
    for move in moves:
        assert after[move.rollout] == move.source != move.target
        after[move.rollout] = move.target
    assert len({move.rollout for move in moves}) == len(moves)
    surplus = 0
    for batch in batches:
        share = len(batch.rollouts) // world
        for rank in range(world):
            assert sum(after[rollout] == rank for rollout in batch.rollouts) == share
            surplus += max(0, sum(holder[rollout] == rank for rollout in batch.rollouts) - share)
    assert len(moves) == surplus


def test_one_rank_keeps_what_it_has() -> None:
    tensors = SampleTensors(torch.zeros(2, 3), torch.zeros(4))
    held = {RolloutId("a"): tensors}
    only = MicroBatch(0, 0, (RolloutId("a"),), 1)
    assert deal([only], held, Ranks()) == ([only], held)


@given(st.integers(0, 200), st.integers(1, 9), st.integers(1, 64))
def test_neighbours_are_an_even_partition(items: int, world: int, block: int) -> None:
    shares = [list(neighbours(range(items), rank, world)) for rank in range(world)]
    assert [item for share in shares for item in share] == list(range(items)), "runs, one after the other"
    assert max(map(len, shares)) - min(map(len, shares)) <= 1
    blocks = [list(neighbours(range(items), rank, world, block)) for rank in range(world)]
    assert sorted(item for share in blocks for item in share) == list(range(items))
    assert max(map(len, blocks)) <= -(-items // world), "what is left over of blocks does not add up"
    padded = [even_shares(range(items), rank, world, block) for rank in range(world)]
    assert [list(own) for own, _ in padded] == blocks
    assert len({len(own) + len(copies) for own, copies in padded}) == 1, "all ranks have equally many"
    assert all(set(copies).isdisjoint(own) for own, copies in padded)
    if block % world == 0:
        for start in range(0, items, block):
            of = [sum(start <= item < start + block for item in share) for share in blocks]
            assert max(of) - min(of) <= 1, "of every block, too"


@settings(deadline=None, max_examples=200)
@given(held())
def test_micro_batches_put_together_again_move_no_more_than_the_update_needs(
    case: tuple[list[MicroBatch], dict[RolloutId, int], int],
) -> None:
    batches, holder, world = case
    batches = [dataclasses.replace(batch, update=batch.update // 2) for batch in batches]  # several of each
    redone = regrouped(batches, holder, world)
    assert [(b.update, len(b.rollouts), b.update_samples) for b in redone] == [
        (b.update, len(b.rollouts), b.update_samples) for b in batches
    ]
    surplus = 0
    for update in {batch.update for batch in batches}:
        before = [name for batch in batches if batch.update == update for name in batch.rollouts]
        after = [name for batch in redone if batch.update == update for name in batch.rollouts]
        assert sorted(before) == sorted(after)
        share = len(before) // world
        surplus += sum(max(0, sum(holder[n] == r for n in before) - share) for r in range(world))
    assert len(even_moves(redone, holder, world)) == surplus
    if not even_moves(batches, holder, world):
        assert [set(batch.rollouts) for batch in redone] == [set(batch.rollouts) for batch in batches]


@given(st.integers(1, 8), st.integers(1, 4), st.integers(1, 4), st.integers(1, 3))
def test_leases_of_neighbours_are_trained_where_they_were_made(
    world: int, micro: int, micros_per_lease: int, leases: int
) -> None:
    """A rank's rollouts, made as one batch of neighbours, fill its part of every micro-batch."""
    size = world * micro * micros_per_lease
    names = [RolloutId(f"r{i:04d}") for i in range(size * leases)]
    holder = {
        name: rank
        for start in range(0, len(names), size)
        for rank in range(world)
        for name in neighbours(names[start : start + size], rank, world)
    }
    step = world * micro
    batches = [MicroBatch(0, 0, tuple(names[i : i + step]), len(names)) for i in range(0, len(names), step)]
    assert even_moves(regrouped(batches, holder, world), holder, world) == []
