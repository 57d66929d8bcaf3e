"""Launching Triton kernels: the way that Triton does it takes the host longer than a small kernel runs."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
"""Whether kernels run on CPU tensors."""
KNOWN_MAX = 4096
"""Compiled variants that a kernel remembers; then it starts over."""


class Kernel:
    """A kernel whose parameters are tensors, then numbers, then constants.

    A call with numbers, constants, types, alignments and device seen before launches what Triton compiled for
    them at once; Triton itself looks at every argument first. Of a tensor it looks at no more than this does:
    its type, and whether it is aligned to 16 bytes (the sines of complex angles are not).
    """

    def __init__(self, function: Any) -> None:
        self._function = function
        self._known: dict[Any, Any] = {}

    def launch(
        self,
        grid: tuple[int, ...],
        tensors: Sequence[Tensor],
        numbers: tuple[float, ...],
        constants: tuple[int | bool, ...],
        **options: Any,
    ) -> None:
        """Run on the first tensor's device, in its current stream.

        Args:
            options: Triton's, e.g. ``num_warps``.
        """
        device = tensors[0].device
        arguments = (*tensors, *numbers, *constants)
        if INTERPRETED:
            self._function[grid](*arguments)
        elif device.index != torch.cuda.current_device():
            with torch.cuda.device(device):
                self.launch(grid, tensors, numbers, constants, **options)
        else:
            types = [tensor.dtype for tensor in tensors]
            aligned = [tensor.data_ptr() % 16 == 0 for tensor in tensors]
            key = numbers, constants, *types, *aligned, device.index, *options.items()
            if (compiled := self._known.get(key)) is not None:
                compiled[(*grid, 1, 1)[:3]](*arguments)
                return
            if len(self._known) == KNOWN_MAX:
                self._known.clear()
            self._known[key] = self._function[grid](*arguments, **options)
