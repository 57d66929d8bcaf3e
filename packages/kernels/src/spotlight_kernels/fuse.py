"""Put fused operators into the blocks of a transformer of diffusers, and see that they compute the same."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import import_module
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn

BLOCKS: Mapping[str, str] = {
    "QwenImageTransformerBlock": "qwen_image",
}
"""Classes of blocks, and the module of this package that fuses them."""
TOLERANCE: Mapping[torch.dtype, float] = {torch.float32: 1e-4, torch.bfloat16: 3e-2}
"""Largest relative difference of outputs and gradients on a device; far above rounding, far below an error."""


@dataclass(frozen=True, slots=True)
class Fused:
    """What became of a transformer's blocks.

    Attributes:
        blocks: how many of each class were fused.
        left: classes of blocks that keep diffusers' operators, and why.
    """

    blocks: Mapping[str, int]
    left: Mapping[str, str]


def fuse(transformer: nn.Module, device: torch.device) -> Fused:
    """Fuse all blocks that can be, in place, if a copy with random weights agrees with diffusers' on ``device``.

    Layers with adapters are compared as they are: fuse those first.
    """
    kinds: dict[str, list[nn.Module]] = {}
    for part in transformer.modules():
        if type(part).__name__ in BLOCKS:
            kinds.setdefault(type(part).__name__, []).append(part)
    done, left = dict[str, int](), dict[str, str]()
    for name, blocks in kinds.items():
        module = import_module(f"spotlight_kernels.{BLOCKS[name]}")
        why = next((why for block in blocks if (why := module.trouble(block)) is not None), None)
        if why is None and (far := distance(blocks[0], module, device)) > TOLERANCE[_dtype(blocks[0])]:
            why = f"they differ from diffusers' by {far:.1e} on this device"
        if why is not None:
            left[name] = why
            continue
        for block in blocks:
            _put(block, module)
        done[name] = len(blocks)
    return Fused(done, left)


def _put(block: Any, module: Any) -> None:
    block.forward = MethodType(module.forward, block)
    for part in block.modules():
        old = getattr(part, "processor", None)
        if type(old) is module.PROCESSOR:
            new = module.Processor()
            vars(new).update(vars(old))  # the attention's implementation, and how it is split
            part.set_processor(new)


@torch.random.fork_rng(devices=[])
def distance(block: nn.Module, module: Any, device: torch.device) -> float:
    """The larger of the relative differences of outputs and of gradients, on random weights and inputs."""
    own = copy.deepcopy(block).to_empty(device=device).requires_grad_(False)
    generator = torch.Generator(device).manual_seed(0)
    for parameter in own.parameters():
        parameter.normal_(0, 0.5 * parameter.shape[-1] ** -0.5, generator=generator)

    def new(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, device=device).to(_dtype(block))

    arguments, compared = module.example(own, new)
    wanted = _outcome(own, arguments, compared)
    _put(own, module)
    found = _outcome(own, arguments, compared)
    return max(_far(f, w) for f, w in zip(found, wanted, strict=True))


def _outcome(block: nn.Module, arguments: Mapping[str, Any], compared: tuple[int, ...]) -> list[Tensor]:
    leaves = {
        name: each.detach().requires_grad_() if name.endswith("hidden_states") else each
        for name, each in arguments.items()
    }
    inputs = [leaves[name] for name in leaves if name.endswith("hidden_states")]
    with torch.enable_grad():
        outputs = block(**leaves)
        outputs = [outputs[i] for i in compared] if isinstance(outputs, tuple) else [outputs]
        slopes = [torch.cos(torch.arange(each.numel(), device=each.device)).view_as(each) for each in outputs]
        gradients = torch.autograd.grad(
            outputs, inputs, [slope.to(each.dtype) for slope, each in zip(slopes, outputs, strict=True)]
        )
    return [each.detach() for each in (*outputs, *gradients)]


def _far(found: Tensor, wanted: Tensor) -> float:
    far = (found.float() - wanted.float()).norm() / wanted.float().norm()
    return float(torch.nan_to_num(far.detach(), nan=torch.inf))


def _dtype(block: nn.Module) -> torch.dtype:
    return next(block.parameters()).dtype
