"""Every model family of ``family_cases.py`` against its own diffusers pipeline, on small random pipelines.

The first tier takes a variant and a training or two per family, the longer one all; the tables say which.
"""

from __future__ import annotations

import ast
import inspect
import re
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import diffusers
import numpy as np
import pytest
import torch
from benchmarks.block_costs import Alive
from safetensors.torch import load_file
from tests.contract import family_ranks, plain_loop
from tests.contract.family_cases import (
    CASES,
    PROMPTS,
    TRAINED,
    TRAINED_BY_TIER,
    TRAININGS,
    VARIATIONS,
)
from tests.invariant import learner_world

from spotlight.config.load import build_config
from spotlight.models.experts import denoisers
from spotlight.models.family import Guidance, MediaSize, ModelError, ModelFamily
from spotlight.models.skeleton import base_state, filling
from spotlight.models.slots import LoraSlots, LoraSpec
from spotlight.registry import FAMILIES
from spotlight.report.loading import loading_snippet
from spotlight.testing.family_contract import (
    TOLERANCE,
    LoadedFamily,
    Setting,
    check_dimensions,
    check_inputs,
    check_weights,
    draw,
    layers_of,
    load_family,
    picture_difference,
    plain_pipeline,
)
from spotlight.training.learner import TrainingSample
from spotlight.training.lora_export import save_lora, save_merged
from spotlight.training.recompute import recompute
from spotlight_files.lora_file import LORA_FILE, lora_folder, part_prefix, read_lora

PLAIN_TOLERANCE = 1e-4
"""Of an optimizer step's changes to parameters, relative to the largest; measured: at most 2.3e-5,
which is 1e-7 of a weight."""
PLAIN_FIRST = (("flux", 0, "diffusion-nft", "lora"), ("wan", 2, "flow-grpo-fast", "full"))
PLAIN = [
    pytest.param(*each, marks=() if each in PLAIN_FIRST else pytest.mark.slow)
    for name, variant in TRAINED
    for algorithm in plain_loop.LOSSES
    for mode in ("lora", "full")
    for each in [(name, variant, algorithm, mode)]
]
"""(family, variant, algorithm, mode) whose step is compared with a plain loop's: about 3 s each."""


Load = Callable[[str, int], LoadedFamily]


@pytest.fixture(scope="module")
def load(tmp_path_factory: pytest.TempPathFactory) -> Load:
    """Small random pipelines by family and variant, each written and loaded once."""
    loaded: dict[tuple[str, int], LoadedFamily] = {}

    def load_one(name: str, variant: int) -> LoadedFamily:
        if (name, variant) not in loaded:
            folder = tmp_path_factory.mktemp(name)
            loaded[name, variant] = load_family(FAMILIES.load(name), CASES[name], folder, variant=variant)
        return loaded[name, variant]

    return load_one


@pytest.mark.parametrize(("name", "variant"), VARIATIONS)
def test_pictures_equal_the_pipelines(
    load: Load, name: str, variant: int, record_property: Callable[[str, float], None]
) -> None:
    loaded = load(name, variant)
    for setting in loaded.case.settings:
        difference = picture_difference(loaded, setting)
        record_property(f"{name}/picture", difference)
        assert difference <= TOLERANCE, setting


@pytest.mark.parametrize("name", CASES)
def test_pictures_depend_on_all_inputs(load: Load, name: str) -> None:
    check_inputs(load(name, 0))


def test_wan_reads_prompts_as_it_was_trained_on_them(load: Load, monkeypatch: pytest.MonkeyPatch) -> None:
    loaded = load("wan", 0)
    one, other = loaded.family.encode(["the \u201c\uff2f\uff30\uff25\uff2e\u201d sign", 'the "OPEN" sign'])
    assert torch.equal(one["embeds"], other["embeds"])
    monkeypatch.setitem(sys.modules, "ftfy", None)
    with pytest.raises(ModelError, match=r"ftfy is not installed; expected it.*pip install ftfy"):
        loaded.family.encode(["another sign"])


