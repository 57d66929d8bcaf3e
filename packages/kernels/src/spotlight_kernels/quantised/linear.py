"""A frozen linear layer whose weight is made, of few bits, for every product and not kept.

The product is that of a plain layer with the weight of :meth:`QuantisedLinear.whole`, to the bit, with
gradient and without; nothing but what is packed outlives it. Equal files give equal packed tensors on every
device.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

Part = tuple[tuple[int, ...], torch.dtype]
"""Shape and type of a tensor of what is packed."""


class QuantisedLinear(nn.Linear):
    """In the place of ``linear``, whose bias it takes; what is packed has no values yet.

    Attributes:
        weight: packed; further parameters are its scales. One of them is float, and NaN where memory was
            given but no weight has been held.
        dtype: of the weight in its place.
    """

    def __init__(self, linear: nn.Linear) -> None:
        nn.Module.__init__(self)
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.dtype = linear.weight.dtype
        self.register_parameter("bias", linear.bias)
        for name, (shape, dtype) in self.parts().items():
            empty = torch.empty(shape, dtype=dtype, device=linear.weight.device)
            self.register_parameter(name, nn.Parameter(empty, requires_grad=False))

    @abstractmethod
    def parts(self) -> Mapping[str, Part]:
        """What is packed, by parameter."""

    @abstractmethod
    def hold(self, weight: Tensor) -> None:
        """Quantise a weight [outputs, inputs] into the layer's own memory."""

    @abstractmethod
    def whole(self, dtype: torch.dtype) -> Tensor:
        """The weight [outputs, inputs] that is held, rounded once, to ``dtype``."""

    def plain(self) -> nn.Linear:
        """A layer like the one that it stands for, on the meta device."""
        bias = self.bias is not None
        return nn.Linear(self.in_features, self.out_features, bias, device="meta", dtype=self.dtype)

    @property
    def stored(self) -> StoredWeight:
        """The weight as files have it."""
        return StoredWeight(self)

    def forward(self, x: Tensor) -> Tensor:
        if torch.is_autocast_enabled(x.device.type):
            x = x.to(torch.get_autocast_dtype(x.device.type))
        if torch.is_grad_enabled() and x.requires_grad:
            return cast(Tensor, _Product.apply(x, self))  # type: ignore[no-untyped-call]
        return self._product(x)

    def _product(self, x: Tensor) -> Tensor:
        return F.linear(x, self.whole(x.dtype), self.bias)


class StoredWeight:
    """What a loader writes to: the weight of a layer, whole, which is quantised as it comes."""

    def __init__(self, layer: QuantisedLinear) -> None:
        self._layer = layer
        self.shape = torch.Size((layer.out_features, layer.in_features))

    def copy_(self, weight: Tensor) -> None:
        """Hold ``weight``."""
        self._layer.hold(weight)


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, layer: QuantisedLinear) -> Tensor:
        ctx.layer = layer
        return layer._product(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient @ ctx.layer.whole(gradient.dtype), None
