"""Weights that diffusers keeps in float32 stay float32 where a model is sharded and computes in bfloat16.

Its files are read after sharding, each rank's rows alone, and give the weights that loading the whole gives.
"""

from __future__ import annotations

import multiprocessing
import time
from contextlib import suppress
from datetime import timedelta
from functools import partial
from multiprocessing.context import ForkServerProcess
from multiprocessing.queues import Queue
from pathlib import Path
from queue import Empty
from typing import Any

import diffusers
import pytest
import torch
import torch.distributed as dist
from tests.contract.family_cases import CASES, PROMPTS
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from spotlight.models.family import ModelFamily
from spotlight.models.skeleton import base_state
from spotlight.models.slots import CopySlots, LoraSlots, LoraSpec, WeightSlots
from spotlight.registry import FAMILIES
from spotlight.training.sharding import shard_module
from spotlight_files.pipeline_export import keeps_float32

_processes = multiprocessing.get_context("forkserver")
LEVELS = torch.tensor([0.3, 0.9])


@pytest.fixture(scope="module")
def pipeline(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("wan") / "pipeline"
    FAMILIES.load("wan").tiny(directory, seed=0)
    return directory


@pytest.mark.parametrize(
    ("mode", "world"),
    [("lora", 2), ("full", 2), *(pytest.param(mode, 1, marks=pytest.mark.slow) for mode in ("lora", "full"))],
)
def test_kept_weights_are_float32_in_the_forward_and_gradients_are_the_whole_models(
    pipeline: Path, world: int, mode: str, tmp_path: Path
) -> None:
    results: Queue[Any] = _processes.Queue()
    ranks = [
        _processes.Process(target=_train, args=(rank, world, mode, pipeline, tmp_path, results))
        for rank in range(world)
    ]
    for process in ranks:
        process.start()
    try:
        dtypes, difference = _answer(results, ranks)
        for process in ranks:
            process.join(60)
    finally:
        for process in ranks:
            process.kill()
    kept = {name for name in dtypes if keeps_float32(diffusers.WanTransformer3DModel, name)}
    assert {"scale_shift_table", "blocks.1.scale_shift_table", "blocks.0.norm2.weight"} <= kept
    assert {dtypes[name] for name in kept} == {torch.float32}
    assert {dtypes[name] for name in dtypes.keys() - kept} == {torch.bfloat16}
    assert difference < 0.02


def _answer(results: Queue[Any], ranks: list[ForkServerProcess]) -> Any:
    """The main rank's, at once an error where a rank has failed."""
    give_up = time.monotonic() + 200
    while time.monotonic() < give_up:
        with suppress(Empty):
            return results.get(timeout=0.5)
        assert not any(process.exitcode for process in ranks), "a rank failed"
    raise TimeoutError("no answer")


def _train(rank: int, world: int, mode: str, pipeline: Path, scratch: Path, results: Queue[Any]) -> None:
    torch.set_num_threads(1)
    store = dist.FileStore(str(scratch / "store"), world)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world, timeout=timedelta(seconds=180))
    gradients, weights = [], list[dict[str, torch.Tensor]]()
    seen: dict[str, torch.dtype] = {}
    for sharded in (False, True):
        family, slots = _policy(mode, pipeline, scratch / str(rank), deferred=sharded)
        module: Any = slots.modules()["policy"]
        module.enable_gradient_checkpointing()
        if sharded:
            shard_module(module, torch.bfloat16)
            assert all(p.is_meta for name, p in module.named_parameters() if "lora" not in name)
            family.read_weights([module])
            _watch(module, seen)
        weights.append({name: _whole(tensor) for name, tensor in base_state(module).items()})
        size = CASES["wan"].size
        latents = torch.randn(2, *family.latent_shape(size), generator=torch.Generator().manual_seed(2))
        mine = slice(rank, rank + 1) if sharded and world == 2 else slice(None)
        condition = family.collate(family.encode(PROMPTS[:1]) * len(LEVELS[mine]))
        for _ in range(2):  # the second pass begins as the first ended
            module.zero_grad()
            autocast = torch.autocast("cpu", torch.bfloat16, enabled=mode == "full")
            with slots.use("policy") as model, autocast:
                velocity = family.velocity(model, latents[mine], LEVELS[mine], condition, None, size)
            (velocity.square().sum() / len(velocity)).backward()
        gradients.append({n: _whole(parameter.grad) for n, parameter in slots.trainable_parameters().items()})
    read, parts = weights
    assert read.keys() == parts.keys()
    assert all(torch.equal(parts[name], tensor) for name, tensor in read.items())
    whole, shards = gradients
    largest = max(tensor.abs().max() for tensor in whole.values())
    if rank == 0:
        results.put((seen, max(((shards[n] - whole[n]).abs().max() / largest).item() for n in whole)))
    dist.barrier()
    dist.destroy_process_group()


def _policy(mode: str, pipeline: Path, cache: Path, *, deferred: bool) -> tuple[ModelFamily, WeightSlots]:
    family = FAMILIES.load("wan").load(
        pipeline,
        device="cpu",
        dtype=torch.bfloat16 if mode == "lora" else torch.float32,
        embeddings_cache=cache,
        max_text_tokens=CASES["wan"].max_text_tokens,
        deferred=deferred,
    )
    if mode != "lora":
        return family, CopySlots(family.transformer)
    spec = LoraSpec(rank=2, alpha=2.0, targets=family.lora_targets)
    slots = LoraSlots(family.transformer, spec, compute=torch.bfloat16)
    generator = torch.Generator().manual_seed(1)
    random = {n: torch.randn(t.shape, generator=generator) for n, t in slots.state("policy").items()}
    slots.load_state("policy", random)
    return family, slots


def _watch(module: nn.Module, seen: dict[str, torch.dtype]) -> None:
    """Note the dtype of every weight as a forward finds it."""

    def note(part: nn.Module, _: object, name: str) -> None:
        prefix = f"{name}." if name else ""
        for key, parameter in part.named_parameters():
            if not isinstance(parameter, DTensor):
                seen[prefix + key] = parameter.dtype

    for name, part in module.named_modules():
        if isinstance(part, FSDPModule):
            part.register_forward_pre_hook(partial(note, name=name))


def _whole(gradient: torch.Tensor | None) -> torch.Tensor:
    assert gradient is not None
    return gradient.full_tensor() if isinstance(gradient, DTensor) else gradient
