"""Kernels on rows of the residual stream: normalise, gate and add a branch, normalise the sum, modulate.

A program works on a few tokens of one picture, so that the picture's modulation is read once for all; where
tokens choose between two rows of modulation, a program rereads them, mostly from a cache.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _rounded(value, kind, ROUNDED: tl.constexpr):
    return value.to(kind).to(tl.float32) if ROUNDED else value


@triton.jit
def _row(part, row, stride, column, inside):
    return tl.load(part + row * stride + column, mask=inside, other=0.0).to(tl.float32)


@triton.jit
def _factor(scale, row, stride, column, inside, kind, ROUNDED: tl.constexpr):
    return _rounded(1.0 + _row(scale, row, stride, column, inside), kind, ROUNDED)


@triton.jit
def _through_rms(slope, value, width, eps):
    """The gradient of a value of that of its RMSNorm without weights."""
    r = tl.rsqrt(tl.sum(value * value, 0) / width + eps)
    return r * (slope - value * (tl.sum(slope * value, 0) / width * r * r))


@triton.jit
def forward(
    x,
    y,
    gate,
    scale,
    shift,
    weight,
    branch_weight,
    chosen,
    residual,
    out,
    length,
    width,
    eps,
    offset,
    gate_b,
    scale_b,
    shift_b,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    ADD: tl.constexpr,
    GATE: tl.constexpr,
    SCALE: tl.constexpr,
    SHIFT: tl.constexpr,
    WEIGHT: tl.constexpr,
    BRANCH: tl.constexpr,
    CHOOSE: tl.constexpr,
    NORM: tl.constexpr,
    ROUNDED: tl.constexpr,
):
    """See :func:`spotlight_kernels.operators.add_norm`; all but the modulation is contiguous."""
    b = tl.program_id(1).to(tl.int64)
    kind = x.dtype.element_ty
    column = tl.arange(0, BLOCK)
    inside = column < width
    if GATE and not CHOOSE:
        g = _row(gate, b, gate_b, column, inside)
    if SCALE and not CHOOSE:
        factor = _factor(scale, b, scale_b, column, inside, kind, ROUNDED)
    if SHIFT:
        term = _row(shift, b, shift_b, column, inside)
    if BRANCH:
        branch_w = _row(branch_weight, 0, 0, column, inside) + offset
    if WEIGHT:
        w = _row(weight, 0, 0, column, inside) + offset
    for i in tl.static_range(ROWS):
        s = tl.program_id(0) * ROWS + i
        there = inside & (s < length)
        at = (b * length + s) * width + column
        value = tl.load(x + at, mask=there, other=0.0).to(tl.float32)
        if CHOOSE:
            row = tl.where(tl.load(chosen + s, mask=s < length, other=1) != 0, b, tl.num_programs(1))
            if GATE:
                g = _row(gate, row, gate_b, column, there)
            if SCALE:
                factor = _factor(scale, row, scale_b, column, there, kind, ROUNDED)
        if ADD:
            branch = tl.load(y + at, mask=there, other=0.0).to(tl.float32)
            if BRANCH:
                normal = branch * tl.rsqrt(tl.sum(branch * branch, 0) / width + eps)
                normal = _rounded(normal, branch_weight.dtype.element_ty, ROUNDED)
                branch = _rounded(normal * branch_w, kind, ROUNDED)
            if GATE:
                branch = branch * g
            rounded = (value + _rounded(branch, kind, ROUNDED)).to(kind)
            tl.store(residual + at, rounded, mask=there)
            value = rounded.to(tl.float32)
        if NORM:
            if WEIGHT:
                normal = value * tl.rsqrt(tl.sum(value * value, 0) / width + eps)
                normal = _rounded(normal, weight.dtype.element_ty, ROUNDED) * w
            else:
                centred = tl.where(there, value - tl.sum(value, 0) / width, 0.0)
                normal = centred * tl.rsqrt(tl.sum(centred * centred, 0) / width + eps)
            if SCALE:
                normal = _rounded(normal, kind, ROUNDED) * factor
            if SHIFT:
                normal = _rounded(normal, kind, ROUNDED) + term
            tl.store(out + at, normal.to(kind), mask=there)


@triton.jit
def backward(
    residual,
    y,
    gate,
    scale,
    weight,
    branch_weight,
    chosen,
    from_residual,
    from_out,
    to_x,
    to_y,
    length,
    width,
    eps,
    offset,
    gate_b,
    scale_b,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    GATE: tl.constexpr,
    SCALE: tl.constexpr,
    WEIGHT: tl.constexpr,
    BRANCH: tl.constexpr,
    CHOOSE: tl.constexpr,
    THROUGH: tl.constexpr,
    NORM: tl.constexpr,
):
    """Gradients of ``x``, and of ``y`` if it has its own (GATE or BRANCH), of those of the residual (if
    THROUGH) and of the output (if NORM).
    """
    b = tl.program_id(1).to(tl.int64)
    kind = to_x.dtype.element_ty
    column = tl.arange(0, BLOCK)
    inside = column < width
    if GATE and not CHOOSE:
        g = _row(gate, b, gate_b, column, inside)
    if SCALE and not CHOOSE:
        factor = _factor(scale, b, scale_b, column, inside, kind, False)
    for i in tl.static_range(ROWS):
        s = tl.program_id(0) * ROWS + i
        there = inside & (s < length)
        at = (b * length + s) * width + column
        if CHOOSE:
            row = tl.where(tl.load(chosen + s, mask=s < length, other=1) != 0, b, tl.num_programs(1))
            if GATE:
                g = _row(gate, row, gate_b, column, there)
            if SCALE:
                factor = _factor(scale, row, scale_b, column, there, kind, False)
        total = tl.zeros([BLOCK], tl.float32)
        if THROUGH:
            total += tl.load(from_residual + at, mask=there, other=0.0).to(tl.float32)
        if NORM:
            value = tl.load(residual + at, mask=there, other=0.0).to(tl.float32)
            slope = tl.load(from_out + at, mask=there, other=0.0).to(tl.float32)
            if SCALE:
                slope = slope * factor
            if WEIGHT:
                w = _row(weight, 0, 0, column, inside) + offset
                total += _through_rms(slope * w, value, width, eps)
            else:
                centred = tl.where(there, value - tl.sum(value, 0) / width, 0.0)
                r = tl.rsqrt(tl.sum(centred * centred, 0) / width + eps)
                along = tl.sum(slope * centred, 0) / width * r * r
                total += r * (slope - tl.sum(slope, 0) / width - centred * along)
        tl.store(to_x + at, total.to(kind), mask=there)
        if GATE:
            total = total * g
        if BRANCH:
            value = tl.load(y + at, mask=there, other=0.0).to(tl.float32)
            branch_w = _row(branch_weight, 0, 0, column, inside) + offset
            total = _through_rms(total * branch_w, value, width, eps)
        if GATE or BRANCH:
            tl.store(to_y + at, total.to(kind), mask=there)
