"""Several transformers of one pipeline as one module: slots, adapters, sharding and export see one."""

from __future__ import annotations

from collections.abc import Mapping

from torch import nn


class Experts(nn.Module):
    """Transformers by component name, each for its own range of noise levels.

    Args:
        parts: at least two, e.g. ``transformer`` and ``transformer_2`` of Wan2.2.
    """

    def __init__(self, parts: Mapping[str, nn.Module]) -> None:
        super().__init__()
        for name, part in parts.items():
            self.add_module(name, part)


def denoisers(module: nn.Module) -> dict[str, nn.Module]:
    """The transformers that run forwards, by component name: those of :class:`Experts`, or the module."""
    if isinstance(module, Experts):
        return dict(module.named_children())
    return {"transformer": module}
