"""Frozen linear layers in few bits, for adapters beside them; nothing here imports torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping

BLOCK, COARSE_BLOCK = 64, 256
"""Of NF4: weights that share a scale, and scales that share one of their own."""


def _int8(outputs: int, inputs: int) -> int:
    return outputs * (inputs + 4)


def _nf4(outputs: int, inputs: int) -> int:
    blocks = -(-outputs * inputs // BLOCK)
    scales = -(-blocks // COARSE_BLOCK) * COARSE_BLOCK
    return blocks * BLOCK // 2 + scales + scales // COARSE_BLOCK * 4 + 4


BYTES: Mapping[str, Callable[[int, int], int]] = {"int8": _int8, "nf4": _nf4}
"""By kind, how many a layer's weight of so many outputs and inputs takes."""
