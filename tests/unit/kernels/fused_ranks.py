"""What each of two gloo ranks does in test_fused_ranks.py."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from fused_world import FusedWorld, Predicting
from tests.invariant import learner_world
from tests.invariant.learner_world import algorithm, make_learner
from torch import Tensor
from torch.distributed.tensor import DTensor

from spotlight.models import peft_layers
from spotlight.rollout.sequence_parallel.ulysses import SequenceParallel
from spotlight.training.learner import Learner, TrainingSample
from spotlight.training.sharding import Ranks, process_group, shard

Tensors: TypeAlias = dict[str, Tensor]
UPDATES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
"""Types of base and gathered adapters."""
SPLIT = ("qwen-image", "flux", "hunyuan-video", "wan")
SHARDED = ("wan", "krea-2")
"""Whose blocks have weights that stay float32, so that parts of blocks are gathered on their own."""
HALF = torch.bfloat16


def learner_of(world: FusedWorld, dtype: torch.dtype, ranks: Ranks | None = None) -> Learner:
    half: dict[str, Any] = {"dtype": HALF, "autocast": "bfloat16", "recompute": "blocks"}
    algo = algorithm("diffusion-nft", train_timesteps=1)
    learner = make_learner(world, algo, ranks=ranks, epsilon=1e-6, **(half if dtype == HALF else {}))
    if world.fused:
        peft_layers.fuse(learner.family.transformer)
    return learner


def update(learner: Learner, samples: list[TrainingSample]) -> tuple[Tensors, Tensors]:
    """Of a rank's share of the samples: the gradients of all ranks, and the weights after it."""
    held = slice(learner.ranks.rank, None, learner.ranks.world)
    mine = [sample.key for sample in samples[held]]
    samples = [sample if sample.key in mine else replace(sample, tensors=None) for sample in samples]
    slopes = {
        name: _whole(each) for name, each in learner_world.gradients(learner, samples, len(samples)).items()
    }
    learner.step()
    return slopes, {name: _whole(each) for name, each in learner.slots.state("policy").items()}


def gradients(predicting: Predicting) -> Tensors:
    """Of adapters."""
    with predicting.slots.use("policy"):
        predicting().float().square().sum().backward()  # type: ignore[no-untyped-call]
    parameters = predicting.slots.trainable_parameters().items()
    return {name: _whole(p.grad) for name, p in parameters if p.grad is not None}


def _whole(tensor: Tensor) -> Tensor:
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).clone()


def main(rank: int, port: int, pipeline: Path, folder: Path) -> None:
    torch.set_num_threads(1)
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    found: dict[str, Any] = {}
    with process_group(torch.device("cpu"), timeout_s=120) as ranks:
        world = FusedWorld(pipeline, folder / f"cache{rank}")
        samples = torch.load(folder / "samples.pt", weights_only=False)
        for name, dtype in UPDATES.items():
            found[name] = update(learner_of(world, dtype, ranks), samples)
        for name in SHARDED:
            predicting = Predicting(name, folder / name, fused=True, dtype=HALF)
            shard(predicting.slots, ranks, HALF)
            found[f"sharded {name}"] = gradients(predicting)
        assert dist.group.WORLD is not None
        for name in SPLIT:
            predicting = Predicting(name, folder / name, fused=True, text=2)
            parallel = SequenceParallel([predicting.family.transformer])
            parallel.enter(dist.group.WORLD)
            with torch.no_grad(), predicting.slots.use("policy"):
                together = predicting()
            parallel.leave()
            everyone = [torch.empty_like(together) for _ in range(ranks.world)]
            dist.all_gather(everyone, together.contiguous())
            found[f"split {name}"] = (together, all(torch.equal(each, together) for each in everyone))
        if ranks.is_main:
            torch.save(found, folder / "ranks.pt")
