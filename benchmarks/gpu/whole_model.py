"""A pipeline directory with the weights of a whole model, for commands that read it themselves.

The weights are random, drawn on the device and written by several threads into memory (``/dev/shm``), from
where each process maps them.
"""

from __future__ import annotations

import gc
import json
import shutil
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from benchmarks.gpu.lab import SEED, Lab
from benchmarks.gpu.suite import IN_MEMORY, Outcome, Skip
from spotlight.models.family import ModelFamily
from spotlight.models.family_facts import TinyModel
from spotlight.models.skeleton import filling
from spotlight.registry import FAMILIES
from spotlight_plan.commands.gpu.random_blocks import draw

FAMILY_BY_MEMORY = ((100, "qwen-image"), (0, "z-image"))
"""The first whose GiB of GPU memory are there: a learner and a worker hold the model once each."""
_RUNS_BYTES = 12e9
"""Checkpoints and exports beside the weights."""
_SHARD_BYTES = 300e6
_THREADS = 12
_TEXT_WIDTH = {"qwen-image": "joint_attention_dim", "z-image": "cap_feat_dim"}
"""Key of the transformer's configuration that the text encoder's width follows."""


def write_weights(lab: Lab) -> Outcome:
    """GB/s of drawing and writing the model."""
    began = time.monotonic()
    directory = whole_pipeline(lab)
    seconds = time.monotonic() - began
    size = sum(path.stat().st_size for path in (directory / "transformer").glob("*.safetensors"))
    details = {"gb": size / 1e9, "seconds": seconds, "family": family_name(lab), "where": str(directory)}
    return Outcome(size / 1e9 / seconds, details)


def family_name(lab: Lab) -> str:
    """Of the model: ``--model``, or the largest that the device has memory for."""
    if lab.model:
        return lab.model
    if lab.device.type != "cuda":
        return FAMILY_BY_MEMORY[0][1]
    there = torch.cuda.mem_get_info(lab.device)[1] / 2**30
    return next(name for least, name in FAMILY_BY_MEMORY if there >= least)


def storage(lab: Lab) -> Path:
    """Directory for weights and runs: in memory, or where that has no room beside the suite's other files.

    Raises:
        Skip: neither has room.
    """
    if lab.tiny:
        return lab.home
    family = FAMILIES.load(family_name(lab))
    places = (IN_MEMORY / lab.home.name, lab.home)
    made = [place for place in places if (place / family.name).exists()]
    wanted = 2 * family.published[family.tiny_models[0].model].parameters + _RUNS_BYTES
    free = {place: shutil.disk_usage(place.parent).free for place in places}
    able = made or [place for place, there in free.items() if there >= wanted]
    if not able:
        found = " and ".join(f"{place.parent}: {there / 1e9:.0f}" for place, there in free.items())
        raise Skip(f"{family.name} and its runs take {wanted / 1e9:.0f} GB; found {found}")
    return able[0]


def whole_pipeline(lab: Lab) -> Path:
    """The pipeline directory; made once. Raises :class:`Skip`: there is no room for it."""
    lab.drop()
    family, where = FAMILIES.load(family_name(lab)), storage(lab)
    directory, aside = where / family.name, where / f"writing-{family.name}"
    if directory.exists():
        return directory
    shutil.rmtree(aside, ignore_errors=True)  # of a row that was cut off
    where.mkdir(parents=True, exist_ok=True)
    if lab.tiny:
        family.tiny(aside, SEED)
    else:
        _write_all_but_transformer(family, aside)
        _write_transformer(family, aside, lab.device)
        gc.collect()
        lab.drop()
    aside.rename(directory)
    return directory


def _write_all_but_transformer(family: type[ModelFamily], directory: Path) -> None:
    """VAE as published; a text encoder of two layers and the published width."""
    small = family.tiny_models[0]
    known = family.published[small.model].configs["transformer"]
    changes = {part: change for part, change in small.changes.items() if part != "vae"}
    changes["text_encoder"] = {**changes["text_encoder"], "width": known[_TEXT_WIDTH[family.name]]}

    class OfFullWidth(family):  # type: ignore[valid-type, misc]
        tiny_models = (TinyModel(small.model, changes),)

    OfFullWidth.tiny(directory, SEED)
    shutil.rmtree(directory / "transformer")
    (directory / "transformer").mkdir()
    (kind,) = family.components["transformer"].classes
    (directory / "transformer" / "config.json").write_text(
        json.dumps({"_class_name": kind, **known}), encoding="utf-8"
    )


def _write_transformer(family: type[ModelFamily], directory: Path, device: torch.device) -> None:
    made = family.load(
        directory,
        device=device,
        dtype=torch.bfloat16,
        embeddings_cache=directory / "embeddings",
        read_transformer=False,
    )
    with filling(made.transformer) as targets:
        draw(targets, SEED)
    write_shards(targets, directory / "transformer", _SHARD_BYTES)


def write_shards(tensors: Mapping[str, Tensor], folder: Path, shard_bytes: float) -> None:
    """Write a component's weights as diffusers names and indexes them, several files at a time."""
    shards: list[dict[str, Tensor]] = []
    room = 0.0
    for name, tensor in tensors.items():
        if not shards or room < tensor.nbytes:
            shards.append({})
            room = shard_bytes
        shards[-1][name] = tensor
        room -= tensor.nbytes
    stem, count = "diffusion_pytorch_model", len(shards)
    files = [f"{stem}-{number:05d}-of-{count:05d}.safetensors" for number in range(1, count + 1)]

    def write(file: str, shard: Mapping[str, Tensor]) -> None:
        save_file({name: _on_host(tensor) for name, tensor in shard.items()}, folder / file, {"format": "pt"})

    with ThreadPoolExecutor(_THREADS) as pool:
        list(pool.map(write, files, shards))
    index = {
        "metadata": {"total_size": sum(tensor.nbytes for tensor in tensors.values())},
        "weight_map": {name: file for file, shard in zip(files, shards, strict=True) for name in shard},
    }
    (folder / f"{stem}.safetensors.index.json").write_text(json.dumps(index), encoding="utf-8")


def _on_host(tensor: Tensor) -> Tensor:
    # Pinned memory is used again for the next file; other memory would be mapped and zeroed anew.
    host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)
    return host.copy_(tensor)
