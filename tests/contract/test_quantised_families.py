"""A base in few bits is, for every family, the model whose weights are what was quantised: to the bit."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import diffusers
import pytest
import torch
from safetensors.torch import load_file
from tests.contract.family_cases import CASES
from tests.invariant.learner_world import (
    FamilyWorld,
    algorithm,
    make_learner,
    roll_out,
    train_batch,
)
from torch import Tensor, nn

from spotlight.models.experts import denoisers
from spotlight.models.families.qwen_image import QwenImage
from spotlight.models.family import ModelFamily
from spotlight.models.peft_layers import LoraSpec
from spotlight.models.shared.quantised import held, held_bytes, is_held
from spotlight.models.shared.transformer_files import weight_sources
from spotlight.models.skeleton import base_state, filling
from spotlight.models.slots import LoraSlots
from spotlight.registry import FAMILIES
from spotlight.training.learner import Learner
from spotlight.training.learner_state import StateError
from spotlight_files.model_errors import ModelError
from spotlight_kernels.quantised.linear import QuantisedLinear
from spotlight_weights.flat import digest_of

KINDS = ("int8", "nf4")
ERRORS = {"int8": 0.012, "nf4": 0.11}
"""Largest relative distance of a model's weights from those on file; Gaussian ones in rows of 3072: .0085 and
.092 (bitsandbytes' NF4: .092).
"""
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
EVERY = [
    pytest.param(name, kind, marks=() if kind == KINDS[i % 2] else pytest.mark.slow)
    for i, name in enumerate(CASES)
    for kind in KINDS
]

pytestmark = pytest.mark.filterwarnings("ignore:Already found a `peft_config`")


def load(name: str, folder: Path, **options: Any) -> ModelFamily:
    case, kind = CASES[name], FAMILIES.load(name)
    if not (folder / "pipeline").exists():
        variant = case.first[0]
        kind.tiny(folder / "pipeline", seed=variant, variant=variant)
    return kind.load(
        folder / "pipeline",
        **{"device": "cpu", "dtype": torch.float32, **options},
        embeddings_cache=folder / "embeddings",
        max_text_tokens=case.max_text_tokens,
    )


def dequantised(quantised: ModelFamily, plain: ModelFamily) -> ModelFamily:
    """``plain`` with the weights that ``quantised`` holds."""
    with torch.no_grad():
        for name, layer in held(quantised.transformer).items():
            weight = plain.transformer.get_submodule(name).weight
            assert isinstance(weight, Tensor)
            weight.copy_(layer.whole(weight.dtype))
    return plain


def learner_of(name: str, family: ModelFamily, algo: str = "flow-grpo", **settings: Any) -> Any:
    world = FamilyWorld(family, CASES[name].size, CASES[name].inputs)
    half = {} if family.dtype == torch.float32 else {"autocast": "bfloat16", "dtype": torch.bfloat16}
    return world, make_learner(world, algorithm(algo), **half, **settings)


def trained(name: str, family: ModelFamily, **settings: Any) -> tuple[Learner, dict[str, float]]:
    """After an update of real rollouts of its own, in batches equal in rollout and update."""
    world, learner = learner_of(name, family, **settings)
    samples = roll_out(world, learner, batch=6)
    return learner, train_batch(learner, samples, 6).flat()


@pytest.mark.parametrize(("name", "kind"), EVERY)
@pytest.mark.parametrize("dtype", ["float32", pytest.param("bfloat16", marks=pytest.mark.slow)])
def test_learns_to_the_bit_what_the_dequantised_model_learns(
    name: str, kind: str, dtype: str, tmp_path: Path
) -> None:
    quantised = load(name, tmp_path, quantize=kind, dtype=DTYPES[dtype])
    plain = dequantised(quantised, load(name, tmp_path, dtype=DTYPES[dtype]))
    ours, row = trained(name, quantised)
    theirs, expected = trained(name, plain)
    replayed = [value for curve, value in row.items() if curve.startswith("replay/")]
    assert replayed
    assert max(replayed) == 0
    assert row["train/ratio_max"] == 1
    del row["train/step_s"], expected["train/step_s"]
    assert row == expected
    for slot in ours.slots.slots:
        if slot != "reference":
            wanted = theirs.slots.state(slot)
            assert all(torch.equal(tensor, wanted[key]) for key, tensor in ours.slots.state(slot).items())


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("recompute", ["elementwise", "blocks"])
def test_recomputation_changes_no_bit(kind: str, recompute: str, tmp_path: Path) -> None:
    family = load("qwen-image", tmp_path, quantize=kind)
    kept, _ = trained("qwen-image", family)
    again, _ = trained("qwen-image", family, recompute=recompute)
    wanted = kept.slots.state("policy")
    assert all(torch.equal(tensor, wanted[key]) for key, tensor in again.slots.state("policy").items())


@pytest.mark.parametrize(("name", "kind"), EVERY)
def test_holds_what_is_on_file_within_its_error(name: str, kind: str, tmp_path: Path) -> None:
    family = load(name, tmp_path, quantize=kind)
    names = list(denoisers(family.transformer))
    read = weight_sources(family.files, names, None).reader()
    layers = held(family.transformer)
    errors = []
    for layer, module in layers.items():
        stored = read(f"{layer}.weight").float()
        errors.append(float((module.whole(torch.float32) - stored).norm() / stored.norm()))
    assert max(errors) < ERRORS[kind]
    inside = {n for n, m in family.transformer.named_modules() if isinstance(m, nn.Linear) and is_held(n)}
    assert inside == layers.keys()
    assert not any("embed" in layer or layer == "proj_out" for layer in layers)
    own = {n: t for n, t in base_state(family.transformer).items() if n.rpartition(".")[0] not in layers}
    assert all(torch.equal(tensor, read(name).to(tensor.dtype)) for name, tensor in own.items())


@pytest.mark.parametrize(("name", "kind"), EVERY)
@pytest.mark.parametrize("dtype", ["float32", pytest.param("bfloat16", marks=pytest.mark.slow)])
def test_merged_weights_are_those_of_the_files_with_the_adapter(
    name: str, kind: str, dtype: str, tmp_path: Path
) -> None:
    merged = {}
    for quantize in (kind, "none"):
        family = load(name, tmp_path, quantize=quantize, dtype=DTYPES[dtype])
        files = weight_sources(family.files, list(denoisers(family.transformer)), None).reader()
        slots = LoraSlots(family.transformer, LoraSpec(4, 8.0, family.lora_targets), files=files)
        weights = slots.state("policy")
        generator = torch.Generator().manual_seed(5)
        drawn = {key: torch.randn(tensor.shape, generator=generator) for key, tensor in weights.items()}
        slots.load_state("policy", drawn)
        merged[quantize] = slots.merged_state("policy")
    assert merged[kind].keys() == merged["none"].keys()
    for key, tensor in merged[kind].items():
        assert tensor.dtype == merged["none"][key].dtype, key
        assert torch.equal(tensor, merged["none"][key]), key


@pytest.mark.parametrize("kind", KINDS)
def test_equal_files_are_held_equally_whatever_the_type_and_from_a_peer(kind: str, tmp_path: Path) -> None:
    one, half = (load("wan", tmp_path, quantize=kind, dtype=dtype) for dtype in DTYPES.values())
    packed = [
        {key: part for key, part in base_state(family.transformer).items() if key.rpartition(".")[0] in names}
        for family in (one, half)
        for names in [held(family.transformer).keys()]
    ]
    biases = {key for key in packed[0] if key.endswith(".bias")}
    assert digest_of({k: v for k, v in packed[0].items() if k not in biases}) == digest_of(
        {k: v for k, v in packed[1].items() if k not in biases}
    )
    empty = load("wan", tmp_path, quantize=kind, read_transformer=False)
    source = base_state(one.transformer)
    with (
        pytest.raises(ModelError, match="were not filled"),
        filling(load("wan", tmp_path, quantize=kind, read_transformer=False).transformer),
    ):
        pass
    with filling(empty.transformer) as targets:
        assert targets.keys() == source.keys()
        for key, target in targets.items():
            target.copy_(source[key])
    assert digest_of(base_state(empty.transformer)) == digest_of(source)


def test_files_of_another_shape_are_refused(tmp_path: Path) -> None:
    load("qwen-image", tmp_path)
    folder = tmp_path / "pipeline" / "transformer"
    config = (folder / "config.json").read_text()
    (folder / "config.json").write_text(config.replace('"joint_attention_dim": ', '"joint_attention_dim": 1'))
    with pytest.raises(ModelError, match="has shape"):
        load("qwen-image", tmp_path, quantize="int8")


def test_a_sharded_file_is_read_too(tmp_path: Path) -> None:
    family = load("z-image", tmp_path)
    cut, key = tmp_path / "cut", "layers.0.attention.to_q"
    transformer: Any = family.transformer
    transformer.save_pretrained(cut, max_shard_size="200KB")
    assert len(list(cut.glob("*.safetensors"))) > 1
    again = load("z-image", tmp_path, quantize="nf4", transformer=str(cut))
    layer = again.transformer.get_submodule(key)
    assert isinstance(layer, QuantisedLinear)
    files = map(load_file, cut.glob("*.safetensors"))
    whole = next(tensors[f"{key}.weight"] for tensors in files if f"{key}.weight" in tensors)
    assert float((layer.whole(torch.float32) - whole).norm() / whole.norm()) < ERRORS["nf4"]


@pytest.mark.slow  # a process, and a model of 130 MB
@pytest.mark.parametrize("kind", KINDS)
def test_the_model_is_never_whole_in_memory(kind: str, tmp_path: Path) -> None:
    small, large = tmp_path / "small", tmp_path / "large"
    for directory in (small, large):
        QwenImage.tiny(directory, seed=0)
    folder = large / "transformer"
    config = json.loads((folder / "config.json").read_text())
    shutil.rmtree(folder)
    wide = {"num_layers": 7, "num_attention_heads": 8, "attention_head_dim": 64}
    made = diffusers.QwenImageTransformer2DModel.from_config(config | wide | {"axes_dims_rope": [16, 24, 24]})
    made.to(torch.bfloat16).save_pretrained(folder, max_shard_size="5MB")
    whole = 2 * sum(weight.numel() for weight in made.parameters())
    command = [sys.executable, "-c", _GROWTH, *map(str, (small, large)), kind]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    layers = [w for n, w in made.named_parameters() if w.ndim == 2 and is_held(n)]
    packed = sum(held_bytes(kind, *w.shape) for w in layers) + whole - 2 * sum(w.numel() for w in layers)
    one = 32 * max(w.numel() for w in layers)  # while a weight is quantised, and what malloc keeps of it
    assert int(done.stdout.split()[-1]) < packed + one < whole


_GROWTH = """
import sys
from pathlib import Path
import torch
from spotlight.models.families.qwen_image import QwenImage

def memory(which):
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(which))

small, large, quantize = sys.argv[1:]
for path in (small, large):
    before = memory("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")
    family = QwenImage.load(
        path, device="cpu", dtype=torch.bfloat16, embeddings_cache=Path(small), quantize=quantize
    )
print(memory("VmHWM") - before)
"""


def test_checkpoints_are_for_the_base_that_they_were_trained_beside(tmp_path: Path) -> None:
    _, learner = learner_of("qwen-image", load("qwen-image", tmp_path, quantize="nf4"))
    learner.save(tmp_path / "state")
    learner.load(tmp_path / "state")
    next(iter(learner.slots.packed().values()))[0] ^= 1
    with pytest.raises(StateError, match="trained beside a quantised base of digest"):
        learner.load(tmp_path / "state")
    _, plain = learner_of("qwen-image", load("qwen-image", tmp_path))
    with pytest.raises(StateError, match="and this one has none"):
        plain.load(tmp_path / "state")
