"""A kernel that makes weights of packed NF4."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def dequantise(packed, scales, levels, out, count, BLOCK: tl.constexpr, SCALED: tl.constexpr):
    """See :func:`spotlight_kernels.quantised.nf4.dequantise_reference`; ``SCALED`` weights share a scale."""
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = i < count
    pair = tl.load(packed + i // 2, mask=inside, other=0).to(tl.int32)
    level = tl.load(levels + tl.where(i % 2 == 0, pair >> 4, pair & 15))
    value = level * tl.load(scales + i // SCALED, mask=inside, other=0.0)
    tl.store(out + i, value.to(out.dtype.element_ty), mask=inside)
