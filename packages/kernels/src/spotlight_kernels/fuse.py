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

from spotlight_kernels.blocks import Kind, first
from spotlight_kernels.feed_forward import feed_forward, fused_forward, joined_feed_forward, swiglu
from spotlight_kernels.quantised.linear import QuantisedLinear

BLOCKS: Mapping[str, str] = {
    "Flux2SingleTransformerBlock": "flux2_blocks.SINGLE",
    "Flux2TransformerBlock": "flux2_blocks.DOUBLE",
    "FluxSingleTransformerBlock": "flux_blocks.SINGLE",
    "FluxTransformerBlock": "flux_blocks.DOUBLE",
    "HunyuanVideo15TransformerBlock": "hunyuan_video_blocks.DOUBLE_15",
    "HunyuanVideoSingleTransformerBlock": "hunyuan_video_blocks.SINGLE",
    "HunyuanVideoTransformerBlock": "hunyuan_video_blocks.DOUBLE",
    "JointTransformerBlock": "sd3_blocks.JOINT",
    "Krea2TextFusionBlock": "krea2_blocks.FUSION",
    "Krea2TransformerBlock": "krea2_blocks.JOINT",
    "QwenImage21TransformerBlock": "qwen_image_21_blocks.JOINT",
    "QwenImageTransformerBlock": "qwen_image_blocks.DOUBLE",
    "WanTransformerBlock": "wan_blocks.CROSS",
    "ZImageTransformerBlock": "z_image_blocks.JOINT",
}
"""Classes of blocks, and where this package says how to fuse them: a module, and a :class:`Kind` in it."""
STREAMS = ("hidden_states", "encoder_hidden_states", "x")
"""Arguments of blocks whose gradients are compared."""
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
        kind = _kind(name)
        variants = {str(block): block for block in blocks}.values() if compare else ()
        why = first(*(_trouble(block, kind) for block in blocks)) or first(
            *(_difference(block, kind, device) for block in variants)
        )
        if why is not None:
            left[name] = why
            continue
        for block in blocks:
            _put(block, kind)
        done[name] = len(blocks)
    return Fused(done, left)


def restore(transformer: nn.Module) -> None:
    """Undo :func:`fuse`."""
    forwards = (feed_forward, joined_feed_forward, swiglu)
    for part in transformer.modules():
        name = next((each.__name__ for each in type(part).__mro__ if each.__name__ in BLOCKS), None)
        own = getattr(vars(part).get("forward"), "__func__", None)
        if name is not None and own is (kind := _kind(name)).forward:
            del part.forward
            _exchange(part, {new: old for old, new in kind.processors.items()})
            for mlp in part.modules():
                if getattr(vars(mlp).get("forward"), "__func__", None) in forwards:
                    del mlp.forward


def _kind(name: str) -> Kind:
    module, _, kind = BLOCKS[name].partition(".")
    found: Kind = getattr(import_module(f"spotlight_kernels.{module}"), kind)
    return found


def _trouble(block: nn.Module, kind: Kind) -> str | None:
    if _dtype(block) not in TOLERANCE:
        return f"its weights are of type {_dtype(block)}"
    for part in block.modules():
        processor = getattr(part, "processor", None)
        if processor is not None and type(processor) not in kind.processors:
            return f"its attention is computed by {type(processor).__name__}"
    return kind.trouble(block)


def _difference(block: nn.Module, kind: Kind, device: torch.device) -> str | None:
    try:
        far = distance(block, kind, device)
    except Exception as error:  # noqa: BLE001 - whatever a compiler, driver or card lacks, diffusers' run
        return f"fused, it cannot run on this device ({type(error).__name__}: {error})"
    if far <= TOLERANCE[_dtype(block)]:
        return None
    return f"fused, it differs from diffusers' by {far:.1e} on this device"


def _put(block: Any, kind: Kind) -> None:
    block.forward = MethodType(kind.forward, block)
    _exchange(block, kind.processors)
    for mlp in block.modules():
        if (forward := fused_forward(mlp)) is not None:
            mlp.forward = MethodType(forward, mlp)


def _exchange(block: nn.Module, classes: Mapping[type, type]) -> None:
    """Let processors compute as another class does; they keep their attention's implementation and split."""
    for part in block.modules():
        processor = getattr(part, "processor", None)
        processor_class = classes.get(type(processor))
        if processor_class is not None:
            processor.__class__ = processor_class


@torch.random.fork_rng(devices=[])
def distance(
    block: nn.Module, kind: Kind, device: torch.device, image_tokens: int = 70, text_tokens: int = 5
) -> float:
    """The larger of the relative differences of outputs and of gradients, on random weights and inputs."""
    own = _unquantised(block).to_empty(device=device).requires_grad_(False)
    generator = torch.Generator(device).manual_seed(0)
    for parameter in own.parameters():
        parameter.normal_(0, 0.5 * parameter.shape[-1] ** -0.5, generator=generator)

    def new(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, device=device).to(_dtype(block))

    arguments = kind.example(own, new, image_tokens, text_tokens)
    wanted = _outcome(own, arguments)
    _put(own, kind)
    found = _outcome(own, arguments)
    return max(_far(f, w) for f, w in zip(found, wanted, strict=True))


def _unquantised(block: nn.Module) -> nn.Module:
    """A copy, whose linear layers are plain and have no values where they are quantised."""
    instead = {id(part): part.plain() for part in block.modules() if isinstance(part, QuantisedLinear)}
    return copy.deepcopy(block, instead)


def _outcome(block: nn.Module, arguments: Mapping[str, Any]) -> list[Tensor]:
    leaves = {
        name: each.detach().requires_grad_() if name in STREAMS else each for name, each in arguments.items()
    }
    with torch.enable_grad():
        result = block(**leaves)
        outputs = [each for each in (result if isinstance(result, tuple) else (result,)) if each is not None]
        slopes = [torch.cos(torch.arange(each.numel(), device=each.device)).view_as(each) for each in outputs]
        gradients = torch.autograd.grad(
            outputs,
            [leaf for name, leaf in leaves.items() if name in STREAMS],
            [slope.to(each.dtype) for slope, each in zip(slopes, outputs, strict=True)],
        )
    return [each.detach() for each in (*outputs, *gradients)]


def _far(found: Tensor, wanted: Tensor) -> float:
    far = (found.float() - wanted.float()).norm() / wanted.float().norm()
    return float(torch.nan_to_num(far.detach(), nan=torch.inf))


def _dtype(block: nn.Module) -> torch.dtype:
    """Of what its layers compute in; tables of modulation may be float32 beside them."""
    layer = next(part for part in block.modules() if isinstance(part, nn.Linear))
    return layer.dtype if isinstance(layer, QuantisedLinear) else layer.weight.dtype
