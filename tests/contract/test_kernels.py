"""Attention implementations and compiled blocks give eager results; what diffusers must offer for them."""

from __future__ import annotations

import itertools
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.contract.family_cases import CASES, PROMPTS
from torch import Tensor, fx, nn

import spotlight_kernels
from spotlight.cli import doctor_checks
from spotlight.config.load import build_config
from spotlight.models.experts import denoisers
from spotlight.models.families.qwen_image import QwenImage
from spotlight.models.kernels import attention, fused
from spotlight.models.kernels.regional import compile_blocks
from spotlight.models.media import MediaSize
from spotlight.models.peft_layers import LoraSpec
from spotlight.models.slots import LoraSlots, Slot
from spotlight.registry import FAMILIES
from spotlight.runtime.assembly import components as build
from spotlight_files.model_errors import ModelError
from spotlight_kernels.real_rotary import rewrite
from spotlight_rewards.base.errors import ConfigError

CPU = torch.device("cpu")
SIZE = MediaSize(16, 16)
SLOTS: tuple[Slot, ...] = ("policy", "old", "reference")
TEXTS = ("one red circle", "a blue square left of a green triangle", "two")
ROUNDING = 1e-5


@pytest.fixture
def dtype() -> torch.dtype:
    return torch.float32


@pytest.fixture
def family(random_pipeline: Path, tmp_path_factory: pytest.TempPathFactory, dtype: torch.dtype) -> QwenImage:
    cache = tmp_path_factory.getbasetemp() / "embeddings"
    family = QwenImage.load(random_pipeline, device="cpu", dtype=dtype, embeddings_cache=cache)
    family.transformer.transformer_blocks = family.transformer.transformer_blocks[:1]
    return family


def velocity(family: QwenImage, model: nn.Module, texts: tuple[str, ...]) -> Tensor:
    latents = torch.randn(len(texts), *family.latent_shape(SIZE), generator=torch.Generator().manual_seed(3))
    condition = family.collate(family.encode(list(texts)))
    return family.velocity(model, latents, torch.full((len(texts),), 0.6), condition, None, SIZE)


# -- attention -----------------------------------------------------------------------------------------


def test_every_name_is_one_of_diffusers() -> None:
    from diffusers.models.attention_dispatch import AttentionBackendName

    assert {backend.value for backend in AttentionBackendName} >= set(attention.BACKENDS.values())


def test_the_configuration_takes_the_same_names() -> None:
    for name in attention.BACKENDS:
        model = {"family": "z-image", "attention": name}
        assert build_config({"model": model}, "the test").model.attention == name


def test_a_choice_reaches_every_layer_and_no_other_model(family: QwenImage) -> None:
    from diffusers.models.attention_dispatch import _AttentionBackendRegistry

    before, _ = _AttentionBackendRegistry.get_active_backend()
    with torch.no_grad():
        expected = velocity(family, family.transformer, TEXTS)
        attention.use_attention(family.transformer, "math", family.device, splits_sequence=False)
        found = velocity(family, family.transformer, TEXTS)
    torch.testing.assert_close(found, expected, rtol=0, atol=ROUNDING)
    chosen = [
        getattr(part.processor, "_attention_backend")  # noqa: B009 - not known to the types
        for part in family.transformer.modules()
        if hasattr(part, "processor")
    ]
    assert chosen
    assert {backend.value for backend in chosen} == {"_native_math"}
    assert _AttentionBackendRegistry.get_active_backend()[0] == before


@pytest.mark.parametrize("name", sorted(set(attention.BACKENDS) - {"native", "math"}))
def test_what_this_machine_lacks_is_refused_by_name(family: QwenImage, name: str) -> None:
    assert attention.missing(name, torch.device("cpu"))
    with pytest.raises(ModelError, match=f"model.attention is '{name}'.*needs a CUDA device"):
        attention.use_attention(family.transformer, name, family.device)


def test_models_and_backends_that_cannot_are_refused(family: QwenImage) -> None:
    with pytest.raises(ModelError, match="Linear calls torch's attention directly"):
        attention.use_attention(nn.Linear(2, 2), "native", torch.device("cpu"))
    with pytest.raises(ModelError, match="one that can split a sequence"):
        attention.use_attention(family.transformer, "math", family.device, splits_sequence=True)


