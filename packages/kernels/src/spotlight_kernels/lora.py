"""A linear layer with a low-rank adapter as one function: what peft computes, in fewer passes over memory."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def lora_linear(x: Tensor, weight: Tensor, bias: Tensor | None, a: Tensor, b: Tensor, scale: float) -> Tensor:
    """``x W' + bias + scale * (x A') B'``, all of one type.

    The adapter's product is written first and the wide product adds to it in place: its kernel reads what it
    adds to while it computes, where an addition afterwards would be two passes of their own.

    Args:
        x: [..., inputs].
        weight: [outputs, inputs]; bias: [outputs]. Gradients of both are computed if they want them.
        a: [rank, inputs]; b: [outputs, rank].

    Returns:
        [..., outputs].
    """
    y: Tensor = _LoraLinear.apply(x, weight, bias, a, b, scale)  # type: ignore[no-untyped-call]
    return y


class _LoraLinear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, a: Tensor, b: Tensor, scale: float
    ) -> Tensor:
        flat = x.reshape(-1, x.shape[-1])
        low = flat @ a.t()
        y = scale * (low @ b.t()) if bias is None else torch.addmm(bias, low, b.t(), alpha=scale)
        y = y.addmm_(flat, weight.t())
        ctx.save_for_backward(flat, weight, a, b, low)
        ctx.scale, ctx.shape = scale, x.shape
        return y.view(*x.shape[:-1], -1)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        flat, weight, a, b, low = ctx.saved_tensors
        slope = gradient.reshape(-1, gradient.shape[-1])
        to_low = (slope @ b).mul_(ctx.scale)
        needs = ctx.needs_input_grad
        to_x = (to_low @ a).addmm_(slope, weight).view(ctx.shape) if needs[0] else None
        to_weight = slope.t() @ flat if needs[1] else None
        to_bias = slope.sum(0) if needs[2] else None
        to_a = to_low.t() @ flat if needs[3] else None
        to_b = (slope.t() @ low).mul_(ctx.scale) if needs[4] else None
        return to_x, to_weight, to_bias, to_a, to_b, None
