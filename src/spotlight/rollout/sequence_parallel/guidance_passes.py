"""The two passes of classifier-free guidance, made by the halves of a group at the same time."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from spotlight.models.condition import Pass


class ParallelPasses:
    """The lower half of the ranks makes the conditional pass, the upper half the negative one.

    All ranks then exchange velocities and get equal bits of both. Each half may split its pass by Ulysses.

    Args:
        group: of an even number of ranks.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group, self._half = group, group.size() // 2

    def __call__(self, conditional: Pass, negative: Pass) -> tuple[Tensor, Tensor]:
        """Both velocities, of which this rank computes one."""
        own = (conditional if self._group.rank() < self._half else negative)().contiguous()
        made = [torch.empty_like(own) for _ in range(self._group.size())]
        dist.all_gather(made, own, group=self._group)
        return made[0], made[self._half]
