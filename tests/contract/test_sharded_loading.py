"""A model that ranks share is never whole in one of them, on the device or in the host's memory."""

from __future__ import annotations

import json
import multiprocessing
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from datetime import timedelta
from multiprocessing.queues import Queue
from pathlib import Path
from typing import Any

import diffusers
import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.testing._internal.distributed.fake_pg import FakeStore

from spotlight.config.load import load_config
from spotlight.dry_run.memory_plan import memory_parts, peak_bytes, shared_parts
from spotlight.dry_run.model_plan import ModelSizes, read_sizes
from spotlight.models import skeleton as skeletons
from spotlight.models.families.qwen_image import QwenImage
from spotlight.models.skeleton import skeleton
from spotlight.models.slots import CopySlots, WeightSlots
from spotlight.training import sharding
from spotlight.training.sharding import Ranks, RolloutGathering, shard
from spotlight_files.model_errors import ModelError

RECIPE = Path("examples/qwen-image-ocr-full.yaml")
LORA_RECIPE = RECIPE.with_name("qwen-image-ocr-lora.yaml")
GPU_BYTES = 80e9
MIB = 2**20
_processes = multiprocessing.get_context("forkserver")


@pytest.fixture
def first_of_eight() -> Iterator[Ranks]:
    """Collectives do nothing: memory alone is counted."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=8)
    yield Ranks.current()
    dist.destroy_process_group()


def held(slots: WeightSlots) -> int:
    """Bytes of this rank's parameters, in all slots."""
    found = 0
    for module in slots.modules().values():
        for parameter in module.parameters():
            local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
            found += local.nbytes
    return found


def test_a_rank_of_eight_has_an_eighth_of_qwen_image_before_any_weight_is_read(first_of_eight: Ranks) -> None:
    published = dict(QwenImage.published["Qwen/Qwen-Image"].configs["transformer"])
    module: Any = skeleton(
        diffusers.QwenImageTransformer2DModel, published, torch.float32, torch.device("cpu"), deferred=True
    )
    whole = sum(parameter.nbytes for parameter in module.parameters())
    assert whole > GPU_BYTES  # loading it first fits no such GPU
    slots = CopySlots(module)
    shard(slots, first_of_eight, torch.bfloat16, "all")
    assert all(parameter.is_meta for parameter in module.parameters())
    assert held(slots) == pytest.approx(whole / 8, rel=0.01)


def test_the_plan_says_that_full_fine_tuning_fits_eight_gpus() -> None:
    config = load_config(RECIPE)
    model = read_sizes(config)
    assert isinstance(model, ModelSizes)
    parts = memory_parts(config, model, model.parameters, text_tokens=64)
    assert peak_bytes(parts) > 4 * GPU_BYTES
    four, eight = (peak_bytes(shared_parts(config, model, parts, ranks)) for ranks in (4, 8))
    assert eight < 0.9 * GPU_BYTES < four
    states = 16 * model.parameters  # weights, gradients, both moments of Adam
    assert eight > states / 8


def test_the_plan_knows_what_rollouts_keep_gathered() -> None:
    config = load_config(LORA_RECIPE, ["learner.keep_gathered=true"])
    model = read_sizes(config)
    assert isinstance(model, ModelSizes)
    trained = 1e9
    parts = memory_parts(config, model, int(trained), text_tokens=64)
    kept = shared_parts(config, model, parts, 8)
    without = shared_parts(load_config(LORA_RECIPE), model, parts, 8)
    (whole,) = set(kept) - set(without)
    assert whole.bytes == 2 * (model.parameters + trained)  # in bfloat16, adapters too
    assert peak_bytes(kept) <= peak_bytes(without) + whole.bytes
    assert peak_bytes(kept) < 0.9 * GPU_BYTES


