"""Eight bits a weight, symmetric, with a scale for each output."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from spotlight_kernels.quantised.linear import Part, QuantisedLinear

_LARGEST = 127


class Int8Linear(QuantisedLinear):
    """``weight`` [outputs, inputs] of int8, times ``scale`` [outputs, 1] of float32."""

    scale: nn.Parameter

    def parts(self) -> Mapping[str, Part]:
        return {
            "weight": ((self.out_features, self.in_features), torch.int8),
            "scale": ((self.out_features, 1), torch.float32),
        }

    @torch.no_grad()
    def hold(self, weight: Tensor) -> None:
        values = weight.to(self.weight.device, torch.float32, copy=True)  # the only whole one
        self.scale.copy_(values.abs().amax(1, keepdim=True) / _LARGEST)
        tiny = torch.finfo(torch.float32).tiny  # of a row of zeros
        self.weight.copy_(values.div_(self.scale.clamp_min(tiny)).round_().clamp_(-_LARGEST, _LARGEST))

    @torch.no_grad()
    def whole(self, dtype: torch.dtype) -> Tensor:
        return torch.mul(self.weight, self.scale, out=self.scale.new_empty(self.weight.shape, dtype=dtype))