@pytest.mark.parametrize("name", CASES)
def test_every_transformer_weight_matters(load: Load, name: str) -> None:
    check_weights(load(name, 0))


@pytest.mark.parametrize(("name", "variant"), VARIATIONS)
def test_dimensions_are_those_of_the_running_model(load: Load, name: str, variant: int) -> None:
    check_dimensions(load(name, variant))


PUBLISHED = [(name, model) for name in CASES for model in FAMILIES.load(name).published]


@pytest.mark.parametrize(("name", "model"), PUBLISHED)
def test_published_models_have_the_published_number_of_parameters(
    name: str, model: str, record_property: Callable[[str, float], None]
) -> None:
    published = FAMILIES.load(name).published[model]
    parameters = 0
    for component, config in published.configs.items():
        if component.startswith("transformer"):
            with torch.device("meta"):
                built = getattr(diffusers, str(config["_class_name"])).from_config(dict(config))
            parameters += sum(parameter.numel() for parameter in built.parameters())
    difference = abs(parameters / published.parameters - 1)
    record_property(f"{name}/parameters", difference)
    assert difference <= 0.005


SPLITTING = [each for each in TRAINED if FAMILIES.load(each[0]).splits_sequence]


@pytest.mark.parametrize(
    "splitting",
    [
        [(name, variant) for name, variant in SPLITTING if variant in CASES[name].first],
        pytest.param(
            [(name, variant) for name, variant in SPLITTING if variant not in CASES[name].first],
            marks=pytest.mark.slow,
        ),
    ],
    ids=["first", "others"],
)
def test_degrees_of_sequence_parallelism_give_the_same(
    load: Load,
    splitting: list[tuple[str, int]],
    tmp_path: Path,
    record_property: Callable[[str, float], None],
) -> None:
    found = family_ranks.differences({each: load(*each).directory for each in splitting}, tmp_path)
    assert found.keys() == {(*each, degree) for each in splitting for degree in (2, 4)}
    for case, (difference, agree) in found.items():
        record_property(f"{case[0]}/sequence_parallel", difference)
        assert difference <= TOLERANCE, case
        assert agree, case


@pytest.mark.parametrize(("name", "variant", "algorithm", "mode"), TRAININGS)
def test_one_step_trains_every_targeted_weight(
    load: Load, name: str, variant: int, algorithm: str, mode: str
) -> None:
    loaded = load(name, variant)
    world = learner_world.FamilyWorld(loaded.family, loaded.case.size, loaded.case.inputs)
    learner = learner_world.make_learner(
        world, learner_world.algorithm(algorithm), mode, guidance=2.0, timesteps_per_pass=2
    )
    samples = learner_world.roll_out(world, learner, guidance=2.0, batch=6)
    before = {name: tensor.clone() for name, tensor in learner.slots.state("policy").items()}
    report = learner_world.train_batch(learner, samples, 3)
    if algorithm == "flow-grpo-fast":
        assert report.sums.ratio_max == report.sums.means["ratio"] == 1.0
        assert max(report.sums.replay_difference.values()) < 1e-4
    after = learner.slots.state("policy")
    same = [name for name in before if torch.equal(before[name], after[name])]
    assert [name for name in same if not re.search(loaded.case.unused, name)] == []


