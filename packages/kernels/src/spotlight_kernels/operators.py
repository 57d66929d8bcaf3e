"""Fused operators of transformer blocks, with their gradients: what a block does between its products.

Kernels are Triton's: on CUDA, or, with ``TRITON_INTERPRET=1`` in the environment before the first import, on
a CPU, slowly. Compilers, counters, selective recomputation and tensors without memory see operators of torch
(``torch.ops.spotlight_kernels``). With and without gradient the same kernels run: results are equal to the
bit.

Everywhere:
- ``rounded``: round after each step to the tensors' type, and before a norm's weights to the weights', as the
  separate operators in diffusers do; otherwise compute in float32 and round once.
- ``offset`` is added to norms' weights, in float32: 1 for those stored around 0.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from spotlight_kernels import registered
from spotlight_kernels.launch import INTERPRETED


@dataclass(frozen=True, slots=True)
class HeadStream:
    """Queries, keys or values of one stream of tokens, before their norm.

    Attributes:
        x: [batch, tokens, heads * size], its last dimension contiguous.
        weight: of the RMSNorm, [size], or [heads * size] for one norm over all heads; None: no norm.
        angles: cosines and sines, each [tokens, size / 2] or [batch, tokens, size / 2] with equal strides,
            which rotate the pairs (2 i, 2 i + 1); None: no rotation.
    """

    x: Tensor
    weight: Tensor | None = None
    angles: tuple[Tensor, Tensor] | None = None


def join_heads(
    streams: Sequence[HeadStream], size: int, eps: float, *, rounded: bool, offset: float = 0.0
) -> Tensor:
    """Normalise and rotate the heads of every stream, and join the streams.

    Returns:
        [batch, tokens of all streams in their order, heads, size].
    """
    flat: list[Any] = []
    for stream in streams:
        flat += (stream.x, stream.weight, *(stream.angles or (None, None)))
    if not torch.is_grad_enabled():
        return cast(Tensor, registered.join_heads(*_by_kind(flat), size, eps, offset, rounded))
    return cast(Tensor, _JoinHeads.apply(size, eps, offset, rounded, *flat))  # type: ignore[no-untyped-call]


def _by_kind(flat: Sequence[Any]) -> Iterator[list[Any]]:
    """Tensors, weights, cosines, sines of all streams."""
    return (list(flat[i::4]) for i in range(4))


def join_heads_reference(
    streams: Sequence[HeadStream], size: int, eps: float, *, rounded: bool, offset: float = 0.0
) -> Tensor:
    """:func:`join_heads` by torch's operators."""
    return torch.cat([_heads_reference(stream, size, eps, offset, rounded) for stream in streams], 1)


def _heads_reference(stream: HeadStream, size: int, eps: float, offset: float, rounded: bool) -> Tensor:
    x, weight, kind = stream.x, stream.weight, stream.x.dtype
    heads = x.shape[-1] // size
    value = x.float()
    if weight is not None:
        if weight.shape[0] == size:
            value = value.view(*x.shape[:2], heads, size)
        value = value * torch.rsqrt(value.pow(2).mean(-1, keepdim=True) + eps)
        if rounded:
            value = value.to(weight.dtype).float()
        value = (value * (weight.float() + offset)).to(kind).float()
    value = value.reshape(*x.shape[:2], heads, size)
    if stream.angles is not None:
        cos, sin = (each.float().unsqueeze(-2) for each in stream.angles)
        a, b = value.view(*value.shape[:-1], -1, 2).unbind(-1)
        value = torch.stack([a * cos - b * sin, a * sin + b * cos], -1).flatten(-2)
    return value.to(kind)


