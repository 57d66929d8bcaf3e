"""Cutting tensors into buckets, and the checksum that both ends compute."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from spotlight_weights.flat import as_bytes, checksum, cut


@given(st.lists(st.integers(0, 300), max_size=12), st.integers(1, 8))
def test_buckets_hold_every_byte_once_and_in_order(sizes: list[int], sixteens: int) -> None:
    filled = [0] * len(sizes)
    order = []
    for bucket in cut(sizes, 16 * sixteens):
        assert bucket
        end = 0
        for piece in bucket:
            assert piece.at >= end
            assert piece.at % 16 == piece.start % 16 == 0
            assert piece.start == filled[piece.index] < piece.stop
            end = piece.at + piece.stop - piece.start
            filled[piece.index] = piece.stop
            order.append(piece.index)
        assert end <= 16 * sixteens
    assert filled == sizes
    assert order == sorted(order)


def test_a_bucket_of_an_odd_size_is_refused() -> None:
    for size in (0, 8, 100):
        with pytest.raises(ValueError, match=f"bucket_bytes is {size}"):
            list(cut([1], size))


def noise(size: int) -> torch.Tensor:
    return torch.randint(0, 256, (size,), dtype=torch.uint8, generator=torch.Generator().manual_seed(size))


@pytest.mark.parametrize("size", [0, 1, 7, 8, 9, 4096 * 8 - 1, 4096 * 8, 4096 * 8 + 9, 100_003])
def test_a_checksum_sees_any_changed_byte(size: int) -> None:
    data = noise(size)
    before = checksum(data).tolist()
    assert checksum(data.clone()).tolist() == before
    for position in {p % size for p in (0, 3, 8, 4095, 4096 * 8, size - 1, size // 2)} if size else ():
        for mask in (1, 128, 255):
            data[position] ^= mask
            assert checksum(data).tolist() != before
            data[position] ^= mask
    assert checksum(data).tolist() == before


@given(st.integers(0, 12_000), st.integers(0, 12_000))
def test_a_checksum_sees_words_that_changed_places(one: int, two: int) -> None:
    words = torch.arange(1, 12_002)
    before = checksum(as_bytes(words)).tolist()
    words[[one, two]] = words[[two, one]]
    assert (checksum(as_bytes(words)).tolist() == before) == (one == two)


def test_a_checksum_does_not_depend_on_where_the_bytes_lie() -> None:
    data = noise(70_000)
    room = torch.empty(70_100, dtype=torch.uint8)
    for offset in (0, 1, 3, 8, 16):
        room[offset : offset + 70_000] = data
        assert checksum(room[offset : offset + 70_000]).tolist() == checksum(data).tolist()


def test_bytes_are_a_view() -> None:
    tensor = torch.zeros(2, 3, dtype=torch.bfloat16)
    as_bytes(tensor)[:2] = 64
    assert tensor[0, 0] != 0
    assert as_bytes(torch.ones(())).numel() == 4
    with pytest.raises(ValueError, match="not contiguous"):
        as_bytes(torch.zeros(2, 3).T)
