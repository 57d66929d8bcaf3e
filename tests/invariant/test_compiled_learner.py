"""Compiled blocks train what eager ones do where activations are recomputed and ranks share the model."""

from __future__ import annotations

import os
import socket
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.multiprocessing as mp
from learner_world import World, algorithm, cut, make_slots, roll_out
from torch.distributed.tensor import DTensor

from spotlight.config.sections.learner_section import LearnerConfig
from spotlight.models.kernels.regional import compile_blocks
from spotlight.training.learner import Learner, TrainingGuidance
from spotlight.training.sharding import Ranks, RolloutGathering, process_group

CPU = torch.device("cpu")
ROUNDING = 1e-5
"""Of gradients, over their largest."""

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(1800),
    pytest.mark.filterwarnings("ignore:Already found a `peft_config`"),
]


def make_learner(
    world: World, mode: str, ranks: Ranks, *, compiled: bool, backend: str = "aot_eager", **settings: Any
) -> Learner:
    """As runs make it: blocks are compiled before they are recomputed and sharded."""
    family, algo = world.fresh(), algorithm("flow-grpo")
    slots = make_slots(family, algo, mode)
    if compiled:
        for module in slots.modules().values():
            compile_blocks(module, CPU, backend)
    config = LearnerConfig(**settings)
    guidance = TrainingGuidance(1.0, world.negative, family.embedded_guidance)
    return Learner(family, slots, algo, config, size=world.size, guidance=guidance, ranks=ranks)


def trained(world: World, learner: Learner, keep: bool) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Pictures of two leases, and the gradients of a micro-batch of all of them."""
    ranks = learner.ranks
    around = RolloutGathering(keep, ranks, CPU, None).around
    samples = [roll_out(world, learner, around=around) for _ in range(2)][-1]
    held = [sample.key for sample in samples][ranks.rank :: ranks.world]
    mine = [sample if sample.key in held else replace(sample, tensors=None) for sample in samples]
    (keys,) = cut(mine, len(mine))
    learner.prepare(mine, [keys])
    learner.accumulate(keys, len(keys))
    gradients = {}
    for name, parameter in learner.slots.trainable_parameters().items():
        if parameter.grad is not None:
            gradient = parameter.grad
            whole = gradient.full_tensor() if isinstance(gradient, DTensor) else gradient
            gradients[name] = whole.clone()
    return torch.stack([sample.tensors.final for sample in samples if sample.tensors]), gradients


def require_same(found: Any, expected: Any) -> None:
    torch.testing.assert_close(found[0], expected[0], rtol=0, atol=ROUNDING)
    largest = max(gradient.abs().max().item() for gradient in expected[1].values())
    for name, gradient in found[1].items():
        # Compiled, what the output does not depend on has a gradient of zeros instead of none.
        other = expected[1].get(name, torch.zeros_like(gradient))
        torch.testing.assert_close(gradient, other, rtol=1e-3, atol=ROUNDING * largest)
    assert expected[1].keys() <= found[1].keys()


def test_where_every_second_block_is_recomputed(
    random_pipeline: Path, tmp_path: Path, fresh_compiler: None
) -> None:
    world = World(random_pipeline, tmp_path / "cache")
    eager, compiled = (
        trained(
            world,
            make_learner(world, "lora", Ranks(), compiled=each, recompute=2),
            keep=False,
        )
        for each in (False, True)
    )
    require_same(compiled, eager)


@pytest.mark.parametrize("mode", ["lora", "full"])
def test_layers_that_no_output_depends_on_stay_as_they_are(
    random_pipeline: Path, tmp_path: Path, fresh_compiler: None, mode: str
) -> None:
    world = World(random_pipeline, tmp_path / "cache", layers=1)
    learner = make_learner(
        world, mode, Ranks(), compiled=True, backend="inductor", weight_decay=0.5, learning_rate=0.1
    )
    before = {name: value.clone() for name, value in learner.slots.state("policy").items()}
    trained(world, learner, keep=False)
    learner.step()
    after = learner.slots.state("policy")
    unread = {name for name in after if name.startswith(learner.family.unread_layers())}
    assert unread
    assert unread == {name for name, value in after.items() if torch.equal(value, before[name])}
    assert not any(
        id(learner.slots.trainable_parameters()[name]) in map(id, learner.optimizer.state) for name in unread
    )


@pytest.mark.parametrize(("mode", "keep"), [("lora", True), ("full", False)])
def test_where_two_ranks_share_the_model_and_recompute_every_block(
    random_pipeline: Path, tmp_path: Path, mode: str, keep: bool
) -> None:
    world = World(random_pipeline, tmp_path / "cache", layers=1)
    alone = trained(world, make_learner(world, mode, Ranks(), compiled=False), keep=False)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    arguments = (port, random_pipeline, tmp_path, mode, keep)
    mp.start_processes(_rank, arguments, nprocs=2, start_method="forkserver")
    require_same(torch.load(tmp_path / "ranks.pt"), alone)


def _rank(rank: int, port: int, pipeline: Path, directory: Path, mode: str, keep: bool) -> None:
    torch.set_num_threads(1)
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    with process_group(CPU, timeout_s=600) as ranks:
        world = World(pipeline, directory / f"cache{rank}", layers=1)
        settings = {"shard": "all", "recompute": "blocks"}
        learner = make_learner(world, mode, ranks, compiled=True, **settings)
        assert all(isinstance(p, DTensor) for p in learner.slots.trainable_parameters().values())
        found = trained(world, learner, keep)
        if ranks.is_main:
            torch.save(found, directory / "ranks.pt")
