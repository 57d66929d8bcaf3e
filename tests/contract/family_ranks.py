"""Ranks that predict a velocity together, for every family that splits its sequence."""

from __future__ import annotations

import multiprocessing
from collections.abc import Mapping
from datetime import timedelta
from multiprocessing.queues import Queue
from pathlib import Path

import torch
import torch.distributed as dist
from tests.contract.family_cases import CASES, PROMPTS, FamilyCase

from spotlight.models.family import ModelFamily
from spotlight.registry import FAMILIES
from spotlight.rollout.sequence_parallel.ulysses import SequenceParallel

RANKS = 4
_processes = multiprocessing.get_context("forkserver")
Differences = Mapping[tuple[str, int], tuple[float, bool]]


def differences(pipelines: Mapping[str, Path], scratch: Path) -> Differences:
    """By family and degree: the largest difference to the unsplit velocity, and whether all ranks agree."""
    results: Queue[Differences] = _processes.Queue()
    ranks = [
        _processes.Process(target=_run, args=(rank, dict(pipelines), scratch, results))
        for rank in range(RANKS)
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


def _run(rank: int, pipelines: Mapping[str, Path], scratch: Path, results: Queue[Differences]) -> None:
    torch.set_num_threads(1)
    store = dist.FileStore(str(scratch / "store"), RANKS)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=RANKS, timeout=timedelta(seconds=180))
    pair = dist.new_group([0, 1])
    found: dict[tuple[str, int], tuple[float, bool]] = {}
    for name, directory in pipelines.items():
        case = CASES[name]
        family = FAMILIES.load(name).load(
            directory,
            device="cpu",
            dtype=torch.float32,
            embeddings_cache=scratch / f"{name}-{rank}",
            max_text_tokens=case.max_text_tokens,
        )
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
            found[name, group.size()] = ((together - whole).abs().max().item(), agree)
    if rank == 0:
        results.put(found)
    dist.barrier()
    dist.destroy_process_group()


@torch.no_grad()
def _velocity(family: ModelFamily, case: FamilyCase) -> torch.Tensor:
    setting = case.settings[-1]
    return family.velocity(
        family.transformer,
        torch.randn(
            len(PROMPTS), *family.latent_shape(setting.size), generator=torch.Generator().manual_seed(0)
        ),
        torch.linspace(0.3, 0.9, len(PROMPTS)),
        family.collate(family.encode(PROMPTS)),
        case.guidance(family, setting),
        setting.size,
    )
