"""Operations of a forward counted without memory are those of a real one; throughput follows from them."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.contract.family_cases import CASES
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from spotlight.models.condition import GRIDS, REFERENCES, Condition, ConditionBatch, Guidance
from spotlight.models.experts import denoisers
from spotlight.models.family import ModelFamily
from spotlight.models.peft_layers import LoraSpec
from spotlight.models.shared import flop_count
from spotlight.models.shared.flop_count import (
    Compute,
    ForwardLog,
    Operations,
    Trained,
    forward_operations,
    rates,
)
from spotlight.models.slots import CopySlots, LoraSlots
from spotlight.registry import FAMILIES
from spotlight_kernels.measure.peak_rates import bfloat16_flop_s

TEXT, SEEN = 11, (3, 4)
"""Tokens of a text; rows and columns of a reference picture, where the family takes any."""
TEXTS = {"qwen-image": (TEXT, 130), "qwen-image-2.1": (TEXT, 130), "z-image": (45, 130)}
"""Beyond what is counted, too, and of a model that pads texts."""


def tiny(name: str, directory: Path, dtype: torch.dtype = torch.float32) -> ModelFamily:
    kind = FAMILIES.load(name)
    kind.tiny(directory / "pipeline", seed=0)
    return kind.load(
        directory / "pipeline",
        device="cpu",
        dtype=dtype,
        embeddings_cache=directory,
        max_text_tokens=CASES[name].max_text_tokens,
    )


def a_condition(family: ModelFamily, tokens: int = TEXT) -> Condition:
    tensors = {key: torch.zeros(shape) for key, shape in family.condition_shapes(tokens).items()}
    if GRIDS in tensors:
        tensors |= {GRIDS: torch.tensor([SEEN]), REFERENCES: tensors[REFERENCES][: math.prod(SEEN)]}
    return Condition(tensors)


def batch(family: ModelFamily, rows: int, tokens: int = TEXT) -> ConditionBatch:
    return family.collate([a_condition(family, tokens)] * rows)


@pytest.mark.parametrize(
    "name",
    [name if name in TEXTS else pytest.param(name, marks=pytest.mark.slow) for name in FAMILIES],
)
def test_a_count_without_memory_is_that_of_a_real_forward(name: str, tmp_path: Path) -> None:
    family = tiny(name, tmp_path, torch.bfloat16 if name == "qwen-image" else torch.float32)
    size = CASES[name].size
    model = denoisers(family.transformer)["transformer"]
    latents = torch.zeros(1, *family.latent_shape(size), dtype=family.dtype)
    for text in TEXTS.get(name, (TEXT,)):
        given = batch(family, 1, text), family.embedded_guidance, size
        with torch.no_grad(), sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
            family.predict(model, latents, torch.tensor([0.5]), *given)
        log = ForwardLog()
        with torch.no_grad():
            log.note(size, given[0].size, given[0].lengths, model)
        found = log.take(family, operations=True)
        assert found.flops == pytest.approx(counter.get_total_flops(), rel=1e-6)
        assert found.tokens == family.dimensions.tokens(size) + a_condition(family, text).tokens


@pytest.mark.parametrize("mode", ["lora", "full"])
def test_rows_guidance_and_backwards_are_counted(mode: str, tmp_path: Path) -> None:
    family = tiny("qwen-image", tmp_path)
    size = CASES["qwen-image"].size
    slots = (
        CopySlots(family.transformer)
        if mode == "full"
        else LoraSlots(family.transformer, LoraSpec(rank=2, alpha=2.0, targets=("to_q",)))
    )
    latents = torch.zeros(3, *family.latent_shape(size))
    guided = Guidance(4.0, batch(family, 3, TEXT + 2))
    trained = Trained.of(family.transformer)
    assert trained.frozen is (mode == "lora")
    each = [forward_operations(family, size, text, trained=trained) for text in (TEXT, TEXT + 2)]
    tokens = 2 * family.dimensions.tokens(size) + 2 * TEXT + 2
    log = ForwardLog()
    for gradient in (False, True):
        with slots.use("policy") as model, nullcontext() if gradient else torch.no_grad():
            family.velocity(model, latents, torch.full([3], 0.5), batch(family, 3), guided, size, log)
        work = log.take(family, operations=True)
        assert work.tokens == 3 * tokens
        flops = [one.training(frozen=trained.frozen) if gradient else one.forward for one in each if one]
        assert work.flops == pytest.approx(3 * sum(flops))
        assert work.timesteps == (3 if gradient else 0)
    assert log.take(family, operations=True) == Compute(0, 0)


QWEN_LAYERS = ("to_q", "to_k", "to_v", "add_q_proj", "add_k_proj", "add_v_proj", "img_mlp.net.2")
RANK = 3


def qwen_by_hand(c: dict[str, int], n: int, t: int) -> Operations:
    """n tokens of a picture, t of text; an operation is an addition or a multiplication.

    A block: modulation of both streams from one row; q, k, v, out (4 d x d) and two layers of width 4 d.
    """
    d, layers = c["num_attention_heads"] * c["attention_head_dim"], c["num_layers"]
    before = n * c["in_channels"] * d + t * c["joint_attention_dim"] * d + 256 * d + d * d
    block = 2 * 6 * d * d + (n + t) * (4 * d * d + 8 * d * d)
    after = 2 * d * d + n * d * 4 * c["out_channels"]
    adapters = layers * RANK * (3 * n * 2 * d + 3 * t * 2 * d + n * (4 * d + d))
    return Operations(2 * (before + layers * block + after), 4 * layers * (n + t) ** 2 * d, 2 * adapters)


def flux_by_hand(c: dict[str, int], n: int, t: int) -> Operations:
    """A block of one stream: modulation by 3 d; q, k, v, a layer of width 4 d, and out from all five."""
    d = c["num_attention_heads"] * c["attention_head_dim"]
    double, single = c["num_layers"], c["num_single_layers"]
    embedders = (
        (2 if c["guidance_embeds"] else 1) * (256 * d + d * d) + c["pooled_projection_dim"] * d + d * d
    )
    before = n * c["in_channels"] * d + t * c["joint_attention_dim"] * d + embedders
    blocks = double * (2 * 6 * d * d + (n + t) * 12 * d * d)
    blocks += single * (3 * d * d + (n + t) * (3 + 4 + 5) * d * d)
    after = 2 * d * d + n * d * c["in_channels"]
    adapters = (double * n + single * (n + t)) * RANK * 2 * d  # to_q
    attention = 4 * (double + single) * (n + t) ** 2 * d
    return Operations(2 * (before + blocks + after), attention, 2 * adapters)


@pytest.mark.parametrize(
    ("name", "by_hand", "targets"),
    [("qwen-image", qwen_by_hand, QWEN_LAYERS), ("flux", flux_by_hand, ("to_q",))],
)
def test_operations_are_those_of_a_hand_count(
    name: str,
    by_hand: Callable[[dict[str, int], int, int], Operations],
    targets: tuple[str, ...],
    tmp_path: Path,
) -> None:
    family, size = tiny(name, tmp_path), CASES[name].size
    LoraSlots(family.transformer, LoraSpec(rank=RANK, alpha=2.0, targets=targets))
    trained = Trained.of(family.transformer)
    text = a_condition(family).tokens  # FLUX.1 pads
    found = forward_operations(family, size, text, trained=trained)
    config = {**family.config}
    hand = by_hand(config, family.dimensions.tokens(size), text)  # type: ignore[arg-type]
    assert found == Operations(*(pytest.approx(x) for x in (hand.products, hand.attention, hand.adapters)))
    assert hand.training(frozen=True) == 2 * hand.products + 3 * hand.attention + 3 * hand.adapters
    assert hand.training(frozen=False) == 3 * (hand.products + hand.attention + hand.adapters)


def test_a_backward_takes_what_is_counted_but_for_what_nothing_needs(tmp_path: Path) -> None:
    """Gradients of what comes before the first adapter, and of the text after the last attention."""
    family, size = tiny("qwen-image", tmp_path), CASES["qwen-image"].size
    slots = LoraSlots(family.transformer, LoraSpec(rank=RANK, alpha=2.0, targets=QWEN_LAYERS))
    c, n, t = {**family.config}, family.dimensions.tokens(size), TEXT
    d, layers = c["num_attention_heads"] * c["attention_head_dim"], c["num_layers"]
    latents = torch.zeros(1, *family.latent_shape(size))
    with (
        sdpa_kernel(SDPBackend.MATH),
        FlopCounterMode(display=False) as counter,
        slots.use("policy") as model,
    ):
        family.predict(model, latents, torch.tensor([0.5]), batch(family, 1), None, size).sum().backward()
    unneeded = n * c["in_channels"] * d + t * c["joint_attention_dim"] * d + 256 * d + d * d  # embedders
    unneeded += layers * 2 * 6 * d * d + 2 * d * d  # modulation
    unneeded += (n + t) * 3 * d * (d + RANK)  # inputs of the first block
    unneeded += t * 9 * d * d  # out and MLP of the last block's text
    counted = qwen_by_hand(c, n, t).training(frozen=True)
    assert counter.get_total_flops() == counted - 2 * unneeded


def test_a_model_that_cannot_be_counted_has_tokens_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    family = tiny("qwen-image", tmp_path)
    predict = type(family).predict

    def reads_values(self: ModelFamily, *given: Any) -> torch.Tensor:
        velocity = predict(self, *given)  # type: ignore[arg-type]
        return velocity * float(velocity.mean())

    monkeypatch.setattr(type(family), "predict", reads_values)
    monkeypatch.setattr(flop_count, "_known", {})
    assert forward_operations(family, CASES["qwen-image"].size, TEXT) is None
    assert rates("train", Compute(60, None), 2.0, 1e12) == {"throughput/train_tokens_s": 30.0}


def test_mfu_is_of_the_devices_peak() -> None:
    row = rates("rollout", Compute(60, 4e12), 2.0, 8e12)
    assert row == {
        "throughput/rollout_tokens_s": 30.0,
        "throughput/rollout_tflop_s": 2.0,
        "throughput/rollout_mfu": 0.25,
    }


@pytest.mark.parametrize(
    ("name", "tflop_s"),
    [
        ("NVIDIA H100 80GB HBM3", 989),
        ("NVIDIA H100 PCIe", 756),
        ("NVIDIA H200", 989),
        ("NVIDIA A100-SXM4-80GB", 312),
        ("NVIDIA L40S", 362),
        ("NVIDIA L4", 121),
        ("Tesla T4", None),
        ("NVIDIA A10G", None),
        ("NVIDIA H800 PCIe", 756),
        ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", None),
        ("NVIDIA A10-24Q", None),
        ("GRID A100-10C", None),
    ],
)
def test_peaks_are_found_by_torchs_name(name: str, tflop_s: float | None) -> None:
    assert bfloat16_flop_s(name) == (None if tflop_s is None else 1e12 * tflop_s)
