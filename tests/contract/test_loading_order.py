"""The DiT is read when the text encoder is gone: weights and updates are those of one loaded at once, to the
bit, and the process never holds both.
"""

from __future__ import annotations

import json
import multiprocessing
from multiprocessing.queues import Queue
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from learner_job import alone, config_of, inline_learning, make_batch, overrides_of, prompts_of, train_rank

from spotlight.config.load import load_config
from spotlight.models.families.qwen_image import QwenImage
from spotlight.models.skeleton import base_state
from spotlight.registry import FAMILIES
from spotlight.runtime.assembly import components as build
from spotlight.runtime.assembly.learner_parts import assemble, fill_embeddings, prepare_model
from spotlight.training.sharding import Ranks

HALF = "model.dtype=bfloat16", "learner.autocast=bfloat16"
"""As on GPUs; weights stored in float32 are then copied, where they would be mapped from their files."""
CPU = torch.device("cpu")
MIB = 2**20
_processes = multiprocessing.get_context("forkserver")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", FAMILIES.built_in)
def test_a_transformer_read_later_is_the_one_loaded_at_once(
    name: str, dtype: torch.dtype, tmp_path: Path
) -> None:
    family = FAMILIES.load(name)
    family.tiny(tmp_path / "pipeline", seed=0)

    def load(deferred: bool) -> Any:
        return family.load(
            tmp_path / "pipeline", device="cpu", dtype=dtype, embeddings_cache=tmp_path, deferred=deferred
        )

    later, at_once = load(True), load(False)
    assert later.deferred
    assert all(parameter.is_meta for parameter in later.transformer.parameters())
    later.read_weights([later.transformer])
    assert not later.deferred
    expected = base_state(at_once.transformer) | dict(at_once.transformer.named_buffers())
    found = base_state(later.transformer) | dict(later.transformer.named_buffers())
    assert found.keys() == expected.keys()
    for key, tensor in expected.items():
        assert found[key].dtype == tensor.dtype, key
        assert torch.equal(found[key], tensor), key


@pytest.mark.parametrize("name", FAMILIES.built_in)
def test_prompts_are_embedded_where_the_text_encoder_is_told_to_be(name: str, tmp_path: Path) -> None:
    """Of a family whose other device could not: nothing can be read back from it."""
    family = FAMILIES.load(name)
    family.tiny(tmp_path / "pipeline", seed=0)

    def load(cache: str, text_device: torch.device | None) -> Any:
        loaded = family.load(
            tmp_path / "pipeline",
            device="cpu",
            dtype=torch.float32,
            embeddings_cache=tmp_path / cache,
            max_text_tokens=512 if name == "wan-i2v" else 32,
            text_device=text_device,
        )
        if text_device is not None:
            loaded.device = torch.device("meta")
        return loaded.encode(["one red circle"])[0].tensors

    expected, found = load("usual", None), load("told", CPU)
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[key], tensor) for key, tensor in expected.items())


@pytest.mark.parametrize("algorithm", ["nft", "grpo", "full"])
def test_a_learner_equals_one_whose_model_was_loaded_at_once(
    algorithm: str, random_pipeline: Path, tmp_path: Path
) -> None:
    config = config_of(tmp_path, random_pipeline, algorithm)
    at_once = alone(config, build.load_family(config, CPU))
    later, learning = alone(config), inline_learning(config)
    before = later.digest()
    assert at_once.digest() == before
    for version in range(2):
        batch = make_batch(config, learning, version, version)
        assert train_rank(at_once, batch, batch.packed) == train_rank(later, batch, batch.packed)
    assert at_once.digest() == later.digest() != before


@pytest.fixture
def large(tmp_path: Path) -> Path:
    """A pipeline whose transformer and text encoder are much larger than what loading needs besides."""
    import diffusers
    import transformers

    directory = tmp_path / "pipeline"
    QwenImage.tiny(directory, seed=0)
    wider: dict[str, Any] = {
        "transformer": (diffusers.QwenImageTransformer2DModel, {"num_attention_heads": 48, "num_layers": 12}),
        "text_encoder": (transformers.Qwen2_5_VLForConditionalGeneration, {"intermediate_size": 600_000}),
    }
    for name, (kind, changes) in wider.items():
        config = json.loads((directory / name / "config.json").read_text())
        (config.get("text_config") or config).update(changes)
        for file in (directory / name).glob("*.safetensors"):
            file.unlink()
        made = kind.config_class.from_dict(config) if name == "text_encoder" else config
        model = kind(made) if name == "text_encoder" else kind.from_config(config)
        model.save_pretrained(directory / name, max_shard_size="20MB")
    return directory


@pytest.mark.slow
@pytest.mark.timeout(660)  # two processes, of which each has half
def test_the_text_encoder_and_the_transformer_are_never_held_together(large: Path, tmp_path: Path) -> None:
    at_once, later = (_in_a_process(large, tmp_path / str(each), each) for each in (True, False))
    held = sum(file.stat().st_size for file in (large / "transformer").glob("*.safetensors")) / 2  # bfloat16
    assert held > 100 * MIB
    assert at_once.peak - later.peak > 0.9 * held
    assert at_once.peak - later.embedded > 3 * held  # the text encoder is what is large, and is freed
    assert later.embedded < 50 * MIB
    assert 0.9 * held < later.assembled < 1.1 * held + 50 * MIB


class Grown(NamedTuple):
    """Bytes that a process has got more of: the most until all is loaded, once embedded, and at the end."""

    peak: int
    embedded: int
    assembled: int


def _in_a_process(pipeline: Path, scratch: Path, at_once: bool) -> Grown:
    results: Queue[Any] = _processes.Queue()
    process = _processes.Process(target=_grow, args=(pipeline, scratch, at_once, results))
    process.start()
    try:
        return Grown(*results.get(timeout=300))
    finally:
        process.kill()


def _grow(pipeline: Path, scratch: Path, at_once: bool, results: Queue[Any]) -> None:
    torch.set_num_threads(1)
    small = scratch / "small"
    QwenImage.tiny(small, seed=0)
    _load(small, scratch, at_once)  # whatever the first load imports
    Path("/proc/self/clear_refs").write_text("5", encoding="utf-8")
    start = _memory("VmRSS")
    embedded, assembled = _load(pipeline, scratch, at_once)
    results.put([each - start for each in (_memory("VmHWM"), embedded, assembled)])


def _load(pipeline: Path, scratch: Path, at_once: bool) -> tuple[int, int]:
    """Memory once the prompts are embedded, and with the learner."""
    config = load_config(None, [*overrides_of(scratch, pipeline), *HALF])
    model = prepare_model(config, CPU, build.load_family(config, CPU) if at_once else None)
    conditions = fill_embeddings(config, model, prompts_of(config), Ranks())
    embedded = _memory("VmRSS")
    learning = assemble(config, model, conditions, Ranks())
    assert not learning.model.family.deferred
    return embedded, _memory("VmRSS")


def _memory(which: str) -> int:
    lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{which}:"))