QUICK = ("qwen-image", "z-image")
CHOOSING = [
    name if name in QUICK else pytest.param(name, marks=pytest.mark.slow)
    for name in FAMILIES
    if FAMILIES.load(name).chooses_kernels
]
IGNORES_THE_CHOICE = "qwen-image-2.1"
"""diffusers' forward without a cache of keys calls torch's attention whatever is chosen."""


def packed_attention(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, softmax_scale: Any, **_: Any
) -> Tensor:
    """What flash-attn's function of this signature computes, on a CPU."""
    queries, keys = cu_seqlens_q.tolist(), cu_seqlens_k.tolist()
    return torch.cat(
        [
            nn.functional.scaled_dot_product_attention(
                *(x.transpose(0, 1)[None] for x in (q[slice(*rows)], k[slice(*held)], v[slice(*held)])),
                scale=softmax_scale,
            )[0].transpose(0, 1)
            for rows, held in zip(itertools.pairwise(queries), itertools.pairwise(keys), strict=True)
        ]
    )


def on_kernel(model: nn.Module, name: str) -> None:
    """As :func:`attention.use_attention`, also where the kernel is missing."""
    from diffusers.models.attention_dispatch import AttentionBackendName

    for part in model.modules():
        if hasattr(getattr(part, "processor", None), "_attention_backend"):
            part.processor._attention_backend = AttentionBackendName(attention.BACKENDS[name])  # type: ignore


