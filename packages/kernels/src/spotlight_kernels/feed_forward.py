"""The feed-forward part of blocks, with less kept for the backward."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, cast

import torch
import torch.nn.functional as F
from diffusers.models.activations import GELU
from diffusers.models.attention import FeedForward
from diffusers.models.transformers.transformer_flux2 import Flux2FeedForward
from diffusers.models.transformers.transformer_krea2 import Krea2SwiGLU
from torch import Tensor

from spotlight_kernels.lora import Again, project


def fused_forward(mlp: Any) -> Callable[..., Tensor] | None:
    """What takes the place of a module's forward; None: it is no MLP that is known here."""
    if type(mlp) is Flux2FeedForward:
        return joined_feed_forward
    if type(mlp) is Krea2SwiGLU:
        return swiglu
    usual = type(mlp) is FeedForward and len(mlp.net) == 3 and type(mlp.net[0]) is GELU
    return feed_forward if usual else None


def through(mlp: Any, x: Tensor, again: Again | None) -> Tensor:
    """What a block's MLP computes. It is called as a module, whose hooks may gather its weights."""
    return cast(Tensor, mlp(x, again) if "forward" in vars(mlp) else mlp(x))


def joined_feed_forward(mlp: Any, x: Tensor, again: Again | None = None) -> Tensor:
    """Of FLUX.2: gate and value are one product; as :func:`feed_forward`."""
    (wide,) = project(x, [mlp.linear_in], again)
    return project(gated_halves(wide), [mlp.linear_out], Again(gated_halves, (wide,)))[0]


def feed_forward(mlp: Any, x: Tensor, again: Again | None = None) -> Tensor:
    """A product, GELU, dropout, and a product; the activation's output is computed again for the backward.

    Args:
        again: how ``x`` is computed once more; None: it is kept.
    """
    up, dropout, down = mlp.net
    (wide,) = project(x, [up.proj], again)
    activate = partial(F.gelu, approximate=up.approximate)
    same = not (dropout.training and dropout.p)
    (out,) = project(dropout(activate(wide)), [down], Again(activate, (wide,)) if same else None)
    return out


def swiglu(mlp: Any, x: Tensor, again: Again | None = None) -> Tensor:
    """Of Krea 2; as :func:`feed_forward`."""
    return gated_feed_forward(x, (mlp.gate, mlp.up), mlp.down, again)


def gated_feed_forward(x: Tensor, up: tuple[Any, Any], down: Any, again: Again | None) -> Tensor:
    """``down(silu(gate(x)) * value(x))`` with layers ``up`` = (gate, value); as :func:`feed_forward`."""
    gate, value = project(x, up, again)
    (out,) = project(gated_product(gate, value), [down], Again(gated_product, (gate, value)))
    return out


def gated_halves(wide: Tensor) -> Tensor:
    """:func:`gated_product` of the halves of the last dimension."""
    gate, value = wide.chunk(2, dim=-1)
    return gated_product(gate, value)


def gated_product(gate: Tensor, value: Tensor) -> Tensor:
    """``silu(gate) * value``, which keeps nothing else for its backward."""
    return cast(Tensor, _GatedProduct.apply(gate, value))  # type: ignore[no-untyped-call]


class _GatedProduct(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate: Tensor, value: Tensor) -> Tensor:
        ctx.save_for_backward(gate, value)
        return F.silu(gate) * value

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        gate, value = ctx.saved_tensors
        to_gate = torch.ops.aten.silu_backward(gradient * value, gate)
        return to_gate, gradient * F.silu(gate)