@dataclass(frozen=True, slots=True)
class Modulation:
    """What a row of the residual stream is gated, normalised and modulated with.

    Attributes:
        gate, scale, shift: [batch, width], the last dimension contiguous; each may be missing.
        weight: [width] of an RMSNorm; None: a LayerNorm without weights.
        branch_weight: [width] of an RMSNorm that the branch passes before it is gated; None: it passes none.
        chosen: [tokens] of bool, contiguous. Gate and scale are [batch + 1, width] then, and the last row is
            for tokens that are False here, of all pictures.
    """

    gate: Tensor | None = None
    scale: Tensor | None = None
    shift: Tensor | None = None
    weight: Tensor | None = None
    branch_weight: Tensor | None = None
    chosen: Tensor | None = None


def add_norm(
    x: Tensor, y: Tensor | None, by: Modulation, eps: float, *, rounded: bool, offset: float = 0.0
) -> tuple[Tensor, Tensor]:
    """``r = x + gate * y`` and ``norm(r) * (1 + scale) + shift``.

    Use the returned ``r`` instead of ``x`` from here on, also without ``y``: gradients join in one kernel.

    Args:
        x, y: [batch, tokens, width]; without ``y``, r is x.
        eps: of all norms.

    Returns:
        r and the modulated norm, both of the shape and type of ``x``.
    """
    parts = (by.gate, by.scale, by.shift, by.weight, by.branch_weight, by.chosen)
    if not torch.is_grad_enabled():
        x, y = x.contiguous(), None if y is None else y.contiguous()
        total, out = registered.add_norm(x, y, *parts, eps, offset, rounded, True)
        return (x if y is None else total), out
    found: tuple[Tensor, Tensor] = _AddNorm.apply(x, y, *parts, eps, offset, rounded, True)  # type: ignore[no-untyped-call]
    return found


def gated_add(
    x: Tensor,
    y: Tensor,
    gate: Tensor | None,
    *,
    rounded: bool,
    branch_weight: Tensor | None = None,
    chosen: Tensor | None = None,
    eps: float = 0.0,
    offset: float = 0.0,
) -> Tensor:
    """``x + gate * y``; as :func:`add_norm`."""
    rest = (gate, None, None, None, branch_weight, chosen, eps, offset, rounded, False)
    if not torch.is_grad_enabled():
        return cast(Tensor, registered.add_norm(x.contiguous(), y.contiguous(), *rest)[0])
    total, _ = _AddNorm.apply(x, y, *rest)  # type: ignore[no-untyped-call]
    return cast(Tensor, total)


def gated(gate: Tensor, value: Tensor, *, silu: bool) -> Tensor:
    """``silu(gate) * value``, or ``sigmoid(gate) * value``; only these two are kept for the backward.

    Args:
        gate, value: of the same shape and type, their last dimension contiguous.
    """
    if not torch.is_grad_enabled():
        return cast(Tensor, registered.gated(gate, value, silu))
    return cast(Tensor, _Gated.apply(gate, value, silu))  # type: ignore[no-untyped-call]


def gated_halves(wide: Tensor) -> Tensor:
    """:func:`gated` of the halves of the last dimension, with SiLU; their gradients are written as one."""
    if not torch.is_grad_enabled():
        return cast(Tensor, registered.gated(*wide.chunk(2, -1), True))
    return cast(Tensor, _GatedHalves.apply(wide))  # type: ignore[no-untyped-call]


def rows_of(x: Tensor) -> Tensor:
    """``x`` [batch, tokens, width], or of other dimensions, as [all tokens, width], copied if it must be.

    Of a part of a joint sequence torch's copy takes twice as long as this one.
    """
    size = math.gcd(x.shape[-1], 128)
    quick = x.ndim == 3 and x.stride(-1) == 1 and x.dtype != torch.float64 and (x.is_cuda or INTERPRETED)
    if quick and not x.is_contiguous() and size > 1:
        x = registered.join_heads([x], [None], [None], [None], size, 0.0, 0.0, False).flatten(2)
    return x.reshape(-1, x.shape[-1])


