"""Several transformers of one pipeline as one module: slots, adapters, sharding and export see one."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from spotlight.models.shared.sharded import gathers


class Experts(nn.Module):
    """Transformers by component name, each for its own range of noise levels.

    Args:
        parts: at least two, e.g. ``transformer`` and ``transformer_2`` of Wan2.2.

    Attributes:
        had_rows: those that got rows of their own with gradient since it was cleared.
    """

    def __init__(self, parts: Mapping[str, nn.Module]) -> None:
        super().__init__()
        self.had_rows: set[str] = set()
        for name, part in parts.items():
            self.add_module(name, part)


def denoisers(module: nn.Module) -> dict[str, nn.Module]:
    """The transformers that run forwards, by component name: those of :class:`Experts`, or the module."""
    if isinstance(module, Experts):
        return dict(module.named_children())
    return {"transformer": module}


@contextmanager
def rows_uncounted(module: nn.Module) -> Iterator[None]:
    """For passes whose gradients are dropped: their rows are no use of a transformer."""
    before = {*module.had_rows} if isinstance(module, Experts) else set()
    try:
        yield
    finally:
        if isinstance(module, Experts):
            module.had_rows = before


def by_rows(
    model: nn.Module, first: Tensor | None, run: Callable[[nn.Module, Tensor | slice], Tensor]
) -> Tensor:
    """Outputs of a batch whose rows may belong to different transformers.

    Sharded transformers all run, with a row that is then ignored if none is theirs: every rank must take part
    in each of their collectives, whatever its own rows are. Their gradient is then 0 instead of None.

    Args:
        first: [batch] bool, rows for the first of two transformers; None: one transformer takes all.
        run: outputs of a transformer for some rows, [rows, ...].
    """
    parts = denoisers(model)
    if first is None:
        return run(next(iter(parts.values())), slice(None))
    masks = dict(zip(parts, (first, ~first), strict=True))
    if isinstance(model, Experts) and torch.is_grad_enabled():
        model.had_rows |= {name for name, mask in masks.items() if bool(mask.any())}
    sharded = any(gathers(part) for part in parts.values())
    if not sharded:
        for name, mask in masks.items():
            if bool(mask.all()):
                return run(parts[name], slice(None))
    outputs, order, ignored = [], [], []
    for name, mask in masks.items():
        rows = mask.nonzero()[:, 0]
        if len(rows):
            outputs.append(run(parts[name], rows))
            order.append(rows)
        else:
            ignored.append(run(parts[name], mask.new_zeros(1, dtype=torch.long)))
    whole = torch.cat(outputs)[torch.cat(order).argsort()]
    return whole + sum(0 * output.sum() for output in ignored)
