"""Costs of a block that are counted without memory are those of its published shapes."""

from __future__ import annotations

import pytest
import torch
from benchmarks.block_costs import (
    EVERY,
    FUSED,
    MODES,
    QWEN,
    RANK,
    VARIANTS,
    Work,
    block,
    host_seconds,
    kept,
    kinds_of,
    published,
    tokens,
)
from benchmarks.gpu.timing import flops

from spotlight_kernels.lora import AdaptedLinear, lora_linears

PUBLISHED = published(QWEN)
WIDTH = int(PUBLISHED["num_attention_heads"]) * int(PUBLISHED["attention_head_dim"])
WORK = Work(64, 2, 5)


def test_operations_and_bytes_are_those_of_the_block() -> None:
    none, bfloat16, autocast = (block(each, WORK, masked=False, gradient=False) for each in VARIANTS)
    rows, length = tokens(QWEN, WORK), WORK.grid**2 + WORK.text
    streams = 2 * rows * 12 * WIDTH**2  # queries, keys, values, output, and an MLP four times as wide
    modulation = 2 * WORK.batch * 2 * 6 * WIDTH**2
    attention = 4 * WORK.batch * length**2 * WIDTH
    assert none.flops == streams + modulation + attention
    adapters = 2 * rows * RANK * (4 * 2 * WIDTH + 2 * 5 * WIDTH)
    assert bfloat16.flops == autocast.flops == none.flops + adapters
    assert none.products == 15
    assert bfloat16.products == none.products + 2 * 12, "twelve layers have adapters"
    assert none.operators < bfloat16.operators < autocast.operators
    weights = 2 * (2 * 12 + 2 * 6) * WIDTH**2
    assert none.bytes - none.elementwise_bytes > weights
    assert none.elementwise_bytes < bfloat16.elementwise_bytes < autocast.elementwise_bytes


@pytest.mark.slow
@pytest.mark.parametrize("variant", VARIANTS[1:])
def test_a_backward_costs_two_forwards_and_a_mask_a_little(variant: str) -> None:
    forward = block(variant, WORK, masked=False, gradient=False)
    both = block(variant, WORK, masked=False, gradient=True)
    assert 1.9 < both.flops / forward.flops < 2.1, "frozen weights have no gradients"
    masked = block(variant, WORK, masked=True, gradient=False)
    assert masked.flops == forward.flops
    if variant == "bfloat16 copies":  # adapters' gradients become float32 together
        assert both.operators == 328
    assert 0 < masked.operators - forward.operators < 10


OTHERS = {
    # single-stream: queries, keys, values, an MLP of two matrices of four widths, and its way out
    ("black-forest-labs/FLUX.1-dev", "num_single_layers"): 3 + 4 + 5,
    # a gated MLP of three widths, and queries, keys, values, output
    ("Qwen/Qwen-Image-2.1", "num_layers"): 4 + 3 * 3,
    ("black-forest-labs/FLUX.2-klein-4B", "num_single_layers"): 3 + 6 + 4,
}
"""Weights that a token meets in a block, in squares of the width."""


@pytest.mark.parametrize(("model", "kind"), OTHERS)
def test_a_block_of_another_family_costs_what_its_weights_do(model: str, kind: str) -> None:
    config = published(model)
    width = config["num_attention_heads"] * config["attention_head_dim"]
    small, large = (block(VARIANTS[0], Work(side, 1, 8), model=model, kind=kind) for side in (64, 128))
    more = tokens(model, Work(128, 1, 8)) - tokens(model, Work(64, 1, 8))
    linear = (large.flops - small.flops) / (2 * more * width**2)
    assert OTHERS[model, kind] <= linear < 1.1 * OTHERS[model, kind], "and a little attention"


@pytest.mark.slow
@pytest.mark.parametrize("model", [name for name in EVERY if name != QWEN])
def test_every_family_has_fewer_operators_with_copies_than_under_autocast(model: str) -> None:
    for kind in kinds_of(model):
        none, copies, autocast = (block(each, WORK, model=model, kind=kind) for each in VARIANTS)
        assert 0 < none.operators < copies.operators < autocast.operators
        assert none.flops < copies.flops == autocast.flops


@pytest.mark.parametrize("backward", [False, True])
def test_the_host_is_timed_for_every_variant(backward: bool) -> None:
    seconds = host_seconds(rounds=2, layers=1, backward=backward)
    assert {name: len(taken) for name, taken in seconds.items()} == dict.fromkeys((*VARIANTS[1:], FUSED), 2)
    assert min(map(min, seconds.values())) > 0


