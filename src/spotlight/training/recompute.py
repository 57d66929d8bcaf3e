"""Recomputation of activations in the backward pass (``learner.gradient_checkpointing``)."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Protocol, cast, runtime_checkable

from torch import nn
from torch.utils.checkpoint import checkpoint

from spotlight.models.experts import denoisers
from spotlight.models.model_errors import ModelError

RunBlock = Callable[..., Any]


@runtime_checkable
class _Checkpointable(Protocol):
    def enable_gradient_checkpointing(self, gradient_checkpointing_func: RunBlock) -> None: ...


def recompute_blocks(module: nn.Module, every: int = 1) -> None:
    """Recompute the activations of every n-th transformer block; the others keep theirs.

    Raises:
        ModelError: the model cannot.
    """
    for part in denoisers(module).values():
        if not isinstance(part, _Checkpointable):
            raise ModelError(
                f"{type(part).__name__} cannot recompute activations (no enable_gradient_checkpointing): "
                "set gradient_checkpointing to false"
            )
        lists = (child for child in part.children() if isinstance(child, nn.ModuleList))
        blocks = (block for child in lists for block in child)
        kept = {id(block) for i, block in enumerate(blocks) if i % every}
        part.enable_gradient_checkpointing(cast(RunBlock, partial(_run, kept)))


def _run(kept: set[int], block: nn.Module, *args: Any) -> Any:
    return block(*args) if id(block) in kept else checkpoint(block, *args, use_reentrant=False)
