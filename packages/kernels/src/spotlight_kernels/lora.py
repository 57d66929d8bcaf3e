"""Linear layers with low-rank adapters as one function: what peft computes, in fewer passes over memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from spotlight_kernels.operators import rows_of
from spotlight_kernels.quantised.linear import QuantisedLinear


class AdaptedLinear(NamedTuple):
    """``x W' + bias + scale * (x A') B'``, all of one type.

    Attributes:
        weight: [outputs, inputs]; or the layer that makes it for each product.
        bias: [outputs].
        a: [rank, inputs].
        b: [outputs, rank].
        scale: of the adapter.
    """

    weight: Tensor | QuantisedLinear
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
    if not torch.is_grad_enabled():
        return _outputs(x, layers)[0]
    held = [layer.weight if isinstance(layer.weight, QuantisedLinear) else None for layer in layers]
    flat = [each if isinstance(each, Tensor) else None for layer in layers for each in layer[:4]]
    scales = [layer.scale for layer in layers]
    outputs: tuple[Tensor, ...] = _LoraLinears.apply(x, scales, again, held, *flat)  # type: ignore[no-untyped-call]
    return outputs


def _adapted(layer: Any, x: Tensor) -> AdaptedLinear | None:
    found = vars(layer).get("adapted")
    return None if found is None else found(x)


def _outputs(x: Tensor, layers: Sequence[AdaptedLinear]) -> tuple[list[Tensor], Tensor]:
    """Of each layer; and all adapters' ``scale * x A'``, joined."""
    rows, shape = rows_of(x), x.shape[:-1]
    downs = [layer.a for layer in layers]
    low = _scaled(F.linear(rows, _joined(downs)), layers)
    outputs = []
    for layer, own in zip(layers, _parts(low, downs), strict=True):
        y = F.linear(own, layer.b, layer.bias)
        outputs.append(y.addmm_(rows, _whole(layer.weight, rows).t()).view(*shape, -1))
    return outputs, low


def _whole(weight: Tensor | QuantisedLinear, like: Tensor) -> Tensor:
    return weight if isinstance(weight, Tensor) else weight.whole(like.dtype)


def _scaled(low: Tensor, layers: Sequence[AdaptedLinear]) -> Tensor:
    """Not in place: recomputation of elementwise work has kept the product."""
    scale, *others = {layer.scale for layer in layers}
    if not others:
        return low if scale == 1 else low * scale
    parts = _parts(low, [layer.a for layer in layers])
    return torch.cat([part * layer.scale for part, layer in zip(parts, layers, strict=True)], -1)


class _LoraLinears(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        scales: list[float],
        again: Again | None,
        held: list[QuantisedLinear | None],
        *tensors: Any,
    ) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        layers = [
            AdaptedLinear._make((each or tensors[4 * i], *tensors[4 * i + 1 : 4 * i + 4], scale))
            for i, (scale, each) in enumerate(zip(scales, held, strict=True))
        ]
        outputs, low = _outputs(x, layers)
        function, arguments = again or (None, (x,))
        kept = [each.detach() if isinstance(each, Tensor) else None for each in arguments]
        ctx.save_for_backward(low, *tensors, *kept)
        ctx.function, ctx.others = function, [None if isinstance(e, Tensor) else e for e in arguments]
        ctx.scales, ctx.shape, ctx.held = scales, x.shape, held
        return tuple(outputs)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Any, ...]:
        low, *rest = ctx.saved_tensors
        ends = 4 * len(gradients)
        weights, downs, ups = (rest[i:ends:4] for i in (0, 2, 3))
        slopes = [None if g is None else g.reshape(-1, g.shape[-1]) for g in gradients]
        to_low = torch.zeros_like(low) if None in gradients else torch.empty_like(low)
        for slope, own, up, scale in zip(slopes, _parts(to_low, downs), ups, ctx.scales, strict=True):
            if slope is not None:
                torch.mm(slope, up, out=own)
                if scale != 1:
                    own.mul_(scale)
        to_x = None
        if ctx.needs_input_grad[0]:
            to_x = to_low @ _joined(downs)
            for slope, weight, held in zip(slopes, weights, ctx.held, strict=True):
                to_x = to_x if slope is None else to_x.addmm_(slope, _whole(held or weight, slope))
            to_x = to_x.view(ctx.shape)
        return to_x, None, None, None, *_LoraLinears._of_layers(ctx, slopes, low, to_low, downs, rest[ends:])

    @staticmethod
    def _of_layers(
        ctx: Any,
        slopes: list[Tensor | None],
        low: Tensor,
        to_low: Tensor,
        downs: list[Tensor],
        kept: list[Tensor | None],
    ) -> list[Tensor | None]:
        """Gradients of weights, biases, A and B of every layer."""
        needs = ctx.needs_input_grad[4:]
        if not any(needs):
            return [None] * len(needs)
        arguments = [other if each is None else each for each, other in zip(kept, ctx.others, strict=True)]
        rows = rows_of(arguments[0] if ctx.function is None else ctx.function(*arguments))
        to_downs = (to_low.t() @ rows).split_with_sizes([down.shape[0] for down in downs])
        found: list[Tensor | None] = []
        for i, (slope, to_down, own) in enumerate(zip(slopes, to_downs, _parts(low, downs), strict=True)):
            if slope is None:
                found += [None] * 4
                continue
            weight, bias, a, b = needs[4 * i : 4 * i + 4]
            found += (
                slope.t() @ rows if weight else None,
                slope.sum(0) if bias else None,
                to_down if a else None,
                slope.t() @ own if b else None,
            )
        return found


def _joined(downs: Sequence[Tensor]) -> Tensor:
    return downs[0] if len(downs) == 1 else torch.cat(list(downs))


def _parts(joined: Tensor, downs: Sequence[Tensor]) -> Sequence[Tensor]:
    """Of the last dimension, each adapter's."""
    if len(downs) == 1:
        return (joined,)
    return joined.split_with_sizes([down.shape[0] for down in downs], -1)
