"""Kernels on the heads of one token: RMSNorm, rotary embedding, and a copy to the joint sequence.

One program works on one token, so that its angles and the norm's weights are read once for all heads.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _rotated(value, cos, sin, HEADS: tl.constexpr, SIZE: tl.constexpr):
    """Each pair (a, b) of the last dimension times cos + i sin."""
    a, b = tl.split(tl.reshape(value, [HEADS, SIZE // 2, 2]))
    return tl.reshape(tl.join(a * cos - b * sin, a * sin + b * cos), [HEADS, SIZE])


@triton.jit
def forward(
    x,
    weight,
    cos,
    sin,
    out,
    length,
    heads,
    eps,
    offset,
    x_b,
    x_s,
    out_b,
    out_s,
    angle_b,
    angle_s,
    angle_p,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    LOOPS: tl.constexpr,
    NORM: tl.constexpr,
    ACROSS: tl.constexpr,
    ROTATE: tl.constexpr,
    ROUNDED: tl.constexpr,
):
    """``out`` of :func:`spotlight_kernels.operators.join_heads` for one stream; see there."""
    token = tl.program_id(0).to(tl.int64)
    b, s = token // length, token % length
    kind = out.dtype.element_ty
    column = tl.arange(0, SIZE)
    source, target = x + b * x_b + s * x_s, out + b * out_b + s * out_s
    if ROTATE:
        pair = b * angle_b + s * angle_s + tl.arange(0, SIZE // 2) * angle_p
        c = tl.load(cos + pair).to(tl.float32)[None, :]
        n = tl.load(sin + pair).to(tl.float32)[None, :]
    if NORM and ACROSS:
        squares = tl.zeros([BLOCK], tl.float32)
        for i in tl.static_range(LOOPS):
            head = i * BLOCK + tl.arange(0, BLOCK)
            at = head[:, None] * SIZE + column[None, :]
            value = tl.load(source + at, mask=(head < heads)[:, None], other=0.0).to(tl.float32)
            squares += tl.sum(value * value, 1)
        whole = tl.rsqrt(tl.sum(squares, 0) / (heads * SIZE) + eps)
    for i in tl.static_range(LOOPS):
        head = i * BLOCK + tl.arange(0, BLOCK)
        there = (head < heads)[:, None]
        at = head[:, None] * SIZE + column[None, :]
        value = tl.load(source + at, mask=there, other=0.0).to(tl.float32)
        if NORM:
            if ACROSS:
                value = value * whole
                scale = tl.load(weight + at, mask=there, other=0.0).to(tl.float32) + offset
            else:
                value = value * tl.rsqrt(tl.sum(value * value, 1) / SIZE + eps)[:, None]
                scale = tl.load(weight + column).to(tl.float32)[None, :] + offset
            if ROUNDED:
                value = value.to(weight.dtype.element_ty).to(tl.float32) * scale
                value = value.to(kind).to(tl.float32)
            else:
                value = value * scale
                if ROTATE:
                    value = value.to(kind).to(tl.float32)
        if ROTATE:
            value = _rotated(value, c, n, BLOCK, SIZE)
        tl.store(target + at, value.to(kind), mask=there)


@triton.jit
def backward(
    x,
    weight,
    cos,
    sin,
    gradient,
    out,
    length,
    heads,
    eps,
    offset,
    x_b,
    x_s,
    gradient_b,
    gradient_s,
    angle_b,
    angle_s,
    angle_p,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    LOOPS: tl.constexpr,
    NORM: tl.constexpr,
    ACROSS: tl.constexpr,
    ROTATE: tl.constexpr,
):
    """The gradient of ``x``, contiguous in ``out``, of one stream's ``gradient``."""
    token = tl.program_id(0).to(tl.int64)
    b, s = token // length, token % length
    kind = out.dtype.element_ty
    column = tl.arange(0, SIZE)
    source, given = x + b * x_b + s * x_s, gradient + b * gradient_b + s * gradient_s
    target = out + token * heads * SIZE
    if ROTATE:
        pair = b * angle_b + s * angle_s + tl.arange(0, SIZE // 2) * angle_p
        c = tl.load(cos + pair).to(tl.float32)[None, :]
        n = -tl.load(sin + pair).to(tl.float32)[None, :]
    if NORM and ACROSS:
        squares = tl.zeros([BLOCK], tl.float32)
        products = tl.zeros([BLOCK], tl.float32)
        for i in tl.static_range(LOOPS):
            head = i * BLOCK + tl.arange(0, BLOCK)
            there = (head < heads)[:, None]
            at = head[:, None] * SIZE + column[None, :]
            value = tl.load(source + at, mask=there, other=0.0).to(tl.float32)
            slope = tl.load(given + at, mask=there, other=0.0).to(tl.float32)
            if ROTATE:
                slope = _rotated(slope, c, n, BLOCK, SIZE)
            slope = slope * (tl.load(weight + at, mask=there, other=0.0).to(tl.float32) + offset)
            squares += tl.sum(value * value, 1)
            products += tl.sum(value * slope, 1)
        whole = tl.rsqrt(tl.sum(squares, 0) / (heads * SIZE) + eps)
        along = tl.sum(products, 0) / (heads * SIZE) * whole * whole
    for i in tl.static_range(LOOPS):
        head = i * BLOCK + tl.arange(0, BLOCK)
        there = (head < heads)[:, None]
        at = head[:, None] * SIZE + column[None, :]
        slope = tl.load(given + at, mask=there, other=0.0).to(tl.float32)
        if ROTATE:
            slope = _rotated(slope, c, n, BLOCK, SIZE)
        if NORM:
            value = tl.load(source + at, mask=there, other=0.0).to(tl.float32)
            if ACROSS:
                slope = slope * (tl.load(weight + at, mask=there, other=0.0).to(tl.float32) + offset)
                slope = whole * (slope - value * along)
            else:
                slope = slope * (tl.load(weight + column).to(tl.float32)[None, :] + offset)
                r = tl.rsqrt(tl.sum(value * value, 1) / SIZE + eps)[:, None]
                mean = (tl.sum(value * slope, 1) / SIZE)[:, None]
                slope = r * (slope - value * mean * r * r)
        tl.store(target + at, slope.to(kind), mask=there)
