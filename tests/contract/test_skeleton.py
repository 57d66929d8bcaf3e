"""A family whose transformer a peer fills is the family that was read from disk, bit by bit."""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor

from spotlight.models.condition import Condition
from spotlight.models.families.qwen_image import QwenImage
from spotlight.models.media import MediaSize
from spotlight.models.peft_layers import LoraSpec
from spotlight.models.skeleton import base_state, filling, modules_of
from spotlight.models.slots import LoraSlots
from spotlight_files.model_errors import ModelError

SIZE = MediaSize(32, 32)


def load(pipeline: Path, cache: Path, dtype: torch.dtype, **options: bool) -> QwenImage:
    family = QwenImage.load(pipeline, device="cpu", dtype=dtype, embeddings_cache=cache, **options)
    assert isinstance(family, QwenImage)
    return family


@torch.no_grad()
def velocity(family: QwenImage) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    latents = torch.randn(2, *family.latent_shape(SIZE), generator=generator)
    condition = family.collate(
        [Condition({"embeds": torch.randn(n, 64, generator=generator)}) for n in (5, 7)]
    )
    return family.velocity(family.transformer, latents, torch.tensor([0.7, 0.3]), condition, None, SIZE)


def fill(family: QwenImage, tensors: Mapping[str, Tensor], names: Sequence[str] = ()) -> None:
    with filling(family.transformer) as targets:
        assert targets.keys() == tensors.keys()
        for name in names or tensors:
            targets[name].copy_(tensors[name])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_filled_and_read_are_bitwise_equal(random_pipeline: Path, tmp_path: Path, dtype: torch.dtype) -> None:
    disk = load(random_pipeline, tmp_path, dtype)
    bare = shutil.copytree(random_pipeline, tmp_path / "bare")
    for file in (bare / "transformer").glob("*.safetensors"):
        file.unlink()  # not needed, so not read
    filled = load(bare, tmp_path, dtype, read_transformer=False)
    fill(filled, base_state(disk.transformer))
    ours, theirs = filled.transformer.state_dict(), disk.transformer.state_dict()
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) and ours[name].dtype == dtype for name in ours)
    assert not any(p.requires_grad for p in filled.transformer.parameters())
    assert filled.transformer.training is disk.transformer.training is False
    expected = velocity(disk)
    assert bool(expected.isfinite().all())
    assert torch.equal(velocity(filled), expected)


def test_what_the_model_computes_itself_is_there(random_pipeline: Path, tmp_path: Path) -> None:
    disk = load(random_pipeline, tmp_path, torch.bfloat16)
    bare = load(random_pipeline, tmp_path, torch.bfloat16, read_transformer=False)
    compared = 0
    for name, module in disk.transformer.named_modules():
        other = bare.transformer.get_submodule(name)
        for key, value in vars(module).items():
            if isinstance(value, Tensor):
                compared += 1
                assert torch.equal(value, getattr(other, key)), f"{name}.{key}"
        for key, buffer in module.named_buffers(recurse=False):
            compared += 1
            assert other.get_buffer(key).dtype == buffer.dtype
    assert compared  # the rotary tables, which are no parameters


def test_without_weights_it_refuses_to_run(random_pipeline: Path, tmp_path: Path) -> None:
    family = load(random_pipeline, tmp_path, torch.float32, read_transformer=False)
    with pytest.raises(ModelError, match="loaded without them and never filled"):
        velocity(family)
    assert all(bool(tensor.isnan().all()) for tensor in base_state(family.transformer).values())


def test_filled_in_part_it_refuses_to_run(random_pipeline: Path, tmp_path: Path) -> None:
    family = load(random_pipeline, tmp_path, torch.float32, read_transformer=False)
    whole = base_state(load(random_pipeline, tmp_path, torch.float32).transformer)
    last = list(whole)[-1]
    with pytest.raises(ModelError, match=f"1 of {len(whole)} tensors .* first '{last}'"):
        fill(family, whole, list(whole)[:-1])
    with pytest.raises(KeyError, match="of a lender that died"):
        fill(family, whole, [*whole, "of a lender that died"])
    with pytest.raises(ModelError, match="never filled"):
        velocity(family)
    fill(family, whole)
    assert bool(velocity(family).isfinite().all())


def test_the_base_under_adapters_keeps_its_names_and_values(random_pipeline: Path, tmp_path: Path) -> None:
    disk = load(random_pipeline, tmp_path, torch.float32)
    plain = {name: tensor.clone() for name, tensor in base_state(disk.transformer).items()}
    slots = LoraSlots(disk.transformer, LoraSpec(rank=2, alpha=4.0, targets=("to_q", "to_k"), seed=1))
    for parameter in slots.trainable_parameters().values():
        parameter.data.normal_()
    base = base_state(disk.transformer)
    with slots.use("policy", merged=True):
        # A lender copies from its own thread while a rollout runs on merged weights.
        assert base.keys() == plain.keys()
        assert all(torch.equal(base[name], plain[name]) for name in plain)
        merged = base_state(disk.transformer)
        assert any(not torch.equal(merged[name], plain[name]) for name in plain)
    assert modules_of(base) == modules_of(plain) > 0
