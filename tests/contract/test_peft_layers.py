"""What `models/peft_layers.py` assumes of peft's fields and names; if they move, fix it there."""

from __future__ import annotations

import pytest
import torch
from peft import get_peft_model_state_dict
from peft.tuners.lora import LoraLayer
from torch import nn

from spotlight.models import peft_layers
from spotlight.models.family import ModelError
from spotlight.models.peft_layers import LoraSpec
from spotlight.training.device_memory import measure_peak


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.to_q = nn.Linear(6, 6)
        self.to_out = nn.ModuleList([nn.Linear(6, 6), nn.Dropout(0.0)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.to_out[0](self.to_q(x).tanh())


SPEC = LoraSpec(rank=2, alpha=3.0, targets=("to_q", "to_out.0"))


@pytest.fixture
def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.ModuleDict({"a": Block(), "b": Block()})


def randomise(layers: dict[str, LoraLayer], adapter: str, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for parameter in peft_layers.adapter_parameters(layers, adapter).values():
        parameter.data = torch.randn(parameter.shape, generator=generator)


def test_activate_does_what_pefts_own_switches_do(model: nn.Module) -> None:
    layers = peft_layers.inject(model, SPEC, ["one", "two"])
    randomise(layers, "one", 1)
    randomise(layers, "two", 2)
    x = torch.randn(3, 6, generator=torch.Generator().manual_seed(0))
    for adapter in ("one", "two", None):
        peft_layers.activate(layers, adapter)
        ours = model["a"](x)
        for layer in layers.values():
            layer.enable_adapters(adapter is not None)
            if adapter is not None:
                layer.set_adapter(adapter)
        assert torch.equal(model["a"](x), ours), adapter
        assert all(layer.active_adapters == [adapter] for layer in layers.values() if adapter)


def test_activate_leaves_requires_grad_alone(model: nn.Module) -> None:
    layers = peft_layers.inject(model, SPEC, ["one", "two"])
    flags = {name: parameter.requires_grad for name, parameter in model.named_parameters()}
    for adapter in ("two", None, "one"):
        peft_layers.activate(layers, adapter)
        assert {n: p.requires_grad for n, p in model.named_parameters()} == flags


def test_names_are_those_of_pefts_state_dict(model: nn.Module) -> None:
    layers = peft_layers.inject(model, SPEC, ["one"])
    theirs = get_peft_model_state_dict(model, adapter_name="one")
    assert set(theirs) == set(peft_layers.adapter_parameters(layers, "one"))


def test_base_names_are_the_original_ones(model: nn.Module) -> None:
    before = {name: parameter.clone() for name, parameter in model.named_parameters()}
    peft_layers.inject(model, SPEC, ["one"])
    after = peft_layers.without_adapters(model.named_parameters())
    assert list(after) == list(before)
    assert all(torch.equal(after[name], before[name]) for name in before)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_adapters_start_as_the_identity_and_are_float32(model: nn.Module, dtype: torch.dtype) -> None:
    model.to(dtype)
    x = torch.randn(3, 6, generator=torch.Generator().manual_seed(0), dtype=dtype)
    before = model["b"](x)
    layers = peft_layers.inject(model, SPEC, ["one"])
    assert {p.dtype for p in peft_layers.adapter_parameters(layers, "one").values()} == {torch.float32}
    out = model["b"](x)
    assert out.dtype == dtype
    assert torch.equal(out, before)


def test_targets_that_do_not_fit_are_refused(model: nn.Module) -> None:
    for targets, message in (
        (("to_q", "to_qq"), r"targets: 'to_qq' matches no module of ModuleDict; nearest .*: to_q"),
        (("o_q",), r"'o_q' matches no module"),  # not the end of a name's component
        (("a",), r"'a' matches 'a', a Block; expected a linear layer, e\.g\. to_out\.0, to_q"),
        (("to_out.1",), r"'to_out\.1' matches 'a\.to_out\.1', a Dropout; expected a linear layer$"),
        ((), r"^targets are empty"),
    ):
        with pytest.raises(ModelError, match=message):
            peft_layers.inject(model, LoraSpec(2, 2.0, targets), ["one"])
    assert not any(isinstance(module, LoraLayer) for module in model.modules())


def test_targets_name_layers_by_their_blocks(model: nn.Module) -> None:
    whole = nn.ModuleDict({"blocks": model, "to_q": nn.Linear(6, 6), "b": Block()})
    spec = LoraSpec(2, 2.0, ("blocks.*.to_q", "blocks.b.to_out.0"))
    assert [*peft_layers.inject(whole, spec, ["one"])] == [
        "blocks.a.to_q",
        "blocks.b.to_q",
        "blocks.b.to_out.0",
    ]
    with pytest.raises(ModelError, match=r"'\*\.\*\.\*\.to_q' matches no module"):
        peft_layers.check_targets(whole, ["*.*.*.to_q"])


def test_rank_and_alpha_out_of_range_are_refused(model: nn.Module) -> None:
    with pytest.raises(ModelError, match="LoRA rank is 0"):
        peft_layers.inject(model, LoraSpec(0, 2.0, ("to_q",)), ["one"])
    with pytest.raises(ModelError, match="LoRA alpha is -1"):
        peft_layers.inject(model, LoraSpec(2, -1.0, ("to_q",)), ["one"])
    peft_layers.inject(model, SPEC, ["one"])
    with pytest.raises(ModelError, match="carries LoRA adapters already"):
        peft_layers.inject(model, SPEC, ["one"])


def test_float32_gradients_of_copies_are_made_a_few_at_a_time() -> None:
    """Of a second backward: beside those in the copies' type, half as much, and those that it adds to."""
    model = nn.ModuleList(nn.ModuleDict({"to_q": nn.Linear(64, 64).bfloat16()}) for _ in range(512))
    layers = peft_layers.inject(model, LoraSpec(32, 64.0, ("to_q",)), ["one"], copied=True)
    peft_layers.activate(layers, "one")
    peft_layers.AdapterCopies(layers, "one", torch.bfloat16)

    def backward() -> None:
        x = torch.ones(1, 64, dtype=torch.bfloat16)
        for part in model:
            x = part["to_q"](x)
        x.float().sum().backward()

    backward()
    _, peak = measure_peak(torch.device("cpu"), backward)
    size = sum(parameter.nbytes for parameter in peft_layers.adapter_parameters(layers, "one").values())
    assert 0.5 < peak / size < 0.8
