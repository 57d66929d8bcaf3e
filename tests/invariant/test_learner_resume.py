"""A learner that was saved and loaded goes on as if nothing had happened; damage is named."""

from __future__ import annotations

import errno
import json
import resource
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from learner_world import World, algorithm, make_learner, roll_out, train_batch
from torch import distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from spotlight.models.family import ModelError
from spotlight.store.checkpoints import CheckpointStore
from spotlight.store.manifest import CheckpointHeader
from spotlight.training.learner import Learner
from spotlight.training.learner_state import INDEX, WHOLE, Counters, StateError, save
from spotlight.training.lora_export import export_lora, export_merged, lora_state
from spotlight.training.sharding import Ranks
from spotlight_rewards.base.file_errors import StoreError

pytestmark = pytest.mark.filterwarnings("ignore:Already found a `peft_config`")


PARAMS: dict[str, dict[str, Any]] = {"diffusion-nft": {"old_policy": {"slope": 0.2}}, "ram": {}}


@pytest.fixture(scope="module")
def world(random_pipeline: Path, tmp_path_factory: pytest.TempPathFactory) -> World:
    return World(random_pipeline, tmp_path_factory.mktemp("cache"))


def make(world: World, name: str = "diffusion-nft", mode: str = "lora", **settings: Any) -> Learner:
    params = PARAMS.get(name, {"kl_weight": 0.04})
    return make_learner(
        world, algorithm(name, **params), mode, warmup_steps=3, **{"ema_cap": 0.9, **settings}
    )


def go_on(world: World, learner: Learner, batches: int) -> str:
    """Train on the learner's own rollouts, so that every difference would grow."""
    for _ in range(batches):
        train_batch(learner, roll_out(world, learner, iteration=learner.batches), 3)
    return learner.digest()


@pytest.mark.parametrize(
    ("name", "mode"),
    [
        ("flow-grpo-fast", "lora"),
        ("diffusion-nft", "full"),
        pytest.param("ram", "lora", marks=pytest.mark.slow),
        pytest.param("diffusion-nft", "lora", marks=pytest.mark.slow),  # whole runs resume with it
    ],
)
def test_resume_equals_uninterrupted_to_the_bit(world: World, name: str, mode: str, tmp_path: Path) -> None:
    straight = make(world, name, mode)
    start = straight.digest()
    middle = go_on(world, straight, 2)
    straight.save(tmp_path)
    end = go_on(world, straight, 2)
    resumed = make(world, name, mode)
    assert resumed.digest() == start
    resumed.load(tmp_path)
    assert resumed.digest() == middle
    assert (resumed.steps, resumed.batches) == (2, 2)
    assert go_on(world, resumed, 2) == end
    assert len({start, middle, end}) == 3


def test_loading_a_fresh_state_forgets_the_optimizer(world: World, tmp_path: Path) -> None:
    fresh = make(world)
    fresh.save(tmp_path)
    trained = make(world)
    go_on(world, trained, 1)
    trained.load(tmp_path)
    assert trained.digest() == fresh.digest()
    assert not trained.optimizer.state


def test_the_digest_sees_every_part(world: World) -> None:
    learner = make(world)
    seen = {go_on(world, learner, 1)}
    for slot in ("policy", "old", "ema"):
        next(iter(learner.slots.parameters(slot).values())).data[0, 0] += 1e-6  # type: ignore[arg-type]
        seen.add(learner.digest())
    for moment in ("exp_avg", "exp_avg_sq", "step"):
        state = next(iter(learner.optimizer.state.values()))
        state[moment] += 1
        seen.add(learner.digest())
    learner.batches += 1
    seen.add(learner.digest())
    assert len(seen) == 8


def test_a_lora_state_is_written_with_100_ms_of_work(world: World, tmp_path: Path) -> None:
    learner = make(world)
    go_on(world, learner, 1)
    durations = []
    for _ in range(3):
        started = time.process_time()
        learner.save(tmp_path)
        durations.append(time.process_time() - started)
    assert min(durations) < 0.1


