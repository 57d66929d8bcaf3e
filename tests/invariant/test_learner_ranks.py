"""Two ranks (gloo, CPU), sharded or not, train what one rank trains; states load into any number of ranks."""

from __future__ import annotations

import socket
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.multiprocessing as mp
from learner_ranks import (
    CASES,
    FIRST_UPDATES,
    MESH,
    MESH_MODES,
    TIMESTEPS,
    learner_of,
    main,
    mesh_main,
    on_mesh,
    run_case,
)
from learner_world import LORA, World, algorithm, gradients, make_learner, roll_out, train_batch
from safetensors.torch import load_file

from spotlight.training.learner_state import INDEX, SHARDED, StateError
from spotlight.training.lora_export import lora_state
from spotlight.training.sharding import Ranks

WEIGHT_TOLERANCE = 2e-6
"""Largest difference of a weight after two steps at learning rate 1e-3; measured: below 5e-7."""

pytestmark = pytest.mark.filterwarnings("ignore:Already found a `peft_config`")


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port: int = free.getsockname()[1]
        return port


class Both:
    """The results of one rank and of two, in the cases that tests ask for."""

    def __init__(self, pipeline: Path, directory: Path, cases: Sequence[str]) -> None:
        self.directory = directory
        self.world = World(pipeline, directory / "cache")
        self.one: dict[str, dict[str, Any]] = {}
        for case in cases:
            learner = learner_of(self.world, case)
            torch.save(roll_out(self.world, learner), directory / f"{case}-samples.pt")
            self.one[case] = run_case(case, learner, directory)
            learner.save(directory / f"{case}-one")
            self.one[case]["lora"] = lora_state(learner.slots, "policy") if "lora" in case else None
            self.one[case]["merged"] = learner.slots.merged_state("policy")
        arguments = (2, free_port(), pipeline, directory, cases)
        mp.start_processes(main, arguments, nprocs=2, start_method="forkserver")
        self.two = {case: torch.load(directory / f"{case}-ranks.pt") for case in cases}


@pytest.fixture(scope="module")
def both(
    request: pytest.FixtureRequest, random_pipeline: Path, tmp_path_factory: pytest.TempPathFactory
) -> Both:
    asked = {
        item.callspec.params.get("case")
        for item in request.session.items
        if isinstance(item, pytest.Function) and item.module is request.module and hasattr(item, "callspec")
    }
    cases = [case for case in CASES if case in asked | {"nft-lora"}]  # others use that one's samples
    return Both(random_pipeline, tmp_path_factory.mktemp("ranks"), cases)


# In the first tier grpo-full-node has GRPO on two ranks.
EACH = [
    pytest.param(case, marks=pytest.mark.slow if case in ("grpo-lora", "nft-full") else ()) for case in CASES
]


@pytest.mark.parametrize("case", EACH)
def test_two_ranks_equal_one(both: Both, case: str) -> None:
    one, two = both.one[case]["weights"], both.two[case]["weights"]
    assert one.keys() == two.keys()
    for name in one:
        torch.testing.assert_close(two[name], one[name], rtol=0, atol=WEIGHT_TOLERANCE)
    start = learner_of(both.world, case).slots.state("policy")
    moved = [name for name in start if not torch.equal(start[name], one[f"policy.{name}"])]
    assert len(moved) > 0.8 * len(start)


@pytest.mark.slow
def test_two_nodes_of_two_ranks_equal_one_rank(random_pipeline: Path, tmp_path: Path) -> None:
    world = World(random_pipeline, tmp_path / "cache")
    samples = roll_out(world, make_learner(world, algorithm("diffusion-nft")))[: MESH[0] * MESH[1]]
    torch.save(samples, tmp_path / "samples.pt")
    arguments = (free_port(), random_pipeline, tmp_path)
    mp.start_processes(mesh_main, arguments, nprocs=MESH[0] * MESH[1], start_method="forkserver")
    for mode in MESH_MODES:
        one, four = on_mesh(world, mode, samples, Ranks()), torch.load(tmp_path / f"{mode}-mesh.pt")
        assert (one["meshes"], four["meshes"]) == (set(), {MESH})
        assert one["weights"].keys() == four["weights"].keys()
        for name, weight in one["weights"].items():
            torch.testing.assert_close(four["weights"][name], weight, rtol=0, atol=WEIGHT_TOLERANCE)
        for alone, shared in zip(one["reports"], four["reports"], strict=True):
            assert shared["train/samples"] == alone["train/samples"] == len(samples)
            assert shared["train/grad_norm"] == pytest.approx(alone["train/grad_norm"], rel=1e-4)


@pytest.mark.parametrize("case", EACH)
def test_metrics_are_those_of_all_ranks(both: Both, case: str) -> None:
    for one, two in zip(both.one[case]["reports"], both.two[case]["reports"], strict=True):
        assert one.keys() == two.keys()
        assert one["train/samples"] == two["train/samples"] == 6
        for name in ("train/grad_norm", "train/grad_rms"):
            assert two[name] == pytest.approx(one[name], rel=1e-4)
        assert two["train/loss"] == pytest.approx(one["train/loss"], rel=1e-3, abs=1e-6)


