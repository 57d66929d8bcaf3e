"""Costs of a block that are counted without memory are those of its published shapes."""

from __future__ import annotations

import pytest
from benchmarks.block_costs import PUBLISHED, RANK, VARIANTS, Work, block, host_seconds

WIDTH = int(str(PUBLISHED["num_attention_heads"])) * int(str(PUBLISHED["attention_head_dim"]))
WORK = Work(64, 2, 5)


def test_operations_and_bytes_are_those_of_the_block() -> None:
    none, bfloat16, autocast = (block(each, WORK, masked=False, gradient=False) for each in VARIANTS)
    rows, length = WORK.tokens, WORK.image_tokens + WORK.text
    streams = 2 * rows * 12 * WIDTH**2  # queries, keys, values, output, and an MLP four times as wide
    modulation = 2 * WORK.batch * 2 * 6 * WIDTH**2
    attention = 4 * WORK.batch * length**2 * WIDTH
    assert none.flops == streams + modulation + attention
    adapters = 2 * rows * RANK * (4 * 2 * WIDTH + 2 * 5 * WIDTH)
    assert bfloat16.flops == autocast.flops == none.flops + adapters
    assert none.products == 15
    assert bfloat16.products == none.products + 2 * 12, "twelve layers have adapters"
    assert none.operators < bfloat16.operators < autocast.operators
    weights = 2 * (2 * 12 + 2 * 6) * WIDTH**2
    assert none.bytes - none.elementwise_bytes > weights
    assert none.elementwise_bytes < bfloat16.elementwise_bytes < autocast.elementwise_bytes


@pytest.mark.slow
@pytest.mark.parametrize("variant", VARIANTS[1:])
def test_a_backward_costs_two_forwards_and_a_mask_a_little(variant: str) -> None:
    forward = block(variant, WORK, masked=False, gradient=False)
    both = block(variant, WORK, masked=False, gradient=True)
    assert 1.9 < both.flops / forward.flops < 2.1, "frozen weights have no gradients"
    masked = block(variant, WORK, masked=True, gradient=False)
    assert masked.flops == forward.flops
    if variant == "bfloat16 copies":  # adapters' gradients become float32 together
        assert both.operators == 328
    assert 0 < masked.operators - forward.operators < 10


def test_the_host_is_timed_for_every_variant() -> None:
    seconds = host_seconds(rounds=2, layers=1)
    assert {name: len(taken) for name, taken in seconds.items()} == dict.fromkeys(VARIANTS, 2)
    assert min(map(min, seconds.values())) > 0