KEPT = {
    (QWEN, "num_layers"): (23.2, 11.2),
    ("Qwen/Qwen-Image-2.1", "num_layers"): (31.2, 13.1),
    ("black-forest-labs/FLUX.1-dev", "num_layers"): (21.2, 11.1),
    ("black-forest-labs/FLUX.1-dev", "num_single_layers"): (14.1, 10.1),
    ("black-forest-labs/FLUX.2-klein-4B", "num_layers"): (25.2, 13.1),
    ("black-forest-labs/FLUX.2-klein-4B", "num_single_layers"): (21.1, 12.0),
    ("black-forest-labs/FLUX.2-dev", "num_layers"): (25.1, 13.1),
    ("black-forest-labs/FLUX.2-dev", "num_single_layers"): (21.1, 12.0),
    ("krea/Krea-2-Raw", "num_layers"): (25.3, 11.9),
    ("stabilityai/stable-diffusion-3.5-medium", "num_layers"): (18.3, 11.2),
    ("stabilityai/stable-diffusion-3.5-medium", "dual_attention_layers"): (24.7, 14.4),
    ("Tongyi-MAI/Z-Image", "n_layers"): (34.8, 12.5),
    ("Wan-AI/Wan2.1-T2V-14B-Diffusers", "num_layers"): (26.7, 12.9),
    ("hunyuanvideo-community/HunyuanVideo", "num_layers"): (23.2, 11.1),
    ("hunyuanvideo-community/HunyuanVideo", "num_single_layers"): (16.1, 10.1),
    ("hunyuanvideo-community/HunyuanVideo-1.5-Diffusers-480p_t2v", "num_layers"): (23.2, 11.2),
}
"""Tensors of [tokens, width] that a block leaves for its backward, all and without elementwise results."""


@pytest.mark.parametrize(
    ("model", "kind"),
    [pytest.param(*each, marks=() if each[0] == QWEN else pytest.mark.slow) for each in KEPT],
)
def test_a_block_keeps_its_products_alone(model: str, kind: str) -> None:
    work = Work(512, 2, 64)
    found = {mode: kept(VARIANTS[1], work, mode, model=model, kind=kind) for mode in MODES}
    assert (found["none"], found["elementwise"]) == pytest.approx(KEPT[model, kind], abs=0.3)
    assert 0.95 < found["blocks"] < 1.1, "its input; of Wan without the text"
    fused = kept(FUSED, work, "none", model=model, kind=kind)
    assert fused < found["elementwise"] + 3.5, "queries, keys and branches before their norms, besides"


@pytest.mark.parametrize(
    ("model", "kind"),
    [pytest.param(*each, marks=() if each[0] == QWEN else pytest.mark.slow) for each in KEPT],
)
def test_recomputing_repeats_no_product_but_those_of_whole_blocks(model: str, kind: str) -> None:
    # Wan's text is of 512 tokens whatever the prompt, and has no gradient: little beside a large video.
    small = Work(512, 2, 64) if model.startswith("Wan-AI/") else WORK
    flops = {
        mode: block(VARIANTS[1], small, gradient=True, model=model, kind=kind, mode=mode).flops
        for mode in MODES
    }
    assert 1 < flops["elementwise"] / flops["none"] < 1.03, "the halves of adapters that are wide"
    assert 1.45 < flops["blocks"] / flops["none"] < 1.55


@pytest.mark.parametrize(
    "model", [pytest.param(each, marks=() if each == QWEN else pytest.mark.slow) for each in EVERY]
)
def test_fused_blocks_move_a_third_and_multiply_the_same(model: str) -> None:
    work = Work(512, 2, 64)
    for kind in kinds_of(model):
        copies, fused = (
            block(each, work, model=model, kind=kind, gradient=True) for each in (VARIANTS[1], FUSED)
        )
        assert fused.elementwise_bytes < copies.elementwise_bytes / 2.5
        assert fused.flops == copies.flops


def test_the_wide_products_of_an_adapted_layer_are_counted() -> None:
    rows, inputs, outputs, rank = 6, 16, 32, 4
    x, weight = torch.randn(rows, inputs, requires_grad=True), torch.randn(outputs, inputs)
    a, b = (torch.randn(*shape, requires_grad=True) for shape in ((rank, inputs), (outputs, rank)))
    wide, narrow = 2 * rows * inputs * outputs, 2 * rows * rank * (inputs + outputs)
    (y,) = lora_linears(x, [AdaptedLinear(weight, None, a, b, 1.0)])
    assert flops(lambda: lora_linears(x, [AdaptedLinear(weight, None, a, b, 1.0)])) == wide + narrow
    assert flops(y.sum().backward) == wide + 2 * narrow, "the weight itself has no gradient"