@pytest.mark.filterwarnings("ignore:Already found a `peft_config`")
@pytest.mark.parametrize(("name", "variant", "algorithm", "mode"), PLAIN)
def test_one_step_equals_that_of_a_plain_loop(
    load: Load,
    name: str,
    variant: int,
    algorithm: str,
    mode: str,
    tmp_path: Path,
    record_property: Callable[[str, float], None],
) -> None:
    loaded = load(name, variant)
    case, family = loaded.case, loaded.family
    scale = 1.0 if family.guidance_argument is None else 2.0
    world = learner_world.FamilyWorld(family, case.size, case.inputs)
    learner = learner_world.make_learner(
        world,
        learner_world.algorithm(algorithm, **plain_loop.WITHOUT_REFERENCE[algorithm]),
        mode,
        guidance=scale,
        learning_rate=plain_loop.LEARNING_RATE,
        epsilon=plain_loop.EPSILON,
        weight_decay=plain_loop.WEIGHT_DECAY,
        max_grad_norm=plain_loop.MAX_GRAD_NORM,
        timesteps_per_pass=2,
    )
    before = {name: tensor.clone() for name, tensor in learner.slots.state("policy").items()}
    slots = learner.slots
    lora = (
        save_plain_lora(family, before, slots.metadata(), tmp_path) if isinstance(slots, LoraSlots) else None
    )
    samples = learner_world.roll_out(world, learner, guidance=scale, batch=6)
    report = learner_world.train_batch(learner, samples, 3)
    setting = Setting(case.size, scale=scale, embedded=family.embedded_guidance)
    loop = plain_loop.PlainLoop(
        case, family, plain_pipeline(type(family), case, loaded.directory), lora, setting
    )
    norm = loop.step([plain_sample(sample) for sample in samples], algorithm)
    after, plain = slots.state("policy"), loop.trained()
    assert after.keys() <= plain.keys()
    # diffusers gives image-to-video models empty layers for what a LoRA of text-to-video lacks.
    assert not any(plain[name].any() for name in plain.keys() - after.keys())
    updates = torch.cat([(after[name] - before[name]).flatten() for name in before])
    differences = torch.cat([(after[name] - plain[name].detach()).flatten() for name in before])
    relative = float(differences.abs().max() / updates.abs().max())
    record_property(f"{name}/plain_loop", relative)
    assert updates.abs().max() > 1e-2 * plain_loop.LEARNING_RATE
    assert report.grad_norm == pytest.approx(norm, rel=PLAIN_TOLERANCE)
    assert relative <= PLAIN_TOLERANCE


WAN_NAMES = r"diffusion_model\.blocks\.\d+\.((self|cross)_attn\.[qkvo]|ffn\.[02])"
COMFYUI_NAMES = {"wan": WAN_NAMES, "wan-i2v": WAN_NAMES}
"""Where they are not diffusers'."""


def save_plain_lora(
    family: ModelFamily, layers: Mapping[str, torch.Tensor], metadata: Mapping[str, object], folder: Path
) -> Path:
    """With its alpha, by diffusers alone: what is trained must have the same factors."""
    parts = list(denoisers(family.transformer))
    for part in parts:
        prefix = part_prefix(part, parts)
        own = {n.removeprefix(prefix): t.contiguous() for n, t in layers.items() if n.startswith(prefix)}
        writer = getattr(diffusers, family.pipeline_class if family.loads_lora else "FluxPipeline")
        writer.save_lora_weights(
            lora_folder(folder, part),
            transformer_lora_layers=own,
            transformer_lora_adapter_metadata=dict(metadata),
        )
    return folder


def plain_sample(sample: TrainingSample) -> plain_loop.PlainSample:
    """Without anything of ours."""
    tensors = sample.tensors
    assert tensors is not None
    path = None if tensors.latents is None else (tensors.latents, tensors.sigmas)
    prompt = learner_world.PROMPTS[int(sample.group)]
    return plain_loop.PlainSample(prompt, sample.advantage, sample.seed, tensors.final, path)


