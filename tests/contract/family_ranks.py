"""Ranks that predict a velocity together, for every family that splits its sequence, or train shards."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Mapping
from dataclasses import replace
from datetime import timedelta
from multiprocessing.queues import Queue
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from tests.contract.family_cases import CASES, PROMPTS, FamilyCase
from torch.distributed.tensor import DTensor

from spotlight.models.family import ModelFamily
from spotlight.models.slots import LoraSlots, LoraSpec
from spotlight.registry import FAMILIES
from spotlight.rollout.sequence_parallel.ulysses import SequenceParallel
from spotlight.training.sharding import Ranks, shard

RANKS = 4
_processes = multiprocessing.get_context("forkserver")
Pipelines = Mapping[tuple[str, int], Path]
"""By family and variant."""
Differences = Mapping[tuple[str, int, int], tuple[float, bool]]


def differences(pipelines: Pipelines, scratch: Path) -> Differences:
    """By family, variant and degree: the largest difference to the unsplit velocity, and whether all ranks
    agree.
    """
    found: Differences = _in_ranks(_run, dict(pipelines), scratch)
    return found


def gradient_difference(name: str, pipeline: Path, scratch: Path) -> float:
    """Largest difference of a LoRA's gradients between shards, a row each, and the whole batch in one."""
    found: float = _in_ranks(_train, {(name, 0): pipeline}, scratch)
    return found


def _in_ranks(work: Callable[..., None], pipelines: Pipelines, scratch: Path) -> Any:
    results: Queue[Any] = _processes.Queue()
    ranks = [
        _processes.Process(target=work, args=(rank, pipelines, scratch, results)) for rank in range(RANKS)
    ]
    for process in ranks:
        process.start()
    try:
        found = results.get(timeout=200)
        for process in ranks:
            process.join(60)
    finally:
        for process in ranks:
            process.kill()
    return found


def _join(rank: int, scratch: Path) -> None:
    torch.set_num_threads(1)
    store = dist.FileStore(str(scratch / "store"), RANKS)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=RANKS, timeout=timedelta(seconds=180))


def _load(name: str, directory: Path, cache: Path) -> ModelFamily:
    return FAMILIES.load(name).load(
        directory,
        device="cpu",
        dtype=torch.float32,
        embeddings_cache=cache,
        max_text_tokens=CASES[name].max_text_tokens,
    )


def _train(rank: int, pipelines: Pipelines, scratch: Path, results: Queue[float]) -> None:
    _join(rank, scratch)
    ((name, _), directory), *_ = pipelines.items()
    rows = torch.tensor([0.3, 0.9, 0.95, 0.2])  # noise levels
    gradients = []
    for sharded in (False, True):
        family = _load(name, directory, scratch / f"{name}-{rank}")
        size = CASES[name].size
        slots = LoraSlots(family.transformer, LoraSpec(rank=2, alpha=2.0, targets=family.lora_targets))
        generator = torch.Generator().manual_seed(1)
        slots.load_state(
            "policy", {n: torch.randn(t.shape, generator=generator) for n, t in slots.state("policy").items()}
        )
        latents = torch.randn(RANKS, *family.latent_shape(size), generator=generator)
        if sharded:
            shard(slots, Ranks(rank, RANKS))
        mine = slice(rank, rank + 1) if sharded else slice(None)
        condition = family.collate(family.encode(CASES[name].inputs(PROMPTS[:1])) * len(rows[mine]))
        with slots.use("policy") as model:
            velocity = family.velocity(model, latents[mine], rows[mine], condition, None, size)
        (velocity.square().sum() / len(velocity)).backward()
        gradients.append(
            {
                n: parameter.grad.full_tensor() if isinstance(parameter.grad, DTensor) else parameter.grad
                for n, parameter in slots.trainable_parameters().items()
            }
        )
    whole, shards = gradients
    largest = max(tensor.abs().max() for tensor in whole.values())
    if rank == 0:
        results.put(max(((shards[n] - whole[n]).abs().max() / largest).item() for n in whole))
    dist.barrier()
    dist.destroy_process_group()


def _run(rank: int, pipelines: Pipelines, scratch: Path, results: Queue[Differences]) -> None:
    _join(rank, scratch)
    pair = dist.new_group([0, 1])
    found: dict[tuple[str, int, int], tuple[float, bool]] = {}
    for (name, variant), directory in pipelines.items():
        case = CASES[name]
        family = _load(name, directory, scratch / f"{name}-{rank}")
        whole = _velocity(family, case)
        parallel = SequenceParallel([family.transformer])
        for group in (pair, dist.group.WORLD) if rank < 2 else (dist.group.WORLD,):
            assert group is not None
            parallel.enter(group)
            together = _velocity(family, case)
            parallel.leave()
            everyone = [torch.empty_like(together) for _ in range(group.size())]
            dist.all_gather(everyone, together, group=group)
            agree = all(torch.equal(other, together) for other in everyone)
            found[name, variant, group.size()] = ((together - whole).abs().max().item(), agree)
    if rank == 0:
        results.put(found)
    dist.barrier()
    dist.destroy_process_group()


@torch.no_grad()
def _velocity(family: ModelFamily, case: FamilyCase) -> torch.Tensor:
    setting = replace(case.settings[-1], size=case.size)  # whose tokens every degree divides
    return family.velocity(
        family.transformer,
        torch.randn(
            len(PROMPTS), *family.latent_shape(setting.size), generator=torch.Generator().manual_seed(0)
        ),
        torch.linspace(0.3, 0.9, len(PROMPTS)),
        family.collate(family.encode(case.inputs(PROMPTS))),
        case.guidance(family, setting),
        setting.size,
    )