@pytest.mark.parametrize("file", [WHOLE, INDEX])
@pytest.mark.parametrize("damage", ["truncated", "garbage", "missing", "empty"])
def test_a_damaged_file_is_named(world: World, file: str, damage: str, tmp_path: Path) -> None:
    learner = make(world)
    learner.save(tmp_path)
    path = tmp_path / file
    content = path.read_bytes()
    match damage:
        case "truncated":
            path.write_bytes(content[: len(content) // 2])
        case "garbage":
            path.write_bytes(b"\xff" * 100)
        case "missing":
            path.unlink()
        case "empty":
            path.write_bytes(b"")
    before = learner.digest()
    with pytest.raises(StateError, match=r"learner\.\w+ cannot be read.*use an earlier checkpoint"):
        learner.load(tmp_path)
    assert learner.digest() == before


@pytest.mark.filterwarnings("ignore:torch.distributed is")
@pytest.mark.parametrize("kind", ["whole", "sharded"])
def test_a_file_size_limit_is_named_and_leaves_nothing(kind: str, tmp_path: Path) -> None:
    tensor = torch.zeros(1 << 20)
    if kind == "sharded":
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        if kind == "sharded":
            tensor = distribute_tensor(tensor, init_device_mesh("cpu", (1,)), [Shard(0)])
        slots: Any = SimpleNamespace(
            slots=("policy",), state=lambda slot: {"weight": tensor}, trainable_parameters=dict
        )
        optimizer: Any = SimpleNamespace(state={})
        limits = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, limits[1]))
        try:
            with (
                pytest.raises(StoreError, match=r"cannot write the learner's state: .* file-size limit was"),
                CheckpointStore(tmp_path, keep=1).writer(CheckpointHeader(1, 1, "c0ffee", "1")) as directory,
            ):
                save(directory / "learner", slots, optimizer, Counters(1, 1), Ranks())
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    finally:
        if kind == "sharded":
            dist.destroy_process_group()
    assert not list(tmp_path.iterdir())


def test_a_disk_that_fails_one_rank_alone_is_not_the_users_to_free(tmp_path: Path) -> None:
    """As of a mount on a machine that is being shut down: another machine may write it."""

    def state(_: str) -> dict[str, torch.Tensor]:
        raise AssertionError("not reached: the folder comes first")

    slots: Any = SimpleNamespace(slots=(), state=state, trainable_parameters=dict)
    gone = OSError(errno.ENOTCONN, "Transport endpoint is not connected")

    class Gone(type(tmp_path)):  # type: ignore[misc]
        def mkdir(self, *_: object, **__: object) -> None:
            raise gone

    with pytest.raises(OSError, match="not connected") as caught:
        save(Gone(tmp_path / "learner"), slots, SimpleNamespace(state={}), Counters(1, 1), Ranks())
    assert caught.value is gone


def test_a_state_of_something_else_is_refused_and_nothing_changes(world: World, tmp_path: Path) -> None:
    other = make(world)
    other.save(tmp_path)
    for learner, found in (
        (make(world, ema_cap=None), r"has unknown \d+ tensors, first 'ema\."),
        (make(world, "flow-grpo-fast"), r"has unknown \d+ tensors, first 'old\."),
        (make(world, mode="full"), r"lacks \d+ tensors"),
    ):
        before = learner.digest()
        with pytest.raises(StateError, match=found):
            learner.load(tmp_path)
        assert learner.digest() == before
    index = json.loads((tmp_path / INDEX).read_text())
    name = next(iter(index["shapes"]))
    index["shapes"][name][0] += 1
    (tmp_path / INDEX).write_text(json.dumps(index))
    with pytest.raises(StateError, match=r"with shape .*, expected .*another model"):
        other.load(tmp_path)
    (tmp_path / INDEX).write_text(json.dumps(index | {"format": 9}))
    with pytest.raises(StateError, match="has format 9; this version reads 1"):
        other.load(tmp_path)


def test_exports_hold_the_slot_asked_for(random_pipeline: Path, tmp_path: Path) -> None:
    world = World(random_pipeline, tmp_path / "cache")
    learner = make(world)
    go_on(world, learner, 1)
    slots, ranks = learner.slots, Ranks()
    assert any(
        not torch.equal(tensor, lora_state(slots, "policy")[name])
        for name, tensor in lora_state(slots, "old").items()
    )
    file = export_lora(learner.family, slots, "old", tmp_path / "lora", ranks)
    assert file is not None
    assert file.exists()
    directory = export_merged(learner.family, slots, "old", tmp_path / "merged", ranks)
    assert directory is not None
    merged = World(directory, tmp_path / "cache").family.transformer.state_dict()
    for name, tensor in slots.merged_state("old").items():
        assert torch.equal(merged[name], tensor), name
    full = make(world, mode="full")
    with pytest.raises(ModelError, match="export the merged weights"):
        lora_state(full.slots, "policy")
