"""Whatever was dropped, each rank gets equally many samples of every micro-batch, by the fewest moves."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from spotlight.rollout.state import SampleTensors
from spotlight.scheduler.types import MicroBatch, RolloutId
from spotlight.training.batching.redistribute import deal, even_moves
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
    assert deal([MicroBatch(0, 0, (RolloutId("a"),), 1)], held, Ranks()) == held
