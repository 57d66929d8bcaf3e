"""Weights of packed NF4 in one kernel, as an operator of torch."""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor

from spotlight_kernels import triton_nf4
from spotlight_kernels.launch import INTERPRETED, Kernel
from spotlight_kernels.quantised import BLOCK

_AT_ONCE = 1024
_OPERATORS = torch.library.Library("spotlight_kernels", "FRAGMENT")  # type: ignore[no-untyped-call]
_kernel = Kernel(triton_nf4.dequantise)


def dequantise(
    packed: Tensor, scales: Tensor, levels: Tensor, shape: tuple[int, int], dtype: torch.dtype
) -> Tensor:
    """As :func:`spotlight_kernels.quantised.nf4.dequantise_reference`, the same bits."""
    return cast(Tensor, torch.ops.spotlight_kernels.dequantise_nf4(packed, scales, levels, *shape, dtype))


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


_OPERATORS.define(  # type: ignore[no-untyped-call]
    "dequantise_nf4(Tensor packed, Tensor scales, Tensor levels, int outputs, int inputs, ScalarType dtype) "
    "-> Tensor"
)
for _function, _key in (
    (_empty, "Meta"),
    (_dequantise, "CUDA"),
    *(((_dequantise, "CPU"),) if INTERPRETED else ()),
):
    _OPERATORS.impl("dequantise_nf4", _function, _key)  # type: ignore[no-untyped-call]
