"""What goes through a model at once."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import TypeVar

Item = TypeVar("Item")


def in_batches(items: Sequence[Item], size: int) -> Iterator[Sequence[Item]]:
    """The items in order, at most ``size`` at a time."""
    for start in range(0, len(items), size):
        yield items[start : start + size]


def same_shape(shapes: Sequence[tuple[int, ...]], size: int) -> Iterator[Sequence[int]]:
    """Indices of equal shapes, at most ``size`` at a time."""
    order = sorted(range(len(shapes)), key=lambda index: shapes[index])
    for _, same in groupby(order, key=lambda index: shapes[index]):
        yield from in_batches(list(same), size)
