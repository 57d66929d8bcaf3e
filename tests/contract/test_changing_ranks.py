"""A learner of two ranks goes on as one and as two again, across checkpoints: the same but for rounding."""

from __future__ import annotations

import os
from itertools import pairwise
from pathlib import Path

import pytest
import torch
import torch.multiprocessing as mp
from learner_job import alone, config_of, make_batch, prompts_of, rank_of, train_rank
from test_learner_rank import WEIGHT_TOLERANCE, free_ports

from spotlight.cluster.learner.learner_rank import RankPlace
from spotlight.config.schema import RunConfig
from spotlight.rollout.sequence_parallel.rendezvous import Address
from spotlight_weights.bundle import read

pytestmark = pytest.mark.filterwarnings("ignore:Already found a `peft_config`")

ALGORITHM = "nft"
WORLDS = (2, 1, 2)
"""Ranks that train each batch."""


def planned_for_two(root: Path, pipeline: Path) -> RunConfig:
    config = config_of(root, pipeline, ALGORITHM)
    fleet = config.fleet.model_copy(update={"driver": "ray", "learner_ranks": 2})
    return config.model_copy(update={"fleet": fleet})


def one_of(number: int, world: int, batch: int, root: Path, pipeline: Path, port: int) -> None:
    """Train a batch from the state before it, and save the state after it."""
    torch.set_num_threads(1)
    rank = rank_of(planned_for_two(root, pipeline), RankPlace(number, world))
    address = None
    if world > 1:
        address = rank.open_rendezvous("127.0.0.1", port) if number == 0 else Address("127.0.0.1", port)
    environment = dict(os.environ)
    rank.join(address)
    assert (dict(os.environ) != environment) == (world > 1), "it listens on one interface alone"
    rank.load_model(prompts_of(rank.config))
    rank.build()
    if batch:
        rank.load(root / f"state-{batch - 1}")
    before = rank.digest()
    batches = torch.load(root / "batches.pt", weights_only=False)
    figures = train_rank(rank, batches[batch], batches[batch].packed)
    rank.save(root / f"state-{batch}")
    after, packed = rank.digest(), rank.packed(batch + 1, 0)
    if packed is not None:
        torch.save((figures, before, after, packed), root / f"after-{batch}.pt")
    rank.close()
    assert dict(os.environ) == environment, "as the worker's that this process may become"


def test_two_ranks_then_one_then_two_train_what_one_trains(random_pipeline: Path, tmp_path: Path) -> None:
    rank = alone(config_of(tmp_path, random_pipeline, ALGORITHM))
    batches = [
        make_batch(rank.config, rank.learning, iteration, iteration) for iteration in range(len(WORLDS))
    ]
    expected = [train_rank(rank, batch, batch.packed) for batch in batches]
    torch.save(batches, tmp_path / "batches.pt")
    for batch, (world, port) in enumerate(zip(WORLDS, free_ports(len(WORLDS)), strict=True)):
        arguments = (world, batch, tmp_path, random_pipeline, port)
        mp.start_processes(one_of, arguments, nprocs=world, start_method="forkserver")
    found = [torch.load(tmp_path / f"after-{batch}.pt", weights_only=False) for batch in range(len(WORLDS))]
    for (figures, *_), alone_figures in zip(found, expected, strict=True):
        assert figures == pytest.approx(alone_figures, rel=1e-3, abs=1e-6)
    for (_, _, after, _), (_, before, _, _) in pairwise(found):
        assert before == after, "weights, moments and counters are those that were saved, at any size"
    own = rank.packed(len(WORLDS), 0)
    assert own is not None
    bundle, straight = read(*found[-1][3]), read(*own)
    for slot, tensors in straight.tensors.items():
        for name, tensor in tensors.items():
            torch.testing.assert_close(bundle.tensors[slot][name], tensor, rtol=0, atol=WEIGHT_TOLERANCE)