@pytest.mark.parametrize("case", EACH)
def test_a_state_loads_into_any_number_of_ranks(both: Both, case: str) -> None:
    two = both.two[case]
    assert two["reloaded"] == both.one[case]["digest"]
    assert two["restored"] == two["digest"] != two["reloaded"]
    learner = learner_of(both.world, case)
    learner.load(both.directory / f"{case}-state")
    assert learner.digest() == two["digest"]


@pytest.mark.parametrize("case", [each for each in EACH if "lora" in str(each.values[0])])
def test_a_sharded_lora_exports_whole(both: Both, case: str) -> None:
    (file,) = (both.directory / f"{case}-export").iterdir()
    exported = {name.removeprefix("transformer."): tensor for name, tensor in load_file(file).items()}
    expected = both.one[case]["lora"]
    assert exported.keys() == expected.keys()
    for name, tensor in expected.items():
        whole = tensor * (LORA.alpha / LORA.rank if ".lora_B." in name else 1)
        torch.testing.assert_close(exported[name], whole, rtol=0, atol=2 * WEIGHT_TOLERANCE)


@pytest.mark.parametrize("case", EACH)
def test_sharded_weights_merge_whole(both: Both, case: str) -> None:
    one, two = both.one[case]["merged"], both.two[case]["merged"]
    assert one.keys() == two.keys()
    for name, tensor in one.items():
        torch.testing.assert_close(two[name], tensor, rtol=0, atol=WEIGHT_TOLERANCE)


def test_bfloat16_base_with_autocast_trains_sharded(both: Both) -> None:
    name, mode, params, _ = CASES["nft-lora"]
    learner = make_learner(
        both.world, algorithm(name, **params), mode, dtype=torch.bfloat16, autocast="bfloat16"
    )
    samples = torch.load(both.directory / "nft-lora-samples.pt", weights_only=False)
    one, two = train_batch(learner, samples, 6).flat(), torch.load(both.directory / "half.pt")
    for key in ("train/loss", "train/grad_norm"):
        assert two[key] == pytest.approx(one[key], rel=0.02)


def test_one_all_gather_serves_all_timesteps_of_a_pass(both: Both) -> None:
    passes = torch.load(both.directory / "passes.pt")
    one, *others = passes[TIMESTEPS]["gathers"]
    assert all(other == one for other in others)
    # Two blocks and the root: the policy's forward and backward, and a forward of old and reference.
    assert one == 3 * (2 + 1 + 1)
    assert passes[1]["gathers"] == [TIMESTEPS * one] * 2
    # The rank with little memory decides for both.
    assert passes["auto"]["gathers"] == passes[1]["gathers"]
    assert passes["recompute auto"]["levels"] == [0, 0]


@pytest.mark.parametrize("mode", ["lora", "full"])
def test_rollouts_that_keep_the_model_gathered_are_the_same_to_the_bit(both: Both, mode: str) -> None:
    for found in torch.load(both.directory / "gathered.pt")[mode]:
        each, kept = found[False], found[True]
        # Two blocks and the root, in one forward of eight (two batches, four steps), or in each.
        assert (each["gathers"][0], kept["gathers"][0]) == (8 * 3, 3)
        assert torch.equal(kept["final"], each["final"])
        assert kept["digest"] == each["digest"], "an update of sharded weights"
        assert kept["gathers"][1] == each["gathers"][1], "which training gathers as ever"


def test_sharded_gradients_do_not_depend_on_the_timesteps_of_a_pass(both: Both) -> None:
    samples = torch.load(both.directory / "nft-lora-samples.pt", weights_only=False)
    expected = gradients(
        make_learner(both.world, algorithm("diffusion-nft", train_timesteps=TIMESTEPS)), samples, 6
    )
    floor = 1e-5 * max(gradient.abs().max().item() for gradient in expected.values())
    for found in torch.load(both.directory / "passes.pt").values():
        assert found["gradients"].keys() == expected.keys()
        for name, gradient in expected.items():
            atol = max(1e-4 * gradient.abs().max().item(), floor)
            torch.testing.assert_close(found["gradients"][name], gradient, rtol=1e-3, atol=atol)


@pytest.mark.parametrize("damage", ["truncate", "remove", "metadata", "index"])
def test_a_damaged_sharded_state_is_named(both: Both, damage: str, tmp_path: Path) -> None:
    source = both.directory / "nft-lora-state"
    (tmp_path / SHARDED).mkdir()
    for file in [INDEX, *(f"{SHARDED}/{path.name}" for path in (source / SHARDED).iterdir())]:
        (tmp_path / file).write_bytes((source / file).read_bytes())
    victim = {"metadata": tmp_path / SHARDED / ".metadata", "index": tmp_path / INDEX}.get(
        damage, next((tmp_path / SHARDED).glob("*.distcp"))
    )
    if damage == "remove":
        victim.unlink()
    else:
        victim.write_bytes(victim.read_bytes()[: victim.stat().st_size // 3])
    learner = learner_of(both.world, "nft-lora")
    with pytest.raises(StateError, match=r"learner\.(dcp|json) cannot be read.*use an earlier checkpoint"):
        learner.load(tmp_path)


def test_a_first_update_without_the_pass_for_old_log_probs_is_the_same_to_the_bit(both: Both) -> None:
    assert torch.load(both.directory / "first-updates.pt") == [dict.fromkeys(FIRST_UPDATES, True)] * 2