@pytest.mark.parametrize("name", CHOOSING)
@torch.no_grad()
def test_flash_kernels_are_right_wherever_the_configuration_allows_them(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By diffusers' code around them; the configuration refuses the others."""
    from diffusers.models import attention_dispatch

    monkeypatch.setattr(attention_dispatch, "flash_attn_varlen_func", packed_attention)
    monkeypatch.setattr(
        attention_dispatch,
        "flash_attn_func",
        lambda q, k, v, **_: attention_dispatch._native_attention(q, k, v),
    )
    case, kind = CASES[name], FAMILIES.load(name)
    variant = case.first[0]
    kind.tiny(tmp_path / "pipeline", seed=variant, variant=variant)
    family = kind.load(
        tmp_path / "pipeline",
        device="cpu",
        dtype=torch.float32,
        embeddings_cache=tmp_path,
        max_text_tokens=case.max_text_tokens,
    )
    prompts = (
        "two",
        "one red circle left of a blue square, below two yellow triangles and a green ring",
    )
    unequal = family.encode(case.inputs(prompts))

    def run(kernel: str, conditions: Sequence[Any]) -> Tensor:
        on_kernel(family.transformer, kernel)
        noise = torch.Generator().manual_seed(3)
        latents = torch.randn(2, *family.latent_shape(case.size), generator=noise)
        levels = torch.full((2,), 0.6)
        guidance = case.guidance(family, case.settings[0])
        return family.velocity(
            family.transformer, latents, levels, family.collate(conditions), guidance, case.size
        )

    def allowed(kernel: str) -> bool:
        try:
            build_config({"model": {"family": name, "attention": kernel}}, "the test")
        except ConfigError as error:
            return [problem.key for problem in error.problems] != ["model.attention"]
        return True

    right = (run("flash-varlen", unequal) - run("native", unequal)).abs().max() < ROUNDING
    if name != IGNORES_THE_CHOICE:
        assert allowed("flash-varlen") == allowed("flash-3-varlen") == right
    equal = [unequal[1], unequal[1]]
    if not allowed("flash"):
        assert not allowed("flash-3")
        if name != IGNORES_THE_CHOICE:
            with pytest.raises(ModelError, match="one of the kernels that take no mask"):
                run("flash", equal)
        return
    torch.testing.assert_close(run("flash", equal), run("native", equal), rtol=0, atol=ROUNDING)
    if name in ("qwen-image", "qwen-image-edit", "z-image", "krea-2"):
        with pytest.raises(ModelError, match=r"prompts of unequal length.*rollout\.group_size"):
            run("flash", unequal)
        return
    torch.testing.assert_close(run("flash", unequal), run("native", unequal), rtol=0, atol=ROUNDING)


# -- compilation ---------------------------------------------------------------------------------------


def compiled_against_eager(
    family: QwenImage, backend: str, batches: Sequence[tuple[str, ...]], used: Sequence[Slot]
) -> tuple[float, int]:
    """Largest difference and number of graphs, over slots, prompts, batch sizes and gradients."""
    from torch._dynamo.utils import counters

    compute = None if family.dtype == torch.float32 else family.dtype
    spec = LoraSpec(4, 8.0, family.lora_targets, seed=3)
    slots = LoraSlots(family.transformer, spec, ["old"], compute=compute)
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for slot in ("policy", "old"):
            for parameter in slots.parameters(slot).values():
                parameter.copy_(0.05 * torch.randn(parameter.shape, generator=generator))

    def run() -> list[Tensor]:
        found = []
        for slot, texts in itertools.product(used, batches):
            with slots.use(slot) as model, torch.no_grad():
                found.append(velocity(family, model, texts))
        with slots.use("policy") as model:
            for texts in batches:
                velocity(family, model, texts).square().mean().backward()
        for parameter in slots.trainable_parameters().values():
            # Compiled, what the output does not depend on has a gradient of zeros instead of none.
            found.append(torch.zeros_like(parameter) if parameter.grad is None else parameter.grad)
            parameter.grad = None
        return found

    expected = run()
    compile_blocks(family.transformer, family.device, backend)
    counters.clear()
    differences = [(a - b).abs().max().item() for a, b in zip(run(), expected, strict=True)]
    graphs = int(counters["stats"]["unique_graphs"])
    slots.copy("policy", "policy")  # copies are made again
    again = run()
    assert int(counters["stats"]["unique_graphs"]) == graphs, "a second iteration compiles nothing"
    differences += [(a - b).abs().max().item() for a, b in zip(again, expected, strict=True)]
    return max(differences), graphs


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    ("backend", "dtype", "rounding"),
    [
        ("aot_eager", torch.float32, ROUNDING),
        ("inductor", torch.float32, ROUNDING),
        ("aot_eager", torch.bfloat16, 0.02),
    ],
)
def test_the_number_of_graphs_is_bounded(
    family: QwenImage, fresh_compiler: None, backend: str, rounding: float
) -> None:
    batches = [TEXTS[:2], TEXTS[1:], TEXTS, TEXTS[:1], TEXTS[1:2]]
    difference, graphs = compiled_against_eager(family, backend, batches, SLOTS)
    assert difference <= rounding
    # Three slots without a gradient and one with, each for batches of one and of several, masked or not.
    assert 4 <= graphs <= 4 * 2 * 2


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("dtype", [torch.bfloat16])
def test_compiled_a_forward_with_gradient_is_not_the_one_without(
    family: QwenImage, fresh_compiler: None
) -> None:
    """So a replay's ratios to its rollout are not 1, and model.compile is refused where they count."""
    spec = LoraSpec(4, 8.0, family.lora_targets, seed=3)
    slots = LoraSlots(family.transformer, spec, compute=family.dtype)

    def both() -> tuple[Tensor, Tensor]:
        with slots.use("policy") as model:
            with torch.no_grad():
                quiet = velocity(family, model, TEXTS[:2])
            return quiet, velocity(family, model, TEXTS[:2]).detach()

    quiet, training = both()
    assert torch.equal(quiet, training), "eager"
    compile_blocks(family.transformer, family.device)
    quiet, training = both()
    _, again = both()
    assert torch.equal(again, training), "the same graph"
    assert 1e-4 < (quiet - training).norm() / quiet.norm() < 0.02, "far above clip ranges"


