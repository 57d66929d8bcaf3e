"""Fused operators in a model that two ranks (gloo) shard, or whose sequence they split, compute the same."""

from __future__ import annotations

import socket
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.multiprocessing as mp
from fused_ranks import HALF, SHARDED, SPLIT, UPDATES, Tensors, gradients, learner_of, main, update
from fused_world import FusedWorld, Predicting, far
from tests.invariant.learner_world import roll_out

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore:Already found a `peft_config`")]


def worst(found: Tensors, wanted: Tensors) -> float:
    """Largest difference, relative to the largest tensor: some are of nothing but rounding."""
    whole = max(float(tensor.norm()) for tensor in wanted.values())
    return max(float((found[name] - tensor).norm()) / whole for name, tensor in wanted.items())


class Both:
    """Results of two ranks, and the world of one."""

    def __init__(self, pipeline: Path, folder: Path) -> None:
        self.folder = folder
        self.one, self.reference = (
            FusedWorld(pipeline, folder / "cache", fused=each) for each in (True, False)
        )
        learner = learner_of(self.reference, torch.float32)
        self.samples = roll_out(self.reference, learner)[::3]
        torch.save(self.samples, folder / "samples.pt")
        for name in {*SPLIT, *SHARDED}:  # one writes the pipeline
            Predicting(name, folder / name)
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        mp.start_processes(main, (port, pipeline, folder), nprocs=2, start_method="forkserver")
        self.two: dict[str, Any] = torch.load(folder / "ranks.pt")


@pytest.fixture(scope="module")
def both(random_pipeline: Path, tmp_path_factory: pytest.TempPathFactory) -> Both:
    return Both(random_pipeline, tmp_path_factory.mktemp("ranks"))


@pytest.mark.parametrize("name", UPDATES)
def test_an_update_of_a_sharded_model_is_that_of_one_process_and_of_the_reference(
    both: Both, name: str
) -> None:
    dtype = UPDATES[name]
    slopes, weights = both.two[name]
    for world in (both.one, both.reference):
        expected, after = update(learner_of(world, dtype), both.samples)
        assert slopes.keys() == expected.keys()
        assert worst(slopes, expected) < (1e-5 if dtype == torch.float32 else 3e-2)
        if dtype == torch.float32:  # else a small gradient's sign, and so a step, depends on rounding
            assert worst(weights, after) < 1e-5


@pytest.mark.parametrize("name", SHARDED)
def test_parts_of_fused_blocks_may_be_gathered_on_their_own(both: Both, name: str) -> None:
    expected = gradients(Predicting(name, both.folder / name, fused=True, dtype=HALF))
    found = both.two[f"sharded {name}"]
    assert found.keys() == expected.keys()
    assert worst(found, expected) < 3e-2


@pytest.mark.parametrize("name", SPLIT)
def test_a_split_sequence_gives_the_velocity_of_one_process_and_of_the_reference(
    both: Both, name: str
) -> None:
    found, agree = both.two[f"split {name}"]
    assert agree, "ranks have equal bits"
    for fused in (True, False):
        predicting = Predicting(name, both.folder / name, fused=fused, text=2)
        with torch.no_grad(), predicting.slots.use("policy"):
            assert far(found, predicting()) < 1e-5
