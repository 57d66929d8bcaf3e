"""Packed weights in fused models: the kernel that unpacks them, and adapters within their product."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from fused_world import Predicting, far
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from spotlight.models.kernels.fused import is_fused
from spotlight.models.shared.quantised import held
from spotlight.registry import FAMILIES
from spotlight_kernels.fuse import BLOCKS, _kind, distance
from spotlight_kernels.quantised import nf4
from spotlight_kernels.quantised.nf4 import Nf4Linear, dequantise_reference
from spotlight_kernels.quantised.nf4_operator import dequantise


@given(st.integers(1, 60), st.integers(1, 60), st.sampled_from([torch.float32, torch.bfloat16]))
@settings(max_examples=15, deadline=None)
def test_the_kernel_makes_the_bits_of_the_reference(outputs: int, inputs: int, dtype: torch.dtype) -> None:
    layer = Nf4Linear(nn.Linear(inputs, outputs))
    layer.hold(torch.randn(outputs, inputs, generator=torch.Generator().manual_seed(inputs)))
    scales = torch.rand(-(-outputs * inputs // 64), generator=torch.Generator().manual_seed(outputs))
    given_ = layer.weight, scales, nf4._levels(torch.device("cpu")), (outputs, inputs)
    wanted = dequantise_reference(*given_, dtype)
    found = dequantise(*given_, dtype)
    if dtype == torch.float32:
        assert torch.equal(found, wanted)
    else:  # the interpreter rounds otherwise
        assert torch.allclose(found.float(), wanted.float(), rtol=2**-7)
    assert dequantise(*(each.to("meta") for each in given_[:3]), given_[3], dtype).shape == found.shape


@pytest.mark.parametrize(("name", "kind"), [("qwen-image", "nf4"), ("flux2-klein", "int8")])
def test_a_quantised_model_computes_fused_what_it_does_otherwise(
    name: str, kind: str, tmp_path: Path
) -> None:
    plain = Predicting(name, tmp_path, quantize=kind)
    fused = Predicting(name, tmp_path, quantize=kind, fused=True)
    assert held(fused.model)
    assert any(map(is_fused, fused.model.modules()))
    wanted, found = plain.gradients(), fused.gradients()
    assert len(found) == len(wanted)
    assert max(map(far, found, wanted)) < 1e-5
    with torch.no_grad():
        assert torch.equal(fused(), found[0])


def test_blocks_are_compared_with_plain_layers_in_their_place(tmp_path: Path) -> None:
    FAMILIES.load("flux2-klein").tiny(tmp_path / "pipeline", seed=0)
    family = FAMILIES.load("flux2-klein").load(
        tmp_path / "pipeline", device="cpu", dtype=torch.float32, embeddings_cache=tmp_path, quantize="int8"
    )
    block = next(part for part in family.transformer.modules() if type(part).__name__ in BLOCKS)
    packed = [parameter.clone() for parameter in block.parameters()]
    assert distance(block, _kind(type(block).__name__), torch.device("cpu"), 2, 2) < 1e-5
    assert held(block), "only the copy has plain layers"
    assert all(map(torch.equal, block.parameters(), packed))
