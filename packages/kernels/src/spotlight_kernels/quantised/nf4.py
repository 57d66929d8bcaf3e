"""Four bits a weight: NormalFloat with double quantisation (QLoRA, arXiv:2305.14314), as bitsandbytes packs
them.

64 weights share a scale, their largest magnitude; each is the nearest of 16 levels times it. Scales, less
their mean, are quantised in turn, 256 by a float32 scale, to 256 levels. On CUDA a Triton kernel makes the
weights, elsewhere torch's operators: the same bits.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from spotlight_kernels.quantised import BLOCK, COARSE_BLOCK
from spotlight_kernels.quantised.linear import Part, QuantisedLinear

_TINY = 1e-38
_LEVELS = (
    -1.0,
    -0.6961928009986877,
    -0.5250730514526367,
    -0.39491748809814453,
    -0.28444138169288635,
    -0.18477343022823334,
    -0.09105003625154495,
    0.0,
    0.07958029955625534,
    0.16093020141124725,
    0.24611230194568634,
    0.33791524171829224,
    0.44070982933044434,
    0.5626170039176941,
    0.7229568362236023,
    1.0,
)
"""Of weights: quantiles of the normal distribution."""


class Nf4Linear(QuantisedLinear):
    """``weight`` holds two levels a byte, the first in the high bits; row by row, the last block padded with
    zeros. A block's scale is the level ``scale`` times its ``coarse`` scale, plus ``offset``.
    """

    scale: nn.Parameter
    coarse: nn.Parameter
    offset: nn.Parameter

    def parts(self) -> Mapping[str, Part]:
        blocks = -(-self.out_features * self.in_features // BLOCK)
        coarse = -(-blocks // COARSE_BLOCK)
        return {
            "weight": ((blocks * BLOCK // 2,), torch.uint8),
            "scale": ((coarse * COARSE_BLOCK,), torch.uint8),
            "coarse": ((coarse,), torch.float32),
            "offset": ((1,), torch.float32),
        }

    @torch.no_grad()
    def hold(self, weight: Tensor) -> None:
        device = self.weight.device
        blocks = _blocks(weight.to(device, torch.float32, copy=True).flatten(), BLOCK)
        largest, levels = _nearest(blocks, _levels(device))
        self.weight.copy_((levels[:, ::2] << 4 | levels[:, 1::2]).flatten())
        # In float64 the sum of scales of bfloat16 weights is exact: the order of summands has no say.
        self.offset.copy_(largest.double().mean())
        coarse, scales = _nearest(_blocks(largest - self.offset, COARSE_BLOCK), _scale_levels(device))
        self.coarse.copy_(coarse)
        self.scale.copy_(scales.flatten())

    @torch.no_grad()
    def whole(self, dtype: torch.dtype) -> Tensor:
        device = self.weight.device
        scales = _scale_levels(device)[self.scale.int()].view(-1, COARSE_BLOCK) * self.coarse[:, None]
        scales = scales.flatten() + self.offset
        shape = self.out_features, self.in_features
        if device.type == "cuda":
            from spotlight_kernels.quantised.nf4_operator import dequantise

            return dequantise(self.weight, scales, _levels(device), shape, dtype)
        return dequantise_reference(self.weight, scales, _levels(device), shape, dtype)


def dequantise_reference(
    packed: Tensor, scales: Tensor, levels: Tensor, shape: tuple[int, int], dtype: torch.dtype
) -> Tensor:
    """A weight of its packed levels and their blocks' scales (and perhaps others after them)."""
    values = levels[torch.stack([packed >> 4, packed & 15], -1).int()].view(-1, BLOCK)
    values *= scales[: len(values), None]
    return values.flatten()[: shape[0] * shape[1]].view(shape).to(dtype)


def _blocks(flat: Tensor, size: int) -> Tensor:
    return F.pad(flat, (0, -len(flat) % size)).view(-1, size)


def _nearest(blocks: Tensor, levels: Tensor) -> tuple[Tensor, Tensor]:
    """Largest magnitudes [blocks]; and indices of the levels [blocks, size] nearest to values relative to
    them, as uint8. In place: ``blocks`` are relative afterwards.
    """
    largest = blocks.abs().amax(1)
    relative = blocks.mul_((1 / largest.clamp_min(_TINY))[:, None])
    return largest, torch.bucketize(relative, (levels[:-1] + levels[1:]) / 2, out_int32=True).to(torch.uint8)


@cache
def _levels(device: torch.device) -> Tensor:
    return torch.tensor(_LEVELS, device=device)


@cache
def _scale_levels(device: torch.device) -> Tensor:
    """Of scales: decades, each cut twice as finely as the next smaller one (arXiv:1511.04561)."""
    levels = [0.0, 1.0]
    for decade in range(7):
        bounds = torch.linspace(0.1, 1, 2**decade + 1)
        means = ((bounds[:-1] + bounds[1:]) / 2 * 10.0 ** (decade - 6)).tolist()
        levels += [*means, *(-mean for mean in means)]
    return torch.tensor(sorted(levels), device=device)
