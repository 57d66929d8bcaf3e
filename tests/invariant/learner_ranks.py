"""What each of the spawned gloo ranks does in test_learner_ranks.py. Results go to files."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from learner_world import World, algorithm, cut, first_update, make_learner, roll_out, train_batch
from tests.collectives import Collectives
from torch.distributed.tensor import DTensor

from spotlight.training.learner import Learner, TrainingSample
from spotlight.training.lora_export import export_lora
from spotlight.training.sharding import Ranks, RolloutGathering, process_group

UPDATES = 2
CASES: dict[str, tuple[str, str, dict[str, object], dict[str, object]]] = {
    # name: algorithm, mode, its parameters, settings
    "grpo-lora": ("flow-grpo", "lora", {"kl_weight": 0.04, "train_timesteps": 2}, {"ema_cap": 0.9}),
    "nft-lora": ("diffusion-nft", "lora", {}, {"recompute": "elementwise"}),
    "nft-full": ("diffusion-nft", "full", {"old_policy": {"slope": 0.3}}, {"recompute": "blocks"}),
    "dgpo-lora-none": ("dgpo", "lora", {}, {"shard": "none"}),
    "grpo-full-node": ("flow-grpo", "full", {"train_timesteps": 2}, {"shard": "node"}),
}
EPSILON = 1e-6


def everyones(value: Any, ranks: Ranks) -> list[Any]:
    """All ranks' values, of any type: these ranks are a test's own."""
    values = [value] * ranks.world
    dist.all_gather_object(values, value)
    return values


def learner_of(world: World, case: str, ranks: Ranks | None = None) -> Learner:
    name, mode, params, settings = CASES[case]
    return make_learner(world, algorithm(name, **params), mode, ranks=ranks, epsilon=EPSILON, **settings)


def run_case(case: str, learner: Learner, directory: Path) -> dict[str, object]:
    """The same rollouts on every rank; each trains every other one of them."""
    ranks = learner.ranks
    samples = torch.load(directory / f"{case}-samples.pt", weights_only=False)
    mine = [sample.key for sample in samples][ranks.rank :: ranks.world]
    reports = [train_batch(learner, samples, 4, held=mine).flat() for _ in range(UPDATES)]
    slots = learner.slots
    kept = [slot for slot in slots.slots if slot != "reference"]
    weights = {f"{slot}.{name}": _whole(t) for slot in kept for name, t in slots.state(slot).items()}
    return {"reports": reports, "weights": weights, "digest": learner.digest()}


TIMESTEPS = 3


def gathers(work: Callable[[], object]) -> int:
    """All-gathers of parameters during ``work``, as the process group is asked for them."""
    with Collectives() as collectives:
        work()
    return collectives.seen["_allgather_base_"]


def run_passes(world: World, ranks: Ranks, directory: Path) -> dict[object, object]:
    """A micro-batch in passes of several timesteps: its gradients, and the all-gathers of every rank.

    With ``auto``, one rank may take much memory and the other hardly any.
    """
    samples = torch.load(directory / "nft-lora-samples.pt", weights_only=False)
    held = [sample.key for sample in samples][ranks.rank :: ranks.world]
    samples = [sample if sample.key in held else replace(sample, tensors=None) for sample in samples]
    found: dict[object, object] = {}
    for per_pass in (1, TIMESTEPS, "auto", "recompute auto"):
        auto = isinstance(per_pass, str)
        algo = algorithm("diffusion-nft", train_timesteps=TIMESTEPS)
        options: dict[str, Any] = {"pass_memory_bytes": (2**40 if ranks.is_main else 1) if auto else None}
        if per_pass == "recompute auto":
            options["recompute"] = "auto"
        else:
            options["timesteps_per_pass"] = per_pass
        learner = make_learner(world, algo, ranks=ranks, **options)
        (keys,) = cut(samples, 6)
        learner.prepare(samples, [keys])
        if auto:
            bound = learner._bind(learner._mine(keys), keys)
            learner.passes.per_pass(bound)  # learns what fits, outside the count
        count = gathers(lambda learner=learner, keys=keys: learner.accumulate(keys, 6))  # type: ignore[misc]
        gradients, levels = whole_gradients(learner), ranks.share(learner.passes.recompute_level)
        found[per_pass] = {"gathers": ranks.share(count), "gradients": gradients, "levels": levels}
    for case in UNEQUAL:
        found[case] = {"gradients": run_unequal(world, case, ranks, directory)}
    return found


def run_gathered(world: World, mode: str, ranks: Ranks) -> dict[bool, dict[str, Any]]:
    """Rollouts of a sharded model, by whether they keep it gathered; then an update with them."""
    found: dict[bool, dict[str, Any]] = {}
    for kept in (False, True):
        learner = make_learner(world, algorithm("diffusion-nft"), mode, ranks=ranks, epsilon=EPSILON)
        around = RolloutGathering(kept, ranks, learner.family.device, None).around
        samples: list[TrainingSample] = []
        count = gathers(lambda: samples.extend(roll_out(world, learner, around=around)))  # noqa: B023
        held = [sample.key for sample in samples][ranks.rank :: ranks.world]
        update = gathers(lambda: train_batch(learner, samples, len(samples), held=held))  # noqa: B023
        final = torch.stack([sample.tensors.final for sample in samples if sample.tensors])
        found[kept] = {"gathers": (count, update), "final": final, "digest": learner.digest()}
    return found


SCARCE, AMPLE = 1, 2**40
UNEQUAL: dict[str, tuple[list[str], list[int], dict[str, Any]]] = {
    # Micro-batches (prompt/member of each rank), bytes that a pass of each may use, settings.
    "one rank knows the shape": (
        ["0/0 1/0", "0/1 2/0", "1/1 2/1"], [SCARCE, SCARCE, SCARCE], {"recompute": "auto"}
    ),
    "ranks know other levels": (
        ["0/0 1/0", "1/1 2/0", "0/1 2/1"],
        [AMPLE, SCARCE, AMPLE],
        {"recompute": "auto", "timesteps_per_pass": "auto"},
    ),
}  # fmt: skip


def run_unequal(world: World, case: str, ranks: Ranks, directory: Path) -> dict[str, torch.Tensor]:
    """Gradients of several micro-batches whose prompts are longer on one rank than on the other."""
    cuts, budgets, settings = UNEQUAL[case]
    micro_batches = [keys.split() for keys in cuts]
    held = [keys[ranks.rank] for keys in micro_batches]
    samples = torch.load(directory / "nft-lora-samples.pt", weights_only=False)
    assert len({sample.condition.tokens for sample in samples}) == len({sample.group for sample in samples})
    samples = [sample if sample.key in held else replace(sample, tensors=None) for sample in samples]
    algo = algorithm("diffusion-nft", train_timesteps=TIMESTEPS)
    learner = make_learner(world, algo, ranks=ranks, pass_memory_bytes=AMPLE, **settings)
    learner.prepare(samples, micro_batches)
    for keys, budget in zip(micro_batches, budgets, strict=True):
        learner.passes._budget_bytes = budget
        learner.accumulate(keys, len(samples))
    return whole_gradients(learner)


def whole_gradients(learner: Learner) -> dict[str, torch.Tensor]:
    return {
        name: parameter.grad.full_tensor()  # type: ignore[attr-defined]
        for name, parameter in learner.slots.trainable_parameters().items()
        if parameter.grad is not None
    }


FIRST_UPDATES = ("flow-grpo",)
"""One: ranks share samples whatever the algorithm is, and test_first_update.py has them all."""


def run_first_updates(world: World, ranks: Ranks) -> dict[str, bool]:
    """Whether a pass for old log-probs changes a bit of this rank's share of a first update, by algorithm."""
    same = {}
    for name in FIRST_UPDATES:
        found = []
        for evaluated in (False, True):
            learner = make_learner(world, algorithm(name), ranks=ranks, timesteps_per_pass=2)
            samples = roll_out(world, learner)
            held = [sample.key for sample in samples][ranks.rank :: ranks.world]
            samples = [sample if sample.key in held else replace(sample, tensors=None) for sample in samples]
            found.append(first_update(learner, samples, 2, evaluated=evaluated))
        (skipped, sums), (expected, sums_with_pass) = found
        equal = [torch.equal(_local(skipped[key]), _local(value)) for key, value in expected.items()]
        same[name] = bool(equal) and all(equal) and sums == sums_with_pass and sums.ratio_max == 1.0
    return same


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def save_case(world: World, case: str, ranks: Ranks, nodes: Ranks, directory: Path) -> None:
    """Train a case, and save what must equal the learner of one rank."""
    learner = learner_of(world, case, nodes if "node" in case else ranks)
    if "none" in case:
        assert not any(isinstance(p, DTensor) for p in learner.slots.trainable_parameters().values())
    if "node" in case:
        parameters = learner.slots.trainable_parameters().values()
        assert all(cast(DTensor, p).device_mesh.shape == (ranks.world, 1) for p in parameters)
    result = run_case(case, learner, directory)
    learner.save(directory / f"{case}-state")
    if "lora" in case:
        export_lora(learner.family, learner.slots, "policy", directory / f"{case}-export", ranks)
    result["merged"] = learner.slots.merged_state("policy")
    # A state of one rank loads here, and becomes the same learner; then back to our own.
    learner.load(directory / f"{case}-one")
    result["reloaded"] = learner.digest()
    learner.load(directory / f"{case}-state")
    result["restored"] = learner.digest()
    if case == "dgpo-lora-none":  # a run may be resumed with another learner.shard
        other = learner_of(world, "nft-lora", ranks)
        other.load(directory / "dgpo-lora-none-state")
        assert other.digest() == result["digest"]
        other.load(directory / "nft-lora-state")
        learner.load(directory / "nft-lora-state")
        assert learner.digest() == other.digest() != result["digest"]
    if ranks.is_main:
        torch.save(result, directory / f"{case}-ranks.pt")


