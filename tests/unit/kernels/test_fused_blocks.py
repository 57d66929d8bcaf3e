"""Every class of blocks computes fused what it does otherwise, and says where it is not fused."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from types import MethodType
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from diffusers.models.attention_processor import Attention, AttnProcessor2_0
from diffusers.models.transformers.transformer_krea2 import Krea2RMSNorm, Krea2TransformerBlock
from diffusers.models.transformers.transformer_wan import WanTransformerBlock
from tests.unit.kernels.fused_cases import CASES, SIZE, WIDTH
from torch import Tensor, nn

from spotlight_kernels import fuse as fusing
from spotlight_kernels import operators
from spotlight_kernels.fuse import BLOCKS, fuse, restore
from spotlight_kernels.launch import Kernel
from spotlight_kernels.operators import HeadStream, Modulation, add_norm_reference, join_heads_reference

CPU = torch.device("cpu")


def made(name: str, kind: torch.dtype = torch.float32) -> tuple[nn.Module, dict[str, Any]]:
    """A block with random weights, and arguments."""
    generator = torch.Generator().manual_seed(1)
    block = CASES[name]()
    with torch.no_grad():
        for parameter in block.parameters():
            parameter.normal_(0, parameter.shape[-1] ** -0.5, generator=generator)
    block = block.to(kind)

    def new(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).to(kind)

    return block, fusing._kind(type(block).__name__).example(block, new, 2, 2)


def outputs(block: nn.Module, arguments: Mapping[str, Any]) -> list[Tensor]:
    found = block(**arguments)
    return [each for each in (found if isinstance(found, tuple) else (found,)) if each is not None]


def gradients(block: nn.Module, arguments: Mapping[str, Any]) -> dict[str, Tensor]:
    """Of all weights and of all arguments."""
    leaves = dict[str, Tensor](block.named_parameters())
    for name, each in arguments.items():
        if isinstance(each, Tensor) and each.is_floating_point():
            leaves[name] = each.requires_grad_()
    loss = sum(
        (each * torch.arange(each.numel()).view_as(each).cos()).sum() for each in outputs(block, arguments)
    )
    found = torch.autograd.grad(loss, list(leaves.values()), allow_unused=True)  # type: ignore[arg-type]
    return {name: each for name, each in zip(leaves, found, strict=True) if each is not None}


def far(found: Tensor, wanted: Tensor) -> float:
    return float((found - wanted).detach().norm() / wanted.detach().norm().clamp(min=1e-4))


@pytest.mark.parametrize("name", CASES)
def test_outputs_and_all_gradients_are_those_of_diffusers(name: str) -> None:
    block, arguments = made(name)
    wanted, slopes = outputs(block, arguments), gradients(block, arguments)
    assert fuse(block, CPU, compare=False).left == {}
    assert max(map(far, outputs(block, arguments), wanted)) < 1e-5
    found = gradients(block, arguments)
    assert found.keys() == slopes.keys()
    assert {each for each, slope in slopes.items() if far(found[each], slope) > 1e-5} == set()
    restore(block)
    assert all(map(torch.equal, outputs(block, arguments), wanted))


@pytest.mark.parametrize("name", CASES)
def test_gradients_do_not_change_a_bit_of_the_outputs(name: str) -> None:
    block, arguments = made(name, torch.bfloat16)
    wanted = outputs(block, arguments)
    fuse(block, CPU, compare=False)
    found = outputs(block, arguments)
    assert max(map(far, found, wanted)) < 3e-2
    with torch.no_grad():
        assert all(map(torch.equal, found, outputs(block, arguments)))


class Reference:
    """Operators by torch's own: the interpreter's bfloat16 is not rounded as a GPU's is."""

    @staticmethod
    def join_heads(*flat: Any) -> Tensor:
        *parts, size, eps, offset, rounded = flat
        streams = [HeadStream(x, w, c if c is None else (c, s)) for x, w, c, s in zip(*parts, strict=True)]
        return join_heads_reference(streams, size, eps, offset=offset, rounded=rounded)

    @staticmethod
    def add_norm(x: Tensor, y: Tensor | None, *flat: Any) -> tuple[Tensor, Tensor | None]:
        *parts, eps, offset, rounded, norm = flat
        return add_norm_reference(x, y, Modulation(*parts), eps, offset=offset, rounded=rounded, norm=norm)

    @staticmethod
    def gated(gate: Tensor, value: Tensor, silu: bool) -> Tensor:
        return (F.silu(gate) if silu else torch.sigmoid(gate)) * value


@pytest.mark.parametrize("name", ["HunyuanVideo 1.5", "Krea 2", "Krea 2, text", "Z-Image"])
@torch.no_grad()
def test_bfloat16_is_rounded_where_diffusers_rounds(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(operators, "registered", Reference)
    block, arguments = made(name, torch.bfloat16)
    for part in block.modules():
        if isinstance(part, Krea2RMSNorm):  # these stay float32 in a model
            part.float()
    wanted = outputs(block, arguments)
    fuse(block, CPU, compare=False)
    assert all(map(torch.equal, outputs(block, arguments), wanted))


def test_every_class_is_tested() -> None:
    assert {type(make()).__name__ for make in CASES.values()} == set(BLOCKS)


@contextmanager
def differing(name: str, scale: float, patch: pytest.MonkeyPatch) -> Iterator[None]:
    """A kind whose forward computes something else."""
    module, _, kind = BLOCKS[name].partition(".")
    whole = f"spotlight_kernels.{module}.{kind}"
    right = fusing._kind(name)

    def wrong(self: Any, **arguments: Any) -> Any:
        text, image = MethodType(right.forward, self)(**arguments)
        return text, scale * image

    with patch.context() as context:
        context.setattr(whole, replace(right, forward=wrong))
        yield


def test_a_class_that_differs_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fusing, "distance", partial(fusing.distance, image_tokens=2, text_tokens=1))
    double, single = made("FLUX.1")[0], made("FLUX.1, single")[0]
    model = nn.ModuleList([double, single])
    with differing("FluxTransformerBlock", 1.01, monkeypatch):
        found = fuse(model, CPU)
    assert found.blocks == {"FluxSingleTransformerBlock": 1}
    assert list(found.left) == ["FluxTransformerBlock"]
    assert "differs from diffusers'" in found.left["FluxTransformerBlock"]
    assert "forward" not in vars(double)
    assert "forward" in vars(single)