def test_rollouts_keep_gathered_what_fits_beside_the_largest_peak(
    first_of_eight: Ranks, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = fully_shard(torch.nn.Linear(8, 8, bias=False), mesh=init_device_mesh("cpu", (8,)))
    whole = 8 * 8 * 2  # gathered in bfloat16
    gathering = RolloutGathering("auto", first_of_eight, torch.device("cuda"), torch.bfloat16)
    kept: list[bool] = []
    now = {"free": 0, "peak": 0}

    @contextmanager
    def recorded(parts: object) -> Iterator[None]:
        kept.append(True)
        yield

    monkeypatch.setattr(sharding, "gathered", recorded)
    monkeypatch.setattr(sharding, "free_bytes", lambda device: now["free"])
    monkeypatch.setattr(sharding, "measured_peak", lambda device: nullcontext(lambda: now["peak"]))
    monkeypatch.setattr(Ranks, "least", lambda ranks, value, device: value)
    for free, peak, expected in (
        (10**9, 1000, False),  # how much rollouts take is not known yet
        (1254, 1200 + whole, True),  # 1000 and the model are 90 % of it
        (1254, 900, False),  # the largest so far was 1200
        (1476, 900, True),
    ):
        now |= {"free": free, "peak": peak}
        kept.clear()
        with gathering.around(model):
            pass
        assert bool(kept) is expected, (free, peak)


def test_files_of_another_model_are_refused_before_sharding(random_pipeline: Path, tmp_path: Path) -> None:
    config = json.loads((random_pipeline / "transformer" / "config.json").read_text())
    other = diffusers.QwenImageTransformer2DModel.from_config({**config, "num_layers": 1})
    other.save_pretrained(tmp_path / "other")
    (tmp_path / "other" / "config.json").write_text(json.dumps(config))  # its files alone tell
    with pytest.raises(ModelError, match=r"model\.transformer: .* lacks \d+ tensors, first 'transformer_b"):
        QwenImage.load(
            random_pipeline,
            device="cpu",
            dtype=torch.float32,
            embeddings_cache=tmp_path,
            transformer=str(tmp_path / "other"),
            deferred=True,
        )


@pytest.mark.parametrize(("rank", "per_node"), [(2, ()), (7, ()), (6, (4, 4))])
def test_a_rank_reads_its_rows_once_for_all_slots(
    rank: int,
    per_node: tuple[int, ...],
    random_pipeline: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    read: list[str] = []

    def counted(file: Any, name: str, target: torch.Tensor) -> None:
        read.append(name)
        read_tensor(file, name, target)

    read_tensor = skeletons._read_tensor
    monkeypatch.setattr(skeletons, "_read_tensor", counted)
    family = QwenImage.load(
        random_pipeline, device="cpu", dtype=torch.float32, embeddings_cache=tmp_path, deferred=True
    )
    slots = CopySlots(family.transformer, ["reference"])
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=8)
    try:
        shard(slots, Ranks(rank, 8, per_node), torch.bfloat16, "node" if per_node else "all")
        family.read_weights(list(slots.modules().values()))
        found = {
            (slot, name): tensor.to_local().clone()
            for slot in slots.slots
            for name, tensor in slots.state(slot).items()
            if isinstance(tensor, DTensor)
        }
    finally:
        dist.destroy_process_group()
    (file,) = (random_pipeline / "transformer").glob("*.safetensors")
    whole, parts = load_file(file), 4 if per_node else 8
    assert sorted(read) == sorted(whole)
    assert found.keys() == {(slot, name) for slot in slots.slots for name in whole}
    for (_, name), rows in found.items():
        chunks = [*whole[name].chunk(parts), *[whole[name][:0]] * parts]
        assert torch.equal(rows, chunks[rank % parts])


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A pipeline whose transformer, in files of 20 MB, is much larger than what loading needs besides."""
    directory = tmp_path_factory.mktemp("large") / "pipeline"
    QwenImage.tiny(directory, seed=0)
    config = json.loads((directory / "transformer" / "config.json").read_text())
    wide = {**config, "num_attention_heads": 384 // config["attention_head_dim"], "num_layers": 10}
    for file in (directory / "transformer").iterdir():
        file.unlink()
    model = diffusers.QwenImageTransformer2DModel.from_config(wide)
    model.save_pretrained(directory / "transformer", max_shard_size="20MB")
    return directory


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_no_rank_ever_holds_more_than_its_share_and_a_file(
    large: Path, random_pipeline: Path, tmp_path: Path
) -> None:
    results: Queue[Any] = _processes.Queue()
    arguments = random_pipeline, large, tmp_path, results
    ranks = [_processes.Process(target=_load, args=(rank, *arguments)) for rank in range(2)]
    for process in ranks:
        process.start()
    try:
        found = [results.get(timeout=600) for _ in ranks]
    finally:
        for process in ranks:
            process.kill()
    for before, after, whole, equal in found:
        assert equal
        # Two slots: loaded first, both were whole; shared, each rank has half of each.
        assert before > 1.9 * whole
        assert after < whole + 60 * MIB < 1.3 * whole


def _load(rank: int, small: Path, large: Path, scratch: Path, results: Queue[Any]) -> None:
    torch.set_num_threads(1)
    store = dist.FileStore(str(scratch / "store"), 2)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2, timeout=timedelta(seconds=600))

    def load(pipeline: Path, deferred: bool) -> tuple[CopySlots, int]:
        _begin_peak()
        start = _memory("VmRSS")
        family = QwenImage.load(
            pipeline, device="cpu", dtype=torch.float32, embeddings_cache=scratch, deferred=deferred
        )
        slots = CopySlots(family.transformer, ["reference"])
        shard(slots, Ranks(rank, 2), torch.bfloat16)
        if deferred:
            family.read_weights(list(slots.modules().values()))
        return slots, _memory("VmHWM") - start

    load(small, deferred=True)  # whatever the first load imports
    shared, after = load(large, deferred=True)
    whole, before = load(large, deferred=False)
    equal = all(
        torch.equal(tensor.to_local(), whole.state(slot)[name].to_local())  # type: ignore[attr-defined]
        for slot in whole.slots
        for name, tensor in shared.state(slot).items()
    )
    results.put(
        (before, after, 4 * sum(weight.numel() for weight in whole.trainable_parameters().values()), equal)
    )
    dist.barrier()
    dist.destroy_process_group()


def _begin_peak() -> None:
    Path("/proc/self/clear_refs").write_text("5", encoding="utf-8")


def _memory(which: str) -> int:
    lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{which}:"))
