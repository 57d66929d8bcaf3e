"""Compilation of a DiT's repeated blocks (``model.compile: regional``): one graph serves all blocks."""

from __future__ import annotations

import shutil

import torch
from torch import nn

from spotlight.models.experts import denoisers
from spotlight_files.model_errors import ModelError
from spotlight_kernels.real_rotary import real_rotary

GRAPHS_MAX = 64
"""Graphs of all compiled blocks of a process before torch gives up, says so, and runs others eagerly. Kinds
of blocks, slots, masks and whether there is a gradient each need their own; text lengths and batch
sizes above 1 do not.
"""


def compile_blocks(module: nn.Module, device: torch.device, backend: str = "inductor") -> None:
    """Compile the repeated blocks in place, at their first forward. Call it before sharding.

    Args:
        device: where they will run.
        backend: torch's name for what makes the kernels.

    Raises:
        ModelError: the model names no repeated blocks, or this machine has no compiler.
    """
    if backend == "inductor" and (why := missing(device)) is not None:
        raise ModelError(f"model.compile is 'regional', and {why}: install it, or set the key to none")
    torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, GRAPHS_MAX)
    for part in denoisers(module).values():
        repeated = getattr(part, "_repeated_blocks", None) or ()
        if not any(type(block).__name__ in repeated for block in part.modules()):
            raise ModelError(
                f"model.compile is 'regional', but {type(part).__name__} names no repeated blocks: set it to "
                "none"
            )
        part.compile_repeated_blocks(backend=real_rotary(backend), dynamic=True)  # type: ignore[operator]


def missing(device: torch.device) -> str | None:
    """What generating kernels for ``device`` lacks on this machine; None if nothing."""
    from torch.utils._triton import has_triton

    if device.type == "cuda" and not has_triton():
        return "Triton is missing (pip install triton)"
    if shutil.which("g++") is None and shutil.which("clang++") is None:
        return "there is no C++ compiler (apt-get install g++)"
    return None