def without_weights(block: Any) -> None:
    block.attn.norm_q = nn.RMSNorm(SIZE, elementwise_affine=False)


def other_eps(block: Any) -> None:
    block.attn.norm_k.eps = 1e-3


def joined(block: Any) -> None:
    block.attn.fuse_projections()


def other_attention(block: Any) -> None:
    block.extra = Attention(WIDTH, processor=AttnProcessor2_0())


def affine(block: Any) -> None:
    block.norm2 = nn.LayerNorm(WIDTH)


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (without_weights, "no RMSNorm with weights alone"),
        (other_eps, "norms of several kinds"),
        (joined, "its projections are joined"),
        (other_attention, "computed by AttnProcessor2_0"),
        (affine, "no LayerNorm without weights"),
        (nn.Module.half, "torch.float16"),
    ],
)
def test_a_block_that_cannot_be_fused_says_why(change: Callable[[nn.Module], object], why: str) -> None:
    block, _ = made("FLUX.1")
    change(block)
    found = fuse(block, CPU, compare=False)
    assert why in found.left["FluxTransformerBlock"]
    assert "forward" not in vars(block)


@pytest.mark.parametrize(
    "block", [WanTransformerBlock(24, 24, 2), Krea2TransformerBlock(24, 24, 2, 1, 1e-5)], ids=["wan", "krea"]
)
def test_heads_of_odd_width_are_left_alone(block: nn.Module) -> None:
    (why,) = fuse(block, CPU, compare=False).left.values()
    assert "12 wide, no power of two" in why


@pytest.mark.parametrize("name", ["Krea 2", "Krea 2, text"])
def test_norms_of_another_class_than_krea_2s_are_left_alone(name: str) -> None:
    block: Any = CASES[name]()
    block.attn.norm_k = nn.RMSNorm(SIZE)
    (why,) = fuse(block, CPU, compare=False).left.values()
    assert why == "its norms are not all of the class Krea2RMSNorm"


def by_token(name: str, arguments: dict[str, Any]) -> dict[str, Any]:
    tokens = arguments.get("x", arguments.get("hidden_states")).shape[1]
    if name == "Wan":
        return {"temb": torch.randn(2, tokens, 6, WIDTH)}
    if name == "Krea 2":
        return {"temb": arguments["temb"] + torch.randn(2, tokens, 1)}
    if name == "Z-Image":
        clean = torch.randn_like(arguments["adaln_input"])
        mask = torch.arange(tokens).expand(2, -1) % 2
        return {"noise_mask": mask, "adaln_noisy": arguments["adaln_input"], "adaln_clean": clean}
    return {"temb_mod_img": torch.randn(2, tokens, 6 * WIDTH)}


@pytest.mark.parametrize("name", ["Krea 2", "Wan", "Z-Image", "FLUX.2"])
def test_modulation_by_token_is_left_to_diffusers(name: str) -> None:
    block, arguments = made(name)
    arguments |= by_token(name, arguments)
    wanted = outputs(block, arguments)
    fuse(block, CPU, compare=False)
    assert max(map(far, outputs(block, arguments), wanted)) < 1e-5


def test_a_copy_uses_its_own_weights() -> None:
    block, arguments = made("FLUX.1, single")
    fuse(block, CPU, compare=False)
    before = outputs(block, arguments)
    other = copy.deepcopy(block)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.zero_()
    assert all(map(torch.equal, outputs(block, arguments), before))
    assert torch.equal(outputs(other, arguments)[1], arguments["hidden_states"]), "nothing is added"


def test_processors_keep_what_they_were_told() -> None:
    block, _ = made("FLUX.1")
    processor: Any = block.attn.processor  # type: ignore[union-attr]
    processor._attention_backend = "native"
    fuse(block, CPU, compare=False)
    assert (block.attn.processor, processor._attention_backend) == (processor, "native")  # type: ignore[union-attr]


@pytest.mark.slow
def test_tables_of_modulation_may_be_float32() -> None:
    """As Wan's are where its layers are bfloat16."""
    block = CASES["Wan"]().to(torch.bfloat16)
    block.scale_shift_table = nn.Parameter(block.scale_shift_table.float())
    found = fuse(nn.Sequential(block), CPU)
    assert found.blocks == {"WanTransformerBlock": 1}


def test_a_device_that_cannot_run_them_keeps_those_of_diffusers(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> None:
        raise RuntimeError("Failed to find C compiler")

    monkeypatch.setattr(Kernel, "launch", fail)
    block = CASES["Qwen-Image"]()
    found = fuse(nn.Sequential(block), CPU)
    assert "Failed to find C compiler" in found.left["QwenImageTransformerBlock"]
    assert "forward" not in vars(block)