MESH_MODES = ("lora", "full")
MESH = (2, 2)
"""Nodes, and ranks of each, that share the model."""


def on_mesh(world: World, mode: str, samples: Sequence[TrainingSample], ranks: Ranks) -> dict[str, Any]:
    """Two updates, with the model shared by the ranks of a node; every rank holds one sample."""
    held = [sample.key for sample in samples][ranks.rank :: ranks.world]
    algo = algorithm("diffusion-nft")
    learner = make_learner(world, algo, mode, ranks=ranks, epsilon=EPSILON, shard="node")
    reports = [train_batch(learner, samples, len(samples), held=held).flat() for _ in range(UPDATES)]
    weights = {name: _whole(tensor) for name, tensor in learner.slots.state("policy").items()}
    parameters = learner.slots.trainable_parameters().values()
    shapes = {parameter.device_mesh.shape for parameter in parameters if isinstance(parameter, DTensor)}
    return {"reports": reports, "weights": weights, "digest": learner.digest(), "meshes": shapes}


def _whole(tensor: torch.Tensor) -> torch.Tensor:
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).clone()


def mesh_main(rank: int, port: int, pipeline: Path, directory: Path) -> None:
    _as_of_torchrun(rank, MESH[0] * MESH[1], port)
    with process_group(torch.device("cpu"), timeout_s=120) as alike:
        ranks = replace(alike, per_node=(MESH[1],) * MESH[0])
        world = World(pipeline, directory / f"cache{rank}")
        samples = torch.load(directory / "samples.pt", weights_only=False)
        for mode in MESH_MODES:
            found = on_mesh(world, mode, samples, ranks)
            digests = ranks.share(found["digest"])
            assert digests == [found["digest"]] * ranks.world
            if ranks.is_main:
                torch.save(found, directory / f"{mode}-mesh.pt")


