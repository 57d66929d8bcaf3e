"""Layers with adapters in one function, against peft's order of operations."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from spotlight_kernels.lora import AdaptedLinear, Again, lora_linears, project

INPUTS = 12


def layer(outputs: int, rank: int, bias: bool, scale: float, dtype: torch.dtype) -> AdaptedLinear:
    shapes = ((outputs, INPUTS), (outputs,), (rank, INPUTS), (outputs, rank))
    weight, offset, a, b = (torch.randn(shape, dtype=dtype).requires_grad_() for shape in shapes)
    return AdaptedLinear(weight, offset if bias else None, a, b, scale)


def apart(x: Tensor, layers: Sequence[AdaptedLinear]) -> list[Tensor]:
    return [F.linear(x, e.weight, e.bias) + F.linear(F.linear(x, e.a), e.b) * e.scale for e in layers]


def close(found: Sequence[Tensor | None], wanted: Sequence[Tensor | None]) -> bool:
    pairs = [(a, b) for a, b in zip(found, wanted, strict=True) if a is not None or b is not None]
    return all(a is not None and b is not None and torch.allclose(a, b, atol=1e-10) for a, b in pairs)


@given(
    st.lists(
        st.tuples(st.integers(1, 9), st.integers(1, 4), st.booleans(), st.sampled_from([1.0, 0.5, 2.0])),
        min_size=1,
        max_size=3,
    ),
    st.integers(0, 7),
    st.booleans(),
)
@settings(max_examples=25, deadline=None)
def test_outputs_and_gradients_are_those_of_separate_operators(
    shapes: list[tuple[int, int, bool, float]], used: int, part: bool
) -> None:
    torch.manual_seed(0)
    layers = [layer(*shape, torch.float64) for shape in shapes]
    whole = torch.randn(2, 5, INPUTS, dtype=torch.float64, requires_grad=True)
    x = whole[:, 1:4] if part else whole  # as of a joint sequence
    inputs = [whole, *(tensor for each in layers for tensor in each[:4] if tensor is not None)]
    outcomes = []
    for outputs in (lora_linears(x, layers), apart(x, layers)):
        some = [y for i, y in enumerate(outputs) if (used >> i) % 2] or list(outputs)
        slopes = [torch.cos(y.detach()) for y in some]
        gradients = torch.autograd.grad(some, inputs, slopes, allow_unused=True, retain_graph=True)
        outcomes.append([*outputs, *gradients])
    assert close(*outcomes)
    with torch.no_grad():
        quiet = lora_linears(x, layers)
    assert all(torch.equal(a, b) for a, b in zip(quiet, outcomes[0], strict=False))


def test_what_is_computed_again_is_not_kept() -> None:
    torch.manual_seed(0)
    layers, before = [layer(3, 2, True, 2.0, torch.float32)], torch.randn(2, 5, INPUTS, requires_grad=True)
    kept: set[int] = set()

    def note(tensor: Tensor) -> Tensor:
        kept.add(tensor.data_ptr())
        return tensor

    x = F.gelu(before)
    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        (y,) = lora_linears(x, layers, Again(F.gelu, (before,)))
    assert before.data_ptr() in kept
    assert x.data_ptr() not in kept
    tensors = [before, *(t for t in layers[0][:4] if t is not None)]
    again = torch.autograd.grad(y.sum(), tensors)
    (y,) = lora_linears(F.gelu(before), layers)
    assert all(torch.equal(a, b) for a, b in zip(again, torch.autograd.grad(y.sum(), tensors), strict=True))


@pytest.mark.parametrize("adapted", [True, False])
def test_layers_are_applied_together_only_if_all_are_adapted(adapted: bool) -> None:
    first, second = nn.Linear(INPUTS, 3), nn.Linear(INPUTS, 4)
    parts = layer(3, 2, True, 1.0, torch.float32)
    first.adapted = lambda x: parts
    if adapted:
        second.adapted = lambda x: parts
    x = torch.randn(2, 5, INPUTS)
    found = project(x, [first, second])
    wanted = lora_linears(x, [parts, parts]) if adapted else (first(x), second(x))
    assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))
