"""What the fused operators of :mod:`~spotlight_kernels.operators` launch, and their registration with torch.

The operators are registered for CUDA, for tensors without memory, and with Triton's interpreter for CPUs.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from spotlight_kernels import triton_heads, triton_rows
from spotlight_kernels.launch import INTERPRETED, Kernel

_OPERATORS = torch.library.Library("spotlight_kernels", "DEF")  # type: ignore[no-untyped-call]
heads_forward, heads_backward = Kernel(triton_heads.forward), Kernel(triton_heads.backward)
rows_forward, rows_backward = Kernel(triton_rows.forward), Kernel(triton_rows.backward)
gates_forward, gates_backward = Kernel(triton_rows.gated), Kernel(triton_rows.gated_backward)
_GATED_BLOCK = 1024
"""Elements of a row that a program works on: 16 bytes of bfloat16 for each of its threads."""


def _split(heads: int) -> tuple[int, int]:
    """Heads at once, a power of two, and how often: the fewest that are computed for nothing."""
    block = min((8, 16, 4), key=lambda block: -(-heads // block) * block)
    return block, -(-heads // block)


def _angle_strides(cos: Tensor | None, sin: Tensor | None, x: Tensor, size: int) -> tuple[int, ...]:
    """By picture, token and pair. Raises ValueError: a kernel would read past the angles."""
    if cos is None or sin is None:
        return 0, 0, 0
    (batch, tokens, _), shape, strides = x.shape, cos.shape, cos.stride()
    fits = shape[-2:] == (tokens, size // 2) and shape[:-2] in ((), (1,), (batch,))
    if not fits or sin.shape != shape or sin.stride() != strides:
        raise ValueError(
            f"angles have shapes {list(shape)} and {list(sin.shape)}, strides {strides} and "
            f"{sin.stride()}; expected equal ones, of {[batch, tokens, size // 2]} or without the batch"
        )
    return strides if shape[:-2] == (batch,) else (0, *strides[-2:])


def _check_heads(x: Tensor, weight: Tensor | None, size: int) -> None:
    """Raises ValueError: a kernel would read other elements than it is meant to."""
    width, stride = x.shape[2], x.stride(2)
    if stride != 1 or width % size:
        raise ValueError(f"heads of {size} in rows of {width} with stride {stride}; expected 1")
    if weight is not None and (weight.stride() != (1,) or weight.shape[0] not in (size, width)):
        raise ValueError(f"a norm of {list(weight.shape)}; expected {[size]} or {[width]}, contiguous")


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
    joint = _empty_joint(xs, weights, cosines, sines, size)
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


def _empty_joint(xs: list[Tensor], weights: Any, cosines: Any, sines: Any, size: int, *others: Any) -> Tensor:
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

    Up to width 4096 no kernel spills registers; up to 8192 half of the forward ones do, by up to 312 bytes a
    thread; of those with one row a program one does, by 24. Tokens come first: a grid's second side is below
    65,536.
    """
    batch, tokens, width = x.shape
    rows = rows if tokens >= 64 else 1
    block = _block(width)
    warps = 4 if block <= 2048 else wide_warps if block <= 4096 else 2 * wide_warps
    return (-(-tokens // rows), batch), (block, rows), warps


def _block(width: int) -> int:
    """The next power of two."""
    return 1 << (width - 1).bit_length()


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
    batch, _, width = x.shape
    wanted, shape, strides = batch + (chosen is not None), each.shape, each.stride()
    if shape not in ((wanted, width), (1, width)) or strides[1] != 1:
        raise ValueError(f"modulation of {list(shape)}; expected {[wanted, width]}, rows contiguous")
    return strides[0] if shape[0] == wanted else 0


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
    return (
        x.new_empty(0) if y is None else torch.empty_like(x),
        torch.empty_like(x) if others[-1] else x.new_empty(0),
    )


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
    given = (gate, scale, weight, branch_weight, chosen, from_total, from_out)
    to_x, to_y = _empty_rows_backward(from_total, from_out, total, y, *given)
    grid, sizes, warps = _rows(to_x, 1, 4)
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
    *others: Any,
) -> tuple[Tensor, Tensor]:
    given = from_total if from_out is None else from_out
    assert given is not None
    alike = gate is None and branch_weight is None
    return torch.empty_like(given), given.new_empty(0) if alike else torch.empty_like(given)


def _rows_of(x: Tensor) -> tuple[Tensor, int]:
    """With what lies between the rows of its last dimension; a copy if that differs.

    Raises:
        ValueError: a kernel would read other elements than it is meant to.
    """
    width = x.shape[-1]
    if x.stride(-1) != 1:
        raise ValueError(f"rows of {width} with stride {x.stride(-1)}; expected 1")
    rows = x.reshape(-1, width)
    return rows, rows.stride(0)


def _gated(gate: Tensor, value: Tensor, silu: bool) -> Tensor:
    out = _empty_gated(gate, value, silu)
    (gate, gate_s), (value, value_s) = _rows_of(gate), _rows_of(value)
    rows, width = gate.shape
    gates_forward.launch(
        (rows, -(-width // _GATED_BLOCK)),
        (gate, value, out),
        (width, gate_s, value_s),
        (_GATED_BLOCK, silu),
    )
    return out


def _empty_gated(gate: Tensor, value: Tensor, silu: bool) -> Tensor:
    if gate.shape != value.shape or gate.dtype != value.dtype:
        raise ValueError(
            f"a gate of {list(gate.shape)}, {gate.dtype}; "
            f"expected the value's {list(value.shape)}, {value.dtype}"
        )
    return value.new_empty(value.shape)


def _gated_backward(gradient: Tensor, gate: Tensor, value: Tensor, silu: bool, joined: bool) -> Tensor:
    out = _empty_gated_backward(gradient, gate, value, silu, joined)
    to_gate, to_value = out.chunk(2, -1) if joined else out
    (gate, gate_s), (value, value_s), (_, out_s) = map(_rows_of, (gate, value, to_gate))
    rows, width = gate.shape
    gates_backward.launch(
        (rows, -(-width // _GATED_BLOCK)),
        (gradient, gate, value, to_gate, to_value),
        (width, gate_s, value_s, out_s),
        (_GATED_BLOCK, silu),
    )
    return out


def _empty_gated_backward(gradient: Tensor, gate: Tensor, value: Tensor, silu: bool, joined: bool) -> Tensor:
    *others, width = gradient.shape
    return gradient.new_empty((*others, 2 * width) if joined else (2, *gradient.shape))


WHERE = "is_cpu" if INTERPRETED else "is_cuda"
"""The attribute that is true of tensors on which kernels run."""
_PLAIN = {Tensor, torch.nn.Parameter, type(None), list, int, float, bool}
"""Types without a dispatch of their own, which sharded tensors and those without memory have."""


def register(schema: str, launch: Callable[..., Any], shape: Callable[..., Any]) -> Any:
    """An operator of torch, called through its dispatch; as :class:`_Operator` takes them."""
    _OPERATORS.define(schema)  # type: ignore[no-untyped-call]
    name = schema.split("(")[0]
    for key, function in (
        ("Meta", shape),
        ("CUDA", launch),
        *((("CPU", launch),) if INTERPRETED else ()),
    ):
        _OPERATORS.impl(name, function, key)  # type: ignore[no-untyped-call]
    return getattr(torch.ops.spotlight_kernels, name).default


class _Operator:
    """An operator of torch; where nothing else would hear of it, without torch's dispatch, to spare the host.

    Args:
        launch: computes it where kernels run.
        shape: allocates the like of its outputs, on any device.
        like: a tensor of its arguments; default: the first.
    """

    def __init__(
        self,
        schema: str,
        launch: Callable[..., Any],
        shape: Callable[..., Any],
        like: Callable[..., Tensor] = lambda first, *_: first,
    ) -> None:
        self._launch, self._like = launch, like
        self._dispatched = register(schema, launch, shape)

    def __call__(self, *arguments: Any) -> Any:
        # Compilers, counters and selective recomputation listen.
        if not (torch.compiler.is_compiling() or torch._C._len_torch_dispatch_stack()):
            kinds = set(map(type, arguments))
            if list in kinds:
                kinds.update(*(map(type, each) for each in arguments if type(each) is list))
            if kinds <= _PLAIN and getattr(self._like(*arguments), WHERE):
                return self._launch(*arguments)
        return self._dispatched(*arguments)


join_heads = _Operator(
    "join_heads(Tensor[] x, Tensor?[] weight, Tensor?[] cos, Tensor?[] sin, int size, float eps, "
    "float offset, bool rounded) -> Tensor",
    _join_heads,
    _empty_joint,
    like=lambda xs, *_: xs[0],
)
join_heads_backward = _Operator(
    "join_heads_backward(Tensor gradient, Tensor x, Tensor? weight, Tensor? cos, Tensor? sin, int size, "
    "float eps, float offset) -> Tensor",
    _join_heads_backward,
    lambda gradient, x, *_: x.new_empty(x.shape),
)
add_norm = _Operator(
    "add_norm(Tensor x, Tensor? y, Tensor? gate, Tensor? scale, Tensor? shift, Tensor? weight, "
    "Tensor? branch_weight, Tensor? chosen, float eps, float offset, bool rounded, bool norm) "
    "-> (Tensor, Tensor)",
    _add_norm,
    _empty_rows,
)
add_norm_backward = _Operator(
    "add_norm_backward(Tensor? from_total, Tensor? from_out, Tensor? total, Tensor? y, Tensor? gate, "
    "Tensor? scale, Tensor? weight, Tensor? branch_weight, Tensor? chosen, float eps, float offset) "
    "-> (Tensor, Tensor)",
    _add_norm_backward,
    _empty_rows_backward,
    like=lambda from_total, from_out, *_: from_out if from_total is None else from_total,
)
gated = _Operator("gated(Tensor gate, Tensor value, bool silu) -> Tensor", _gated, _empty_gated)
gated_backward = _Operator(
    "gated_backward(Tensor gradient, Tensor gate, Tensor value, bool silu, bool joined) -> Tensor",
    _gated_backward,
    _empty_gated_backward,
)
