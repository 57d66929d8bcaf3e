"""A transformer that an update has no row for stays as it is, on one rank and on two that share it."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest
import torch
import torch.multiprocessing as mp
from learner_world import FamilyWorld, algorithm, cut, make_learner, roll_out, train_batch
from torch import Tensor
from torch.distributed.tensor import DTensor

from spotlight.models.experts import Experts
from spotlight.models.media import MediaSize
from spotlight.registry import FAMILIES
from spotlight.training.sharding import Ranks, process_group

CPU = torch.device("cpu")
ROUNDING = 2e-6
"""Of weights after two steps at learning rate 1e-3."""
OF_BOTH, OF_THE_FIRST = 0.5, 0.0
"""Boundaries between the noise levels of Wan2.2's two transformers."""

pytestmark = pytest.mark.filterwarnings("ignore:Already found a `peft_config`")
Weights = dict[str, Tensor]


def train(pipeline: Path, cache: Path, ranks: Ranks, shard: str) -> tuple[list[Weights], list[float]]:
    """Weights after each of: an update of both transformers, and one of the first; and gradient norms."""
    family = FAMILIES.load("wan").load(pipeline, device="cpu", dtype=torch.float32, embeddings_cache=cache)
    world = FamilyWorld(family, MediaSize(16, 32, 5))
    learner = make_learner(
        world,
        algorithm("diffusion-nft", train_timesteps=3),
        ranks=ranks,
        shard=shard,
        weight_decay=0.05,
        epsilon=1e-6,
    )
    samples = roll_out(world, learner, batch=6)
    held = [sample.key for sample in samples][ranks.rank :: ranks.world]
    weights, norms = [], []
    for boundary in (OF_BOTH, OF_THE_FIRST):
        learner.family.first_transformer = lambda sigma, low=boundary: sigma >= low  # type: ignore[method-assign,misc]
        norms.append(train_batch(learner, samples, len(samples), held=held).flat()["train/grad_rms"])
        state = learner.slots.state("policy").items()
        weights.append({n: (t.full_tensor() if isinstance(t, DTensor) else t).clone() for n, t in state})
    return weights, norms


@pytest.mark.parametrize("shard", ["all", "none"])
def test_an_idle_expert_stays_as_it_is(tmp_path: Path, shard: str) -> None:
    pipeline = tmp_path / "pipeline"
    FAMILIES.load("wan").tiny(pipeline, seed=0, variant=2)
    weights, norms = train(pipeline, tmp_path / "cache", Ranks(), shard)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    mp.start_processes(_rank, (port, pipeline, tmp_path, shard), nprocs=2, start_method="forkserver")
    for found, norm in (weights, norms), torch.load(tmp_path / "ranks.pt"):
        idle = [name for name in found[0] if name.startswith("transformer_2.")]
        assert idle
        assert all(torch.equal(found[0][name], found[1][name]) for name in idle)
        assert not any(torch.equal(found[0][name], found[1][name]) for name in found[0].keys() - {*idle})
        for one, other in zip(weights, found, strict=True):
            for name, weight in one.items():
                torch.testing.assert_close(other[name], weight, rtol=0, atol=ROUNDING)
        assert norm == pytest.approx(norms, rel=1e-4)


def test_a_pass_that_only_measures_is_no_use_of_an_expert(tmp_path: Path) -> None:
    """Memory may be tried out with micro-batches of later updates: whose experts are idle in this one."""
    FAMILIES.load("wan").tiny(tmp_path / "pipeline", seed=0, variant=2)
    family = FAMILIES.load("wan").load(
        tmp_path / "pipeline", device="cpu", dtype=torch.float32, embeddings_cache=tmp_path / "cache"
    )
    world = FamilyWorld(family, MediaSize(16, 32, 5))
    learner = make_learner(world, algorithm("diffusion-nft", train_timesteps=3))
    samples = roll_out(world, learner, batch=2)
    (keys,) = cut(samples, len(samples))
    learner.prepare(samples, [keys])
    experts = learner.slots.modules()["policy"]
    assert isinstance(experts, Experts)
    experts.had_rows = {"transformer"}
    learner.family.first_transformer = lambda sigma: sigma < 0  # type: ignore[method-assign,misc]
    learner.passes._measured(learner._bind(learner._mine(keys), keys), 1)
    assert experts.had_rows == {"transformer"}
    learner.accumulate(keys, len(samples))
    assert experts.had_rows == {"transformer", "transformer_2"}


def _rank(rank: int, port: int, pipeline: Path, directory: Path, shard: str) -> None:
    torch.set_num_threads(1)
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    with process_group(CPU, timeout_s=120) as ranks:
        found = train(pipeline, directory / f"cache{rank}", ranks, shard)
        if ranks.is_main:
            torch.save(found, directory / "ranks.pt")
