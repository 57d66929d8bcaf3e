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
    "QwenImageTransformerBlock": "qwen_image_blocks",
}
"""Classes of blocks, and the module of this package that fuses them."""
TOLERANCE: Mapping[torch.dtype, float] = {torch.float32: 1e-4, torch.bfloat16: 3e-2}
"""Largest relative difference of outputs and gradients on a device; above rounding, below an error."""


@dataclass(frozen=True, slots=True)
class Fused:
    """What became of a transformer's blocks.

    Attributes:
        blocks: how many of each class were fused.
        left: classes of blocks that keep diffusers' operators, and why.
    """

    blocks: Mapping[str, int]
    left: Mapping[str, str]


def fuse(transformer: nn.Module, device: torch.device, *, compare: bool = True) -> Fused:
    """Fuse all blocks that can be, in place, if a copy with random weights computes the same on ``device``.

    Args:
        transformer: its weights may be on another device, or without memory; comparing wants one without
            adapters.
        compare: or else take for granted that they agree.
    """
    kinds: dict[str, list[nn.Module]] = {}
    for part in transformer.modules():
        if type(part).__name__ in BLOCKS:
            kinds.setdefault(type(part).__name__, []).append(part)
    done, left = dict[str, int](), dict[str, str]()
    for name, blocks in kinds.items():
        module = import_module(f"spotlight_kernels.{BLOCKS[name]}")
        why = next((why for block in blocks if (why := module.trouble(block)) is not None), None)
        if why is None and compare:
            far = distance(blocks[0], module, device)
            if far > TOLERANCE[_dtype(blocks[0])]:
                why = f"fused, it differs from diffusers' by {far:.1e} on this device"
        if why is not None:
            left[name] = why
            continue
        for block in blocks:
            _put(block, module)
        done[name] = len(blocks)
    return Fused(done, left)


def restore(transformer: nn.Module) -> None:
    """Undo :func:`fuse`."""
    for part in transformer.modules():
        own = vars(part).get("forward")
        module = _module_of(part)
        if module is not None and getattr(own, "__func__", None) is module.forward:
            del part.forward
            _exchange(part, *reversed(module.PROCESSORS))


def _module_of(block: nn.Module) -> Any:
    name = next((kind.__name__ for kind in type(block).__mro__ if kind.__name__ in BLOCKS), None)
    return None if name is None else import_module(f"spotlight_kernels.{BLOCKS[name]}")


def _put(block: Any, module: Any) -> None:
    block.forward = MethodType(module.forward, block)
    _exchange(block, *module.PROCESSORS)


def _exchange(block: nn.Module, old: type, new: type) -> None:
    """Let processors compute as another class does; they keep their attention's implementation and split."""
    for part in block.modules():
        processor = getattr(part, "processor", None)
        if type(processor) is old:
            processor.__class__ = new


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