def add_norm_again(
    total: Tensor,
    scale: Tensor | None,
    shift: Tensor | None,
    weight: Tensor | None,
    chosen: Tensor | None,
    eps: float,
    offset: float,
    rounded: bool,
) -> Tensor:
    """The norm that :func:`add_norm` returned beside ``total``, the same bits once more; without gradient."""
    parts = (None, None, scale, shift, weight, None, chosen, eps, offset, rounded, True)
    return cast(Tensor, registered.add_norm(total, *parts)[1])


def add_norm_reference(
    x: Tensor,
    y: Tensor | None,
    by: Modulation,
    eps: float,
    *,
    rounded: bool,
    offset: float = 0.0,
    norm: bool = True,
) -> tuple[Tensor, Tensor | None]:
    """:func:`add_norm` by torch's operators; without ``norm``, :func:`gated_add`."""
    kind, total = x.dtype, x

    def step(value: Tensor) -> Tensor:
        return value.to(kind).float() if rounded else value

    def row(part: Tensor) -> Tensor:
        each = part.float()[:, None]
        return each if by.chosen is None else torch.where(by.chosen[:, None], each[:-1], each[-1:])

    def rms_norm(value: Tensor, weight: Tensor) -> Tensor:
        value = value * torch.rsqrt(value.pow(2).mean(-1, keepdim=True) + eps)
        return (value.to(weight.dtype).float() if rounded else value) * (weight.float() + offset)

    if y is not None:
        branch = y.float()
        if by.branch_weight is not None:
            branch = step(rms_norm(branch, by.branch_weight))
        if by.gate is not None:
            branch = branch * row(by.gate)
        total = (x.float() + step(branch)).to(kind)
    if not norm:
        return total, None
    value = total.float()
    normal = (
        F.layer_norm(value, value.shape[-1:], eps=eps) if by.weight is None else rms_norm(value, by.weight)
    )
    if by.scale is not None:
        normal = step(normal) * step(1 + row(by.scale))
    if by.shift is not None:
        normal = step(normal) + by.shift.float()[:, None]
    return total, normal.to(kind)


class _Gated(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate: Tensor, value: Tensor, silu: bool) -> Tensor:
        ctx.save_for_backward(gate, value)
        ctx.silu = silu
        return cast(Tensor, registered.gated(gate, value, silu))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
        found = registered.gated_backward(gradient.contiguous(), *ctx.saved_tensors, ctx.silu, False)
        return found[0], found[1], None


class _GatedHalves(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, wide: Tensor) -> Tensor:
        ctx.save_for_backward(wide)
        return cast(Tensor, registered.gated(*wide.chunk(2, -1), True))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        (wide,) = ctx.saved_tensors
        return cast(Tensor, registered.gated_backward(gradient.contiguous(), *wide.chunk(2, -1), True, True))