@pytest.mark.filterwarnings("ignore:Already found a `peft_config`")
@pytest.mark.parametrize(("name", "variant"), TRAINED_BY_TIER)
def test_plain_diffusers_draws_our_pictures_with_trained_weights(
    load: Load,
    name: str,
    variant: int,
    tmp_path: Path,
    record_property: Callable[[str, float], None],
) -> None:
    loaded = load(name, variant)
    case, setting = loaded.case, loaded.case.settings[-1]
    family = learner_world.FamilyWorld(loaded.family, case.size, case.inputs).fresh()
    slots = LoraSlots(family.transformer, LoraSpec(rank=2, alpha=3.0, targets=family.lora_targets))
    generator = torch.Generator().manual_seed(7)
    slots.load_state(
        "policy",
        {n: 0.2 * torch.randn(t.shape, generator=generator) for n, t in slots.state("policy").items()},
    )
    with slots.use("policy") as model:
        latents, ours = draw(family, case, setting, model)
    lora = plain_pipeline(type(family), case, loaded.directory)
    assert np.abs(case.call(lora, family, latents, setting) - ours).max() > 100 * TOLERANCE
    folder = save_lora(family, tmp_path / "lora", slots.state("policy"), slots.metadata()).parent
    pattern = COMFYUI_NAMES.get(name, r"transformer\..*")
    assert all(re.fullmatch(rf"{pattern}\.lora_[AB]\.weight", each) for each in load_file(folder / LORA_FILE))
    plain_loop.load_lora(lora, folder)
    parts = list(denoisers(family.transformer))
    if len(parts) > 1:
        lora.load_lora_weights(folder / "transformer_2", load_into_transformer_2=True)
    read = read_lora(family.pipeline_class, str(folder), parts).with_alpha(3.0).layers
    torch.testing.assert_close(dict(read), dict(slots.state("policy")))
    merged = plain_pipeline(
        FAMILIES.load(case.name), case, save_merged(family, tmp_path / "merged", slots.merged_state("policy"))
    )
    for what, pipe in (("lora", lora), ("merged", merged)):
        difference = float(np.abs(case.call(pipe, family, latents, setting) - ours).max())
        record_property(f"{case.name}/{what}", difference)
        assert difference <= TOLERANCE


HALF = torch.bfloat16
FROM_PEERS = (("qwen-image", 0, HALF), ("wan", 2, HALF), ("hunyuan-video", 0, HALF))
"""Of the first tier: pictures, two transformers, videos."""

PLANNED = [
    pytest.param(name, marks=() if name in ("qwen-image", "flux") else pytest.mark.slow)
    for name, case in CASES.items()
    if case.wide
]


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name == "qwen-image" else pytest.mark.slow) for name in CASES]
)
def test_layers_without_a_gradient_are_those_that_the_family_names(load: Load, name: str) -> None:
    loaded = load(name, 0)
    family, size = loaded.family, loaded.case.size
    model = type(family.transformer).from_config(family.transformer.config)
    condition = family.collate(family.encode(loaded.case.inputs([PROMPTS[0]] * 2)))
    latents, levels = torch.randn(2, *family.latent_shape(size)), torch.tensor([0.95, 0.3])
    guidance = Guidance(embedded=family.embedded_guidance)
    family.velocity(model, latents, levels, condition, guidance, size).square().mean().backward()
    without = {key for key, parameter in model.named_parameters() if parameter.grad is None}
    assert without == {key for key, _ in model.named_parameters() if key.startswith(family.unread_layers())}


@pytest.mark.parametrize("name", PLANNED)
def test_activations_are_within_a_tenth_of_the_plans(load: Load, name: str) -> None:
    loaded = load(name, 0)
    family, costs = loaded.family, loaded.family.activations
    # Of videos, text is a small part of the tokens; in some models it is none, and in those that start from a
    # picture it always has its full length.
    side = 384 if family.references_max else 128
    prompt, size = ("a", MediaSize(side, side)) if family.video else ("a word " * 9, MediaSize(64, 64))
    conditions = family.encode(loaded.case.inputs([prompt] * 2, " ", size))
    condition, text = family.collate(conditions), conditions[0].tokens
    latents, levels = torch.randn(2, *family.latent_shape(size)), torch.tensor([0.3, 0.6])
    found = {}
    for mode in ("lora", "full", "elementwise", "checkpointed"):
        model = type(family.transformer).from_config({**family.transformer.config, **loaded.case.wide})
        family.adapt(model)
        layers = len(layers_of(model))
        if mode == "lora":
            LoraSlots(model.requires_grad_(False), LoraSpec(rank=4, alpha=4.0, targets=family.lora_targets))
        elif mode != "full":
            recompute(model, "elementwise" if mode == "elementwise" else "blocks")
        guidance = Guidance(embedded=family.embedded_guidance)
        saved: list[torch.Tensor] = []  # or a last block's text, which nothing reads, is dropped at once

        def keep(tensor: torch.Tensor, saved: list[torch.Tensor] = saved) -> torch.Tensor:
            saved.append(tensor)
            return tensor

        with Alive() as alive, torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            output = family.velocity(model, latents, levels, condition, guidance, size)
        stored = alive.bytes
        del output  # with its graph
        found[mode] = stored / (4 * 2 * (family.dimensions.tokens(size) + text) * 256 * layers)
    expected = {mode: getattr(costs, mode) for mode in found}
    assert found == pytest.approx(expected, rel=0.1)


