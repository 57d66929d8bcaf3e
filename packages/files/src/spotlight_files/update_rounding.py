"""What rounding merged weights to the type of their files loses of the update.

bfloat16 keeps 8 bits of a weight, so of an update that is small beside its weight it keeps little. The
update as written is ``round(base + update) - round(base)``; lost is its distance from the update, as a
share of the update's norm: 0 is all kept, 1 as much as not having trained. Chance can bring it above 1.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class LostUpdate:
    """Shares of the update's norm that rounding lost.

    Attributes:
        overall: of all tensors together.
        worst: of the tensor that lost most, of those that training changed.
        tensor: its name.
    """

    overall: float
    worst: float
    tensor: str


class UpdateRounding:
    """Rounds merged tensors, and measures what that loses.

    Args:
        dtype: of the files.
        stored: a tensor's type in files of ``dtype``, by its name.
        base: a tensor before training, by its name; None: every call of :meth:`round` brings it.
    """

    def __init__(
        self,
        dtype: torch.dtype,
        stored: Callable[[str], torch.dtype],
        base: Callable[[str], Tensor] | None = None,
    ) -> None:
        self.dtype = dtype
        self._stored, self._base = stored, base
        self._lost = self._norm = 0.0
        self._worst, self._tensor = -1.0, ""

    def round(self, name: str, exact: Tensor, base: Tensor | None = None) -> Tensor:
        """``exact``, a merged tensor in float32, in its type on file."""
        dtype = self._stored(name)
        written = exact.to(dtype)
        if dtype == torch.float32:
            return written
        if base is None:
            assert self._base is not None, "a base with each tensor, or one for all"
            base = self._base(name)
        before = base.float()
        update = exact - before
        lost = _square(written.float() - before.to(dtype).float() - update)
        norm = _square(update)
        self._lost, self._norm = self._lost + lost, self._norm + norm
        if norm and lost / norm > self._worst:
            self._worst, self._tensor = lost / norm, name
        return written

    def lost(self) -> LostUpdate | None:
        """Of all tensors rounded so far; None if none was, or training changed none of them."""
        if not self._norm:
            return None
        return LostUpdate((self._lost / self._norm) ** 0.5, self._worst**0.5, self._tensor)


def _square(tensor: Tensor) -> float:
    return float(torch.linalg.vector_norm(tensor, dtype=torch.float64)) ** 2