class _JoinHeads(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, size: int, eps: float, offset: float, rounded: bool, *flat: Tensor | None
    ) -> Tensor:
        # A stream without a norm is rotated back, or just copied: what it was is not needed for that.
        needed = [x if i % 4 or flat[i + 1] is not None else None for i, x in enumerate(flat)]
        ctx.save_for_backward(*needed)
        ctx.options = (size, eps, offset, rounded)
        ctx.lengths = [x.shape[1] for x in flat[::4] if x is not None]
        return cast(Tensor, registered.join_heads(*_by_kind(flat), size, eps, offset, rounded))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
        flat, start = ctx.saved_tensors, 0
        found: list[Any] = [None] * len(flat)
        gradient = gradient.contiguous()
        for i in range(0, len(flat), 4):
            x, weight, cos, sin = flat[i : i + 4]
            own = gradient.narrow(1, start, ctx.lengths[i // 4])
            start += ctx.lengths[i // 4]
            if ctx.needs_input_grad[4 + i]:
                x = own.flatten(2) if x is None else x
                found[i] = registered.join_heads_backward(own, x, weight, cos, sin, *ctx.options[:3])
            if weight is not None and ctx.needs_input_grad[5 + i]:
                found[i + 1] = _weight_gradient(ctx, own, flat[i : i + 4])
        return None, None, None, None, *found


def _weight_gradient(ctx: Any, gradient: Tensor, flat: Sequence[Any]) -> Tensor:
    """Of a norm's weights, by torch: only full fine-tuning trains them."""
    x, weight, cos, sin = flat
    with torch.enable_grad():
        own = weight.detach().requires_grad_()
        angles = None if cos is None else (cos, sin)
        out = _heads_reference(HeadStream(x.detach(), own, angles), *ctx.options)
        (found,) = torch.autograd.grad(out, own, gradient)
    return cast(Tensor, found)


class _AddNorm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        y: Tensor | None,
        gate: Tensor | None,
        scale: Tensor | None,
        shift: Tensor | None,
        weight: Tensor | None,
        branch_weight: Tensor | None,
        chosen: Tensor | None,
        eps: float,
        offset: float,
        rounded: bool,
        norm: bool,
    ) -> tuple[Tensor, Tensor | None]:
        ctx.set_materialize_grads(False)
        x = x.contiguous()
        y = None if y is None else y.contiguous()
        parts = (gate, scale, shift, weight, branch_weight, chosen)
        total, out = registered.add_norm(x, y, *parts, eps, offset, rounded, norm)
        if y is None:
            total = x.view_as(x)
        ctx.options, ctx.adds = (eps, offset, rounded, norm), y is not None
        trained = any(ctx.needs_input_grad[2:7])
        of_branch = y if trained or branch_weight is not None else None
        ctx.save_for_backward(total if norm else None, of_branch, x if trained else None, *parts)
        return total, (out if norm else None)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, from_total: Tensor | None, from_out: Tensor | None) -> tuple[Any, ...]:
        total, y, x, *parts = ctx.saved_tensors
        eps, offset, _, _ = ctx.options
        found: tuple[Any, ...] = (None,) * 5
        if x is not None:
            found = _modulation_gradients(ctx.options, x, y, Modulation(*parts), (from_total, from_out))
        rest = (*found, None, None, None, None, None)
        if from_total is None and from_out is None:
            return None, None, *rest
        gate, scale, _, weight, branch_weight, chosen = parts
        if not ctx.adds:
            gate = branch_weight = None
        if from_out is None and gate is None and branch_weight is None:
            return from_total, (from_total if ctx.adds else None), *rest
        to_x, to_y = registered.add_norm_backward(
            None if from_total is None else from_total.contiguous(),
            None if from_out is None else from_out.contiguous(),
            total,
            y,
            gate,
            scale,
            weight,
            branch_weight,
            chosen,
            eps,
            offset,
        )
        if gate is None and branch_weight is None:
            to_y = to_x
        return to_x, (to_y if ctx.adds else None), *rest


def _modulation_gradients(
    options: tuple[float, float, bool, bool],
    x: Tensor,
    y: Tensor | None,
    by: Modulation,
    gradients: tuple[Tensor | None, Tensor | None],
) -> tuple[Any, ...]:
    """Of gate, scale, shift and both weights, by torch: adapters on the layers that make them are rare."""
    eps, offset, rounded, norm = options
    names = ("gate", "scale", "shift", "weight", "branch_weight")
    with torch.enable_grad():
        own = {
            name: part.detach().requires_grad_() for name in names if (part := getattr(by, name)) is not None
        }
        by = replace(by, **own)
        outputs = add_norm_reference(x, y, by, eps, rounded=rounded, offset=offset, norm=norm)
        pairs = [(o, g) for o, g in zip(outputs, gradients, strict=True) if o is not None and g is not None]
        pairs = [(o, g) for o, g in pairs if o.requires_grad]
        if not pairs:
            return (None,) * len(names)
        found = torch.autograd.grad(
            [o for o, _ in pairs], list(own.values()), [g for _, g in pairs], allow_unused=True
        )
    by_name = dict(zip(own, found, strict=True))
    return tuple(by_name.get(name) for name in names)