def _as_of_torchrun(rank: int, count: int, port: int) -> None:
    torch.set_num_threads(1)
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(count)}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}


def main(rank: int, count: int, port: int, pipeline: Path, directory: Path, cases: Sequence[str]) -> None:
    _as_of_torchrun(rank, count, port)
    with process_group(torch.device("cpu"), timeout_s=120) as ranks:
        assert ranks == Ranks.current() == Ranks(rank, count)
        world = World(pipeline, directory / f"cache{rank}")
        assert ranks.share(ranks.rank) == list(range(count))
        # Each rank counts as a node, where ranks of a node share the model.
        nodes = replace(ranks, per_node=(1,) * count)
        for case in cases:
            save_case(world, case, ranks, nodes, directory)
        passes = run_passes(world, ranks, directory)
        if ranks.is_main:
            torch.save(passes, directory / "passes.pt")
        kept = {mode: everyones(run_gathered(world, mode, ranks), ranks) for mode in ("lora", "full")}
        if ranks.is_main:
            torch.save(kept, directory / "gathered.pt")
        first_updates = ranks.share(run_first_updates(world, ranks))
        if ranks.is_main:
            torch.save(first_updates, directory / "first-updates.pt")
        half = make_learner(
            world,
            algorithm("diffusion-nft"),
            "lora",
            ranks=ranks,
            dtype=torch.bfloat16,
            autocast="bfloat16",
        )
        samples = torch.load(directory / "nft-lora-samples.pt", weights_only=False)
        mine = [sample.key for sample in samples][rank::count]
        report = train_batch(half, samples, 6, held=mine)
        if ranks.is_main:
            torch.save(report.flat(), directory / "half.pt")
