"""Linear layers with low-rank adapters as one function: what peft computes, in fewer passes over memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from spotlight_kernels.operators import rows_of


class AdaptedLinear(NamedTuple):
    """``x W' + bias + scale * (x A') B'``, all of one type.

    Attributes:
        weight: [outputs, inputs].
        bias: [outputs].
        a: [rank, inputs].
        b: [outputs, rank].
        scale: of the adapter.
    """

    weight: Tensor
    bias: Tensor | None
    a: Tensor
    b: Tensor
    scale: float


class Again(NamedTuple):
    """How an input is computed once more, to the bit, without gradient, of tensors that are kept anyway."""

    function: Callable[..., Tensor]
    arguments: tuple[Any, ...]


def project(x: Tensor, layers: Sequence[nn.Module], again: Again | None = None) -> Sequence[Tensor]:
    """Outputs of layers on the same input.

    Args:
        again: adapted layers keep its arguments for the backward instead of ``x``.
        layers: where all have a method ``adapted(x)`` that returns their :class:`AdaptedLinear`, they are
            applied together; where it is missing or returns None, one by one.
    """
    parts = [_adapted(layer, x) for layer in layers]
    known = [part for part in parts if part is not None]
    if len(known) < len(parts):
        return [layer(x) for layer in layers]
    return lora_linears(x, known, again)


def lora_linears(x: Tensor, layers: Sequence[AdaptedLinear], again: Again | None = None) -> Sequence[Tensor]:
    """Outputs [..., outputs] of adapted layers on ``x`` [..., inputs].

    Each adapter's product is written first and the wide product adds to it in place: its kernel reads what it
    adds to while it computes, where an addition afterwards would be two passes of its own. Together, layers
    read ``x`` once for all adapters, and its gradient is summed up in place as well.
    """
    flat = [tensor for layer in layers for tensor in layer[:4]]
    outputs: tuple[Tensor, ...] = _LoraLinears.apply(x, [layer.scale for layer in layers], again, *flat)  # type: ignore[no-untyped-call]
    return outputs


def _adapted(layer: Any, x: Tensor) -> AdaptedLinear | None:
    return layer.adapted(x) if hasattr(layer, "adapted") else None


class _LoraLinears(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, scales: list[float], again: Again | None, *tensors: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        weights, biases, downs, ups = (tensors[i::4] for i in range(4))
        flat = rows_of(x)
        low = flat @ _joined(downs).t()
        outputs = []
        for weight, bias, own, up, scale in zip(
            weights, biases, _parts(low, downs), ups, scales, strict=True
        ):
            y = (own @ up.t()).mul_(scale) if bias is None else torch.addmm(bias, own, up.t(), alpha=scale)
            outputs.append(y.addmm_(flat, weight.t()).view(*x.shape[:-1], -1))
        function, arguments = again or (None, (x,))
        kept = [each.detach() if isinstance(each, Tensor) else None for each in arguments]
        ctx.save_for_backward(low, *weights, *downs, *ups, *kept)
        ctx.function, ctx.others = function, [None if isinstance(e, Tensor) else e for e in arguments]
        ctx.scales, ctx.shape = scales, x.shape
        return tuple(outputs)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Any, ...]:
        low, *rest = ctx.saved_tensors
        count = len(gradients)
        weights, downs, ups = (rest[i * count : (i + 1) * count] for i in range(3))
        kept = [other if e is None else e for e, other in zip(rest[3 * count :], ctx.others, strict=True)]
        flat = rows_of(kept[0] if ctx.function is None else ctx.function(*kept))
        slopes = [None if g is None else g.reshape(-1, g.shape[-1]) for g in gradients]
        to_low = torch.zeros_like(low) if None in gradients else torch.empty_like(low)
        for slope, own, up, scale in zip(slopes, _parts(to_low, downs), ups, ctx.scales, strict=True):
            if slope is not None:
                torch.mm(slope, up, out=own).mul_(scale)
        to_x = None
        if ctx.needs_input_grad[0]:
            to_x = to_low @ _joined(downs)
            for slope, weight in zip(slopes, weights, strict=True):
                to_x = to_x if slope is None else to_x.addmm_(slope, weight)
            to_x = to_x.view(ctx.shape)
        found: list[Tensor | None] = []
        to_downs = _parts((to_low.t() @ flat).t(), downs)
        for i, (slope, to_down, own) in enumerate(zip(slopes, to_downs, _parts(low, downs), strict=True)):
            needs = ctx.needs_input_grad[3 + 4 * i : 7 + 4 * i]
            found += (
                slope.t() @ flat if needs[0] and slope is not None else None,
                slope.sum(0) if needs[1] and slope is not None else None,
                to_down.t() if needs[2] and slope is not None else None,
                (slope.t() @ own).mul_(ctx.scales[i]) if needs[3] and slope is not None else None,
            )
        return to_x, None, None, *found


def _joined(downs: Sequence[Tensor]) -> Tensor:
    return downs[0] if len(downs) == 1 else torch.cat(list(downs))


def _parts(joined: Tensor, downs: Sequence[Tensor]) -> Sequence[Tensor]:
    """Of the last dimension, each adapter's."""
    parts: Sequence[Tensor] = joined.split([down.shape[0] for down in downs], -1)  # type: ignore[no-untyped-call]
    return parts
