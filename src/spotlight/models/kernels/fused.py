"""Fused operators of blocks and adapters (``model.kernels``), which the package spotlight-kernels has."""

from __future__ import annotations

import logging

import torch
from torch import nn

from spotlight.models import peft_layers
from spotlight_files.model_errors import ModelError

log = logging.getLogger(__name__)


def missing(device: torch.device) -> str | None:
    """Why fused operators cannot run on ``device``; None if they can."""
    try:
        from spotlight_kernels import launch, operators
    except ImportError as error:
        return f"{error.name or error} is missing (pip install triton)"
    if device.type != "cuda" and not launch.INTERPRETED:
        return f"they need a CUDA device, and this is {device.type}"
    try:
        operators.join_heads(
            [operators.HeadStream(torch.zeros(1, 1, 16, device=device))], 16, 0.0, rounded=True
        )
    except Exception as error:  # noqa: BLE001 - of Triton, or of the C compiler that it calls
        return f"Triton cannot make one run on this device: {error}"
    return None


def use_fused(module: nn.Module, device: torch.device, *, asked: bool) -> bool:
    """Fuse a transformer's blocks in place, before adapters are injected; those are for
    :func:`spotlight.models.peft_layers.fuse` then.

    Whatever cannot be fused keeps diffusers' operators, as a warning says.

    Args:
        device: where it will run; blocks may be elsewhere, or without memory.
        asked: the configuration names them, so a machine that cannot run them is an error.

    Returns:
        whether this machine can run fused operators.

    Raises:
        ModelError: asked for, and this machine lacks something.
    """
    if (why := missing(device)) is not None:
        if asked:
            raise ModelError(f"model.kernels is 'fused', and {why}: set it to reference, or leave it out")
        log.warning("diffusers' own operators are used, which are slower (model.kernels): %s", why)
        return False
    from spotlight_kernels.fuse import fuse

    found = fuse(module, device)
    blocks = [f"{count} {name}" for name, count in found.blocks.items()]
    log.info("fused operators: %s", ", ".join([*blocks, "layers with adapters"]))
    if asked and found.left and not found.blocks:
        why = "; ".join(f"{name}: {each}" for name, each in found.left.items())
        raise ModelError(f"model.kernels is 'fused', and no block is: {why}. Set it to reference")
    for name, why in found.left.items():
        log.warning("%s keeps diffusers' operators, which are slower (model.kernels): %s", name, why)
    return True


def is_fused(block: nn.Module) -> bool:
    """Whether a block's operators are fused."""
    return "forward" in vars(block)


def use_reference(module: nn.Module) -> None:
    """Undo :func:`use_fused`, adapters' layers included; no effect on a model that is not fused."""
    if not any(map(is_fused, module.modules())):
        return  # perhaps without the package
    from spotlight_kernels.fuse import restore

    peft_layers.restore(module)
    restore(module)
