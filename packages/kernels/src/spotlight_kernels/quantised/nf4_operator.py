"""Weights of packed NF4 in one kernel, as an operator of torch."""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor

from spotlight_kernels import triton_nf4
from spotlight_kernels.launch import Kernel
from spotlight_kernels.quantised import BLOCK
from spotlight_kernels.registered import register

_AT_ONCE = 1024
_kernel = Kernel(triton_nf4.dequantise)


def dequantise(
    packed: Tensor, scales: Tensor, levels: Tensor, shape: tuple[int, int], dtype: torch.dtype
) -> Tensor:
    """As :func:`spotlight_kernels.quantised.nf4.dequantise_reference`, the same bits."""
    return cast(Tensor, _operator(packed, scales, levels, *shape, dtype))


def _empty(
    packed: Tensor, scales: Tensor, levels: Tensor, outputs: int, inputs: int, dtype: torch.dtype
) -> Tensor:
    return packed.new_empty((outputs, inputs), dtype=dtype)


def _dequantise(
    packed: Tensor, scales: Tensor, levels: Tensor, outputs: int, inputs: int, dtype: torch.dtype
) -> Tensor:
    out = _empty(packed, scales, levels, outputs, inputs, dtype)
    count = out.numel()
    _kernel.launch((-(-count // _AT_ONCE),), (packed, scales, levels, out), (count,), (_AT_ONCE, BLOCK))
    return out


_operator = register(
    "dequantise_nf4(Tensor packed, Tensor scales, Tensor levels, int outputs, int inputs, ScalarType dtype) "
    "-> Tensor",
    _dequantise,
    _empty,
)