@pytest.mark.parametrize(("name", "calls"), [("qwen-image", 4), ("qwen-image-2.1", 2), ("z-image", 2)])
def test_compiled_graphs_rotate_in_real_numbers(
    name: str, calls: int, tmp_path: Path, fresh_compiler: None
) -> None:
    """Queries and keys of each stream: diffusers rotates complex numbers, which inductor cannot fuse."""
    kind, case = FAMILIES.load(name), CASES[name]
    kind.tiny(tmp_path / "pipeline", seed=0)
    family = kind.load(
        tmp_path / "pipeline", device="cpu", dtype=torch.float32, embeddings_cache=tmp_path / "cache"
    )
    latents = torch.randn(2, *family.latent_shape(case.size), generator=torch.Generator().manual_seed(3))
    condition = family.collate(family.encode(case.inputs([PROMPTS[0]] * 2)))

    def run() -> Tensor:
        with torch.no_grad():
            levels = torch.full([2], 0.6)
            return family.velocity(family.transformer, latents, levels, condition, None, case.size)

    expected, counts = run(), []

    def backend(graph: fx.GraphModule, inputs: Sequence[Any]) -> Any:
        complex_products = [node for node in graph.graph.nodes if node.target is torch.view_as_complex]
        counts.append((len(complex_products), rewrite(graph)))
        assert not [node for node in graph.graph.nodes if node.target is torch.view_as_complex]
        return graph.forward

    for part in denoisers(family.transformer).values():
        part.compile_repeated_blocks(backend=backend, dynamic=True)  # type: ignore[operator]
    torch.testing.assert_close(run(), expected, rtol=0, atol=ROUNDING)
    assert set(counts) == {(calls, calls)}


def test_a_run_asks_for_both_by_key(random_pipeline: Path, tmp_path: Path, fresh_compiler: None) -> None:
    model = {"path": str(random_pipeline), "attention": "math", "compile": "regional"}
    config = build_config({"model": model, "cache_dir": str(tmp_path)}, "the test")
    family = build.load_family(config, torch.device("cpu"))
    slots = build.make_slots(config, family, build.make_algorithm(config))
    blocks = slots.modules()["policy"].transformer_blocks
    assert all(block._compiled_call_impl is not None for block in blocks)  # type: ignore[union-attr]


def test_a_model_without_repeated_blocks_is_refused() -> None:
    with pytest.raises(ModelError, match="Linear names no repeated blocks"):
        compile_blocks(nn.Linear(2, 2), torch.device("cpu"), "aot_eager")


# -- fused operators -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("triton", "why"),
    [
        (True, "they need a CUDA device, and this is cpu"),
        (False, r"triton is missing \(pip install triton\)"),
    ],
)
def test_fused_operators_that_cannot_run_are_an_error_if_asked_for_and_a_warning_by_default(
    family: QwenImage,
    triton: bool,
    why: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    if not triton:
        for name in [each for each in sys.modules if each.startswith("spotlight_kernels.")]:
            monkeypatch.delitem(sys.modules, name)
            monkeypatch.delattr(spotlight_kernels, name.split(".")[1], raising=False)
        monkeypatch.setitem(sys.modules, "triton", None)
    with pytest.raises(ModelError, match=rf"model\.kernels is 'fused', and {why}.*: set it to reference"):
        fused.use_fused(family.transformer, CPU, asked=True)
    assert not fused.use_fused(family.transformer, CPU, asked=False)
    assert "diffusers' own operators are used, which are slower (model.kernels)" in caplog.text
    (finding,) = [each for each in doctor_checks.kernels() if each.what == "fused operators"]
    assert re.search(why, finding.found)


def test_a_run_on_cpus_looks_for_no_fused_operators(random_pipeline: Path, tmp_path: Path) -> None:
    config = build_config({"model": {"path": str(random_pipeline)}, "cache_dir": str(tmp_path)}, "the test")
    assert not build.fuses(config, CPU)
    assert build.fuses(config, torch.device("cuda"))
    program = (
        "import sys, spotlight.runtime.run, spotlight.training.learner\n"
        "fused = ('spotlight_kernels.' + name for name in ('fuse', 'operators', 'blocks', 'triton_'))\n"
        "assert not [name for name in sys.modules if name.startswith(tuple(fused))]"
    )
    subprocess.run([sys.executable, "-c", program], check=True)
