"""What the fused operators of :mod:`~spotlight_kernels.operators` launch, and their registration with torch.

``ops`` has them on CUDA, on tensors without memory, and with Triton's interpreter on CPUs.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
from torch import Tensor

from spotlight_kernels import triton_heads, triton_rows
from spotlight_kernels.launch import INTERPRETED, Kernel

_OPERATORS = torch.library.Library("spotlight_kernels", "DEF")  # type: ignore[no-untyped-call]
ops = torch.ops.spotlight_kernels
heads_forward, heads_backward = Kernel(triton_heads.forward), Kernel(triton_heads.backward)
rows_forward, rows_backward = Kernel(triton_rows.forward), Kernel(triton_rows.backward)


def _split(heads: int) -> tuple[int, int]:
    """Heads at once, a power of two, and how often: the fewest that are computed for nothing."""
    block = min((8, 16, 4), key=lambda block: -(-heads // block) * block)
    return block, -(-heads // block)


def _angle_strides(cos: Tensor | None, sin: Tensor | None, x: Tensor, size: int) -> tuple[int, ...]:
    """By picture, token and pair. Raises ValueError: a kernel would read past the angles."""
    if cos is None or sin is None:
        return 0, 0, 0
    whole = [*x.shape[:2], size // 2]
    fits = cos.shape[-2:] == (whole[1], whole[2]) and list(cos.shape[:-2]) in ([], [1], whole[:1])
    if not fits or sin.shape != cos.shape or sin.stride() != cos.stride():
        raise ValueError(
            f"angles have shapes {list(cos.shape)} and {list(sin.shape)}, strides {cos.stride()} and "
            f"{sin.stride()}; expected equal ones, of {whole} or without the batch"
        )
    return cos.expand(whole).stride()


def _check_heads(x: Tensor, weight: Tensor | None, size: int) -> None:
    """Raises ValueError: a kernel would read other elements than it is meant to."""
    if x.stride(-1) != 1 or x.shape[-1] % size:
        raise ValueError(f"heads of {size} in rows of {x.shape[-1]} with stride {x.stride(-1)}; expected 1")
    if weight is not None and (weight.stride(-1) != 1 or weight.shape[0] not in (size, x.shape[-1])):
        raise ValueError(f"a norm of {list(weight.shape)}; expected {[size]} or {[x.shape[-1]]}, contiguous")


def _join_heads(
    xs: list[Tensor],
    weights: list[Tensor | None],
    cosines: list[Tensor | None],
    sines: list[Tensor | None],
    size: int,
    eps: float,
    offset: float,
    rounded: bool,
) -> Tensor:
    joint = _empty_joint(xs, weights, cosines, sines, size, eps, offset, rounded)
    start = 0
    for x, weight, cos, sin in zip(xs, weights, cosines, sines, strict=True):
        batch, tokens, width = x.shape
        _check_heads(x, weight, size)
        out = joint.narrow(1, start, tokens)
        start += tokens
        block, loops = _split(width // size)
        across = weight is not None and weight.shape[0] != size
        angles = _angle_strides(cos, sin, x, size)
        heads_forward.launch(
            (batch * tokens,),
            (x, _or(weight, x), _or(cos, x), _or(sin, x), out),
            (
                tokens,
                width // size,
                eps,
                offset,
                *x.stride()[:2],
                *out.stride()[:2],
                *angles,
            ),
            (size, block, loops, weight is not None, across, cos is not None, rounded),
        )
    return joint


def _empty_joint(
    xs: list[Tensor],
    weights: list[Tensor | None],
    cosines: list[Tensor | None],
    sines: list[Tensor | None],
    size: int,
    eps: float,
    offset: float,
    rounded: bool,
) -> Tensor:
    batch, _, width = xs[0].shape
    return xs[0].new_empty(batch, sum(x.shape[1] for x in xs), width // size, size)


def _join_heads_backward(
    gradient: Tensor,
    x: Tensor,
    weight: Tensor | None,
    cos: Tensor | None,
    sin: Tensor | None,
    size: int,
    eps: float,
    offset: float,
) -> Tensor:
    batch, tokens, width = x.shape
    out = x.new_empty(x.shape)
    block, loops = _split(width // size)
    across = weight is not None and weight.shape[0] != size
    angles = _angle_strides(cos, sin, x, size)
    heads_backward.launch(
        (batch * tokens,),
        (x, _or(weight, x), _or(cos, x), _or(sin, x), gradient, out),
        (
            tokens,
            width // size,
            eps,
            offset,
            *x.stride()[:2],
            *gradient.stride()[:2],
            *angles,
        ),
        (size, block, loops, weight is not None, across, cos is not None),
    )
    return out


def _rows(x: Tensor, rows: int, wide_warps: int) -> tuple[tuple[int, int], tuple[int, int], int]:
    """Grid, sizes and warps of a kernel on rows: the fastest of those tried on an H200 at width 3072.

    Up to width 8192 no kernel spills registers. Tokens come first: a grid's second side is below 65,536.
    """
    batch, tokens, width = x.shape
    rows = rows if tokens >= 64 else 1
    block = triton.next_power_of_2(width)
    warps = 4 if block <= 2048 else wide_warps if block <= 4096 else 2 * wide_warps
    return (-(-tokens // rows), batch), (block, rows), warps


def _or(each: Tensor | None, other: Tensor) -> Tensor:
    """Something to point to where there is nothing to read."""
    return other if each is None else each


def _stride(each: Tensor | None, x: Tensor, chosen: Tensor | None = None) -> int:
    """From a picture's row of modulation to the next one's; 0: one row is for all.

    Raises:
        ValueError: a kernel would read past the rows.
    """
    if each is None:
        return 0
    rows, wanted = each.shape[0], x.shape[0] + (chosen is not None)
    if each.shape[1:] != x.shape[2:] or each.stride(-1) != 1 or rows not in (1, wanted):
        raise ValueError(
            f"modulation of {list(each.shape)}; expected {[wanted, x.shape[2]]}, rows contiguous"
        )
    return each.stride(0) if rows == wanted else 0


def _add_norm(
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
) -> tuple[Tensor, Tensor]:
    total, out = _empty_rows(x, y, norm)
    grid, sizes, warps = _rows(x, 4, 8)
    given = (y, gate, scale, shift, weight, branch_weight, chosen)
    rows_forward.launch(
        grid,
        (x, *(_or(each, x) for each in given), total, out),
        (*x.shape[1:], eps, offset, _stride(gate, x, chosen), _stride(scale, x, chosen), _stride(shift, x)),
        (*sizes, *(each is not None for each in given), norm, rounded),
        num_warps=warps,
        # A product and a sum in one instruction would skip the rounding between them.
        enable_fp_fusion=not rounded,
    )
    return total, out


def _empty_rows(x: Tensor, y: Tensor | None, *others: Any) -> tuple[Tensor, Tensor]:
    return x.new_empty(0 if y is None else x.shape), x.new_empty(x.shape if others[-1] else 0)


def _add_norm_backward(
    from_total: Tensor | None,
    from_out: Tensor | None,
    total: Tensor | None,
    y: Tensor | None,
    gate: Tensor | None,
    scale: Tensor | None,
    weight: Tensor | None,
    branch_weight: Tensor | None,
    chosen: Tensor | None,
    eps: float,
    offset: float,
) -> tuple[Tensor, Tensor]:
    modulation = (gate, scale, weight, branch_weight, chosen)
    to_x, to_y = _empty_rows_backward(from_total, from_out, total, y, *modulation, eps, offset)
    grid, sizes, warps = _rows(to_x, 1, 4)
    given = (*modulation, from_total, from_out)
    rows_backward.launch(
        grid,
        (*(_or(each, to_x) for each in (total, y, *given)), to_x, to_y),
        (*to_x.shape[1:], eps, offset, _stride(gate, to_x, chosen), _stride(scale, to_x, chosen)),
        (*sizes, *(each is not None for each in given)),
        num_warps=warps,
    )
    return to_x, to_y


def _empty_rows_backward(
    from_total: Tensor | None,
    from_out: Tensor | None,
    total: Tensor | None,
    y: Tensor | None,
    gate: Tensor | None,
    scale: Tensor | None,
    weight: Tensor | None,
    branch_weight: Tensor | None,
    chosen: Tensor | None,
    eps: float,
    offset: float,
) -> tuple[Tensor, Tensor]:
    given = from_total if from_out is None else from_out
    assert given is not None
    alike = gate is None and branch_weight is None
    return given.new_empty(given.shape), given.new_empty(0 if alike else given.shape)


for _schema, _kernel, _shape in (
    (
        "join_heads(Tensor[] x, Tensor?[] weight, Tensor?[] cos, Tensor?[] sin, int size, float eps, "
        "float offset, bool rounded) -> Tensor",
        _join_heads,
        _empty_joint,
    ),
    (
        "join_heads_backward(Tensor gradient, Tensor x, Tensor? weight, Tensor? cos, Tensor? sin, int size, "
        "float eps, float offset) -> Tensor",
        _join_heads_backward,
        lambda gradient, x, *_: x.new_empty(x.shape),
    ),
    (
        "add_norm(Tensor x, Tensor? y, Tensor? gate, Tensor? scale, Tensor? shift, Tensor? weight, "
        "Tensor? branch_weight, Tensor? chosen, float eps, float offset, bool rounded, bool norm) "
        "-> (Tensor, Tensor)",
        _add_norm,
        _empty_rows,
    ),
    (
        "add_norm_backward(Tensor? from_total, Tensor? from_out, Tensor? total, Tensor? y, Tensor? gate, "
        "Tensor? scale, Tensor? weight, Tensor? branch_weight, Tensor? chosen, float eps, float offset) "
        "-> (Tensor, Tensor)",
        _add_norm_backward,
        _empty_rows_backward,
    ),
):
    _OPERATORS.define(_schema)  # type: ignore[no-untyped-call]
    _name = _schema.split("(")[0]
    for _function, _key in (
        (_shape, "Meta"),
        (_kernel, "CUDA"),
        *(((_kernel, "CPU"),) if INTERPRETED else ()),
    ):
        _OPERATORS.impl(_name, _function, _key)  # type: ignore[no-untyped-call]
