"""Operations of a forward counted without memory are those of a real one; throughput follows from them."""

from __future__ import annotations

import math
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
from spotlight.models.kernels.peak_rates import bfloat16_flop_s
from spotlight.models.peft_layers import LoraSpec
from spotlight.models.shared import flop_count
from spotlight.models.shared.flop_count import Compute, ForwardLog, forward_flops, rates
from spotlight.models.slots import CopySlots, LoraSlots
from spotlight.registry import FAMILIES

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
    one = forward_flops(family, size, TEXT) or 0.0
    other = forward_flops(family, size, TEXT + 2) or 0.0
    tokens = 2 * family.dimensions.tokens(size) + 2 * TEXT + 2
    log = ForwardLog()
    for gradient, passes in ((False, 1), (True, 3 if mode == "full" else 2)):
        with slots.use("policy") as model, nullcontext() if gradient else torch.no_grad():
            family.velocity(model, latents, torch.full([3], 0.5), batch(family, 3), guided, size, log)
        work = log.take(family, operations=True)
        assert work.tokens == 3 * tokens
        assert work.flops == pytest.approx(3 * passes * (one + other))
    assert log.take(family, operations=True) == Compute(0, 0)


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
    assert forward_flops(family, CASES["qwen-image"].size, TEXT) is None
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