@pytest.mark.parametrize(
    ("name", "variant", "dtype"),
    [
        pytest.param(
            name, variant, dtype, marks=() if (name, variant, dtype) in FROM_PEERS else pytest.mark.slow
        )
        for name, variant in TRAINED
        for dtype in (torch.float32, torch.bfloat16)
    ],
)
def test_a_transformer_from_a_peer_is_the_one_on_disk(
    load: Load, name: str, variant: int, dtype: torch.dtype, tmp_path: Path
) -> None:
    directory = load(name, variant).directory

    def again(**how: Any) -> ModelFamily:
        return FAMILIES.load(name).load(
            directory, device="cpu", dtype=dtype, embeddings_cache=tmp_path, **how
        )

    there, here = again(), again(read_transformer=False)
    weights = base_state(there.transformer)
    with filling(here.transformer) as targets:
        assert {n: (t.shape, t.dtype) for n, t in targets.items()} == {
            n: (t.shape, t.dtype) for n, t in weights.items()
        }
        for key, target in targets.items():
            target.copy_(weights[key])
    bits = {key: tensor.clone().view(torch.uint8) for key, tensor in base_state(here.transformer).items()}
    assert all(torch.equal(bits[key], tensor.view(torch.uint8)) for key, tensor in weights.items())
    # A mapped file's tensors begin anywhere, a peer's at multiples of 64: some CPU kernels round by address.
    for tensor in (*there.transformer.parameters(), *there.transformer.buffers()):
        tensor.data = tensor.data.clone()
    setting = Setting(CASES[name].size, steps=2, embedded=here.embedded_guidance)
    assert np.array_equal(draw(here, CASES[name], setting)[1], draw(there, CASES[name], setting)[1])


@pytest.mark.slow  # four processes load everything
def test_shards_of_two_transformers_get_the_gradients_of_whole_ones(load: Load, tmp_path: Path) -> None:
    """Each rank has one row, of either transformer: the ranks' collectives must still match."""
    assert family_ranks.gradient_difference("wan", load("wan", 2).directory, tmp_path) <= TOLERANCE


@pytest.mark.parametrize("name", CASES)
def test_loading_lines_call_the_pipeline_as_it_can_be_called(name: str, tmp_path: Path) -> None:
    family = FAMILIES.load(name)
    scale = 1.0 if family.guidance_argument is None else 3.0
    settings = {"model": {"family": name}, "rollout": {"true_cfg_scale": scale}}
    lines = loading_snippet(build_config(settings, "the test"), tmp_path)
    calls = [node for node in ast.walk(ast.parse(lines)) if isinstance(node, ast.Call)]
    (call,) = [node for node in calls if isinstance(node.func, ast.Name) and node.func.id == "pipe"]
    pipeline = getattr(diffusers, family.pipeline_class)
    given = {str(keyword.arg): keyword.value for keyword in call.keywords}
    inspect.signature(pipeline.__call__).bind(None, *call.args, **given)
    assert given.keys() >= family.call_arguments(3.0, family.embedded_guidance).keys()
    assert any(name.startswith("negative_prompt") for name in given) == (scale > 1)
