"""Linear layers in few bits: what they hold, what they compute, and what they keep."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from spotlight.models.shared.quantised import held, hold, is_held
from spotlight_files.model_errors import ModelError
from spotlight_kernels.quantised import BYTES
from spotlight_kernels.quantised.int8 import Int8Linear
from spotlight_kernels.quantised.linear import QuantisedLinear
from spotlight_kernels.quantised.nf4 import Nf4Linear

KINDS: dict[str, type[QuantisedLinear]] = {"int8": Int8Linear, "nf4": Nf4Linear}
GAUSSIAN = {"int8": 0.0085, "nf4": 0.0920}
"""Relative errors of Gaussian weights, in rows of 3072: published for NF4 are 9.2 %."""


def layer(kind: str, weight: Tensor, bias: Tensor | None = None) -> QuantisedLinear:
    plain = nn.Linear(weight.shape[1], weight.shape[0], bias=bias is not None, dtype=weight.dtype)
    if bias is not None:
        plain.bias = nn.Parameter(bias, requires_grad=False)
    made = KINDS[kind](plain)
    made.hold(weight)
    return made


@pytest.mark.parametrize("kind", KINDS)
def test_the_error_of_gaussian_weights_is_the_known_one(kind: str) -> None:
    torch.manual_seed(0)
    weight = torch.randn(256, 3072) * 0.02
    error = (layer(kind, weight).whole(torch.float32) - weight).norm() / weight.norm()
    assert float(error) == pytest.approx(GAUSSIAN[kind], rel=0.02)


@given(st.sampled_from(sorted(KINDS)), st.integers(1, 40), st.integers(1, 70), st.integers(0, 9))
@settings(max_examples=40, deadline=None)
def test_any_shape_is_held_in_the_planned_bytes(kind: str, outputs: int, inputs: int, seed: int) -> None:
    weight = torch.randn(outputs, inputs, generator=torch.Generator().manual_seed(seed))
    made = layer(kind, weight)
    assert sum(p.numel() * p.element_size() for p in made.parameters()) == BYTES[kind](outputs, inputs)
    whole = made.whole(torch.float32)
    assert whole.shape == weight.shape
    largest = float(weight.abs().max())
    # Half of the widest gap between levels, and scales within 1 % of the largest.
    assert float((whole - weight).abs().max()) <= {"int8": 0.5 / 127, "nf4": 0.17}[kind] * largest


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_held_is_held_again_to_the_bit(kind: str) -> None:
    torch.manual_seed(0)
    weight = torch.randn(64, 128)
    one, two = layer(kind, weight), layer(kind, weight.clone())
    assert all(map(torch.equal, one.parameters(), two.parameters()))
    for dtype in (torch.bfloat16, torch.float32):
        assert torch.equal(one.whole(dtype), one.whole(torch.float32).to(dtype))


@pytest.mark.parametrize("kind", KINDS)
def test_zeros_stay_zeros_and_what_is_not_finite_shows(kind: str) -> None:
    zeros = torch.zeros(4, 64)
    assert torch.equal(layer(kind, zeros).whole(torch.float32), zeros)
    zeros[1] = float("nan")
    assert bool(layer(kind, zeros).whole(torch.float32)[1].isnan().all())


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("autocast", [False, True])
def test_computes_what_a_plain_layer_does_with_the_same_weight(kind: str, bias: bool, autocast: bool) -> None:
    torch.manual_seed(0)
    made = layer(kind, torch.randn(24, 40), torch.randn(24) if bias else None)
    weight = made.whole(torch.float32)

    def outcome(function: object) -> list[Tensor]:
        x = torch.linspace(-1, 1, 3 * 5 * 40).view(3, 5, 40).requires_grad_()
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            y = function(x)  # type: ignore[operator]
        (gradient,) = torch.autograd.grad(y, x, y.detach().cos())
        return [y.detach(), gradient]

    found, wanted = outcome(made), outcome(lambda x: F.linear(x, weight, made.bias))
    assert all(map(torch.equal, found, wanted))
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        quiet = made(torch.linspace(-1, 1, 3 * 5 * 40).view(3, 5, 40))
    assert torch.equal(quiet, found[0])


@pytest.mark.parametrize("kind", KINDS)
def test_a_whole_weight_is_not_kept_for_the_backward(kind: str) -> None:
    made = layer(kind, torch.randn(32, 32))
    kept: list[Tensor] = []

    def note(tensor: Tensor) -> Tensor:
        kept.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        y = made(torch.randn(4, 32, requires_grad=True))
        plain = F.linear(torch.randn(4, 32, requires_grad=True), made.whole(torch.float32))
    assert [tuple(tensor.shape) for tensor in kept] == [(32, 32)]  # the plain one's
    assert y.requires_grad
    assert plain.requires_grad


def test_layers_of_blocks_are_held_and_no_others() -> None:
    names = {
        "transformer_blocks.0.attn.to_q": True,
        "layers.11.adaLN_modulation.0": True,
        "transformer_2.blocks.3.ffn.net.0.proj": True,
        "cap_embedder.1": False,
        "condition_embedder.image_embedder.ff.net.0.proj": False,
        "context_embedder.token_refiner.refiner_blocks.0.attn.to_q": False,
        "proj_out": False,
    }
    assert {name: is_held(name) for name in names} == names


def test_only_plain_linear_layers_are_replaced() -> None:
    class Own(nn.Linear):
        pass

    model = nn.Module()
    model.blocks = nn.ModuleList([nn.ModuleDict({"a": nn.Linear(4, 4), "b": Own(4, 4)})])
    model.last = nn.Linear(4, 4)
    hold(model, "none")
    assert not held(model)
    hold(model, "int8")
    assert list(held(model)) == ["blocks.0.a"]


def test_a_model_without_lists_of_blocks_is_refused_rather_than_left_whole() -> None:
    model = nn.Module()
    model.inner = nn.ModuleDict({"blocks": nn.ModuleList([nn.ModuleDict({"a": nn.Linear(4, 4)})])})
    with pytest.raises(
        ModelError, match=r"model.quantize is 'nf4', and no linear layer .* blocks.0.attn.to_q"
    ):
        hold(model, "nf4")
