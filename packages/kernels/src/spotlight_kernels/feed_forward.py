"""The feed-forward part of blocks, with less kept for the backward."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch.nn.functional as F
from diffusers.models.activations import GELU
from torch import Tensor

from spotlight_kernels.lora import Again, project


def is_usual(mlp: Any) -> bool:
    """Whether it is diffusers' ``FeedForward`` of a product, GELU, dropout, and a product."""
    return len(mlp.net) == 3 and type(mlp.net[0]) is GELU


def feed_forward(mlp: Any, x: Tensor, again: Again | None) -> Tensor:
    """What such a module computes; the activation's output is computed again for the backward.

    Args:
        again: how ``x`` is computed once more; None: it is kept.
    """
    up, dropout, down = mlp.net
    (wide,) = project(x, [up.proj], again)
    activate = partial(F.gelu, approximate=up.approximate)
    same = not (dropout.training and dropout.p)
    (out,) = project(dropout(activate(wide)), [down], Again(activate, (wide,)) if same else None)
    return out
