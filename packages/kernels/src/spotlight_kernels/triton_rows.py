"""Kernels on rows of the residual stream: gate and add a branch, normalise, modulate.

A program works on a few tokens of one picture, so that the picture's modulation is read once for all.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def forward(
    x,
    y,
    gate,
    scale,
    shift,
    residual,
    out,
    length,
    width,
    eps,
    gate_b,
    scale_b,
    shift_b,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    ADD: tl.constexpr,
    GATE: tl.constexpr,
    NORM: tl.constexpr,
    ROUNDED: tl.constexpr,
):
    """See :func:`spotlight_kernels.operators.add_norm`; all but the modulation is contiguous."""
    b = tl.program_id(0).to(tl.int64)
    kind = x.dtype.element_ty
    column = tl.arange(0, BLOCK)
    inside = column < width
    if GATE:
        g = tl.load(gate + b * gate_b + column, mask=inside, other=0.0).to(tl.float32)
    if NORM:
        factor = 1.0 + tl.load(scale + b * scale_b + column, mask=inside, other=0.0).to(tl.float32)
        if ROUNDED:
            factor = factor.to(kind).to(tl.float32)
        term = tl.load(shift + b * shift_b + column, mask=inside, other=0.0).to(tl.float32)
    for i in tl.static_range(ROWS):
        s = tl.program_id(1) * ROWS + i
        there = inside & (s < length)
        at = (b * length + s) * width + column
        value = tl.load(x + at, mask=there, other=0.0).to(tl.float32)
        if ADD:
            branch = tl.load(y + at, mask=there, other=0.0).to(tl.float32)
            if GATE:
                branch = branch * g
            if ROUNDED:
                branch = branch.to(kind).to(tl.float32)
            rounded = (value + branch).to(kind)
            tl.store(residual + at, rounded, mask=there)
            value = rounded.to(tl.float32)
        if NORM:
            mean = tl.sum(value, 0) / width
            centred = tl.where(there, value - mean, 0.0)
            normal = centred * tl.rsqrt(tl.sum(centred * centred, 0) / width + eps)
            if ROUNDED:
                normal = (normal.to(kind).to(tl.float32) * factor).to(kind).to(tl.float32)
            else:
                normal = normal * factor
            tl.store(out + at, (normal + term).to(kind), mask=there)


@triton.jit
def backward(
    residual,
    gate,
    scale,
    from_residual,
    from_out,
    to_x,
    to_y,
    length,
    width,
    eps,
    gate_b,
    scale_b,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    ADD: tl.constexpr,
    GATE: tl.constexpr,
    NORM: tl.constexpr,
    THROUGH: tl.constexpr,
):
    """Gradients of ``x`` and ``y`` of those of the residual (if THROUGH) and the output (if NORM)."""
    b = tl.program_id(0).to(tl.int64)
    kind = to_x.dtype.element_ty
    column = tl.arange(0, BLOCK)
    inside = column < width
    if ADD and GATE:
        g = tl.load(gate + b * gate_b + column, mask=inside, other=0.0).to(tl.float32)
    if NORM:
        factor = 1.0 + tl.load(scale + b * scale_b + column, mask=inside, other=0.0).to(tl.float32)
    for i in tl.static_range(ROWS):
        s = tl.program_id(1) * ROWS + i
        there = inside & (s < length)
        at = (b * length + s) * width + column
        total = tl.zeros([BLOCK], tl.float32)
        if THROUGH:
            total += tl.load(from_residual + at, mask=there, other=0.0).to(tl.float32)
        if NORM:
            value = tl.load(residual + at, mask=there, other=0.0).to(tl.float32)
            centred = tl.where(there, value - tl.sum(value, 0) / width, 0.0)
            r = tl.rsqrt(tl.sum(centred * centred, 0) / width + eps)
            slope = tl.load(from_out + at, mask=there, other=0.0).to(tl.float32) * factor
            along = tl.sum(slope * centred, 0) / width * r * r
            total += r * (slope - tl.sum(slope, 0) / width - centred * along)
        tl.store(to_x + at, total.to(kind), mask=there)
        if ADD and GATE:
            tl.store(to_y + at, (total * g).to(kind), mask=there)
