"""Counter-based randomness: every draw is a pure function of (seed, stream, index).

Invariants
    * No state: the same arguments give the same numbers in any process, batch position and order.
    * Bit-exact on every machine. Raw bits come from Philox4x64-10, whose output numpy guarantees; normals
      by inverse CDF from correctly rounded float64 operations only (+ - * / sqrt), because ``log`` and
      ``sin`` differ in the last bit between libraries and CPUs. All on the CPU, whatever the device.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from enum import IntEnum

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from spotlight.diffusion._normal_quantile import normal_quantile_from_centre

INITIAL = -1
"""``step`` of a rollout's initial noise; its SDE steps are 0, 1, ..."""

_KEY_HIGH = 0x53504F544C494748  # "SPOTLIGH": separates our draws from other Philox users of the same seed
_BLOCK = 16384  # numbers converted at once: the float64 temporaries stay in the L2 cache


class Stream(IntEnum):
    """Purpose of a draw. A seed's streams are independent; the values are part of the storage format."""

    ROLLOUT_NOISE = 0
    SDE_WINDOW = 1
    TRAIN_TIMESTEPS = 2
    TRAIN_NOISE = 3
    PREVIEW_NOISE = 4


def noise_batch(
    seeds: Sequence[int], steps: Sequence[int], shape: Sequence[int], device: torch.device | str = "cpu"
) -> Tensor:
    """Standard normal noise of a rollout's step in each row: [batch, *shape] float32 on ``device``.

    Args:
        seeds: the rollouts', 0 <= seed < 2**64.
        steps: :data:`INITIAL` or the index of the denoising step.
        shape: of one sample, without the batch dimension.
    """
    counters = [counter_of_step(step) for step in steps]
    return normal_batch(seeds, Stream.ROLLOUT_NOISE, counters, shape, device)


def normal_batch(
    seeds: Sequence[int],
    stream: Stream,
    indices: Sequence[int],
    shape: Sequence[int],
    device: torch.device | str = "cpu",
) -> Tensor:
    """As :func:`noise_batch`, of any stream: row i is of ``seeds[i]`` and ``indices[i]``."""
    size = math.prod(shape)
    out = np.empty((len(seeds), size), dtype=np.float32)
    draws = list(zip(seeds, indices, strict=True))
    together = max(1, _BLOCK // max(1, size))  # short rows are converted together: fewer numpy calls
    for start in range(0, len(draws), together):
        raw = [_raw(seed, stream, index, size) for seed, index in draws[start : start + together]]
        _fill_normal(out[start : start + together].reshape(-1), np.concatenate(raw))
    return torch.from_numpy(out).view(len(seeds), *shape).to(device)


def uniform(seed: int, stream: Stream, index: int, count: int) -> NDArray[np.float64]:
    """``count`` uniform draws, float64 strictly inside (0, 1)."""
    return _centred_uniform(_raw(seed, stream, index, count)) + 0.5


def counter_of_step(step: int) -> int:
    """Stream index of a step's noise. Raises ValueError below INITIAL."""
    if step < INITIAL:
        raise ValueError(f"noise step is {step}; expected INITIAL ({INITIAL}) or a step index >= 0")
    return step - INITIAL


def _raw(seed: int, stream: Stream, index: int, count: int) -> NDArray[np.uint64]:
    if not 0 <= seed < 2**64:
        raise ValueError(f"seed is {seed}; expected 0 <= seed < 2**64")
    if not 0 <= index < 2**64:
        raise ValueError(f"index of stream {stream.name} is {index}; expected 0 <= index < 2**64")
    # The two low counter words (2**128 blocks of four numbers) are Philox's own running position.
    generator = np.random.Philox(key=seed | (_KEY_HIGH << 64), counter=(index << 128) | (int(stream) << 192))
    return generator.random_raw(count)


def _centred_uniform(raw: NDArray[np.uint64]) -> NDArray[np.float64]:
    """u - 1/2 for u = (top 52 bits + 1/2) / 2**52, exactly: never -1/2, 0 or 1/2."""
    one_to_two = ((raw >> np.uint64(12)) | np.uint64(0x3FF0000000000000)).view(np.float64)
    return (one_to_two - 1.5) + 2.0**-53


def _fill_normal(out: NDArray[np.float32], raw: NDArray[np.uint64]) -> None:
    for start in range(0, out.size, _BLOCK):
        block = slice(start, start + _BLOCK)
        out[block] = normal_quantile_from_centre(_centred_uniform(raw[block]))
