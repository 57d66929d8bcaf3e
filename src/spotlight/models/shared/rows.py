"""Batches of which only some rows can share a forward."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import TypeVar

import torch
from torch import Tensor, nn

from spotlight.models.shared.sharded import gathers

Kind = TypeVar("Kind", bound=Hashable)


def by_kind(model: nn.Module, kinds: Sequence[Kind], run: Callable[[Kind, list[int]], Tensor]) -> Tensor:
    """``run(kind, rows)`` for the rows of one kind at a time; outputs in the order of the batch.

    Of a model sharded over ranks, one row at a time: all ranks must run equally many forwards.
    """
    if gathers(model):
        forwards = [(kind, [row]) for row, kind in enumerate(kinds)]
    else:
        distinct = dict.fromkeys(kinds)
        forwards = [(kind, [row for row, found in enumerate(kinds) if found == kind]) for kind in distinct]
    outputs = torch.cat([run(kind, rows) for kind, rows in forwards])
    order = torch.tensor([row for _, rows in forwards for row in rows], device=outputs.device)
    return outputs[order.argsort()]
