"""The prompt cache: filled once, keyed by content, never wrong."""

from __future__ import annotations

import logging
import os
import shutil
from pathlib import Path

import pytest
import safetensors.torch
import torch

from spotlight.models.families.qwen_image import QwenImage
from spotlight.models.text import prompt_encoder
from spotlight_files import file_contents
from spotlight_files.model_errors import ModelError
from spotlight_files.pipeline_files import PipelineFiles

PROMPT = "one red circle"


def load(directory: Path, cache: Path, dtype: torch.dtype = torch.float32, tokens: int = 512) -> QwenImage:
    return QwenImage.load(
        directory, device="cpu", dtype=dtype, embeddings_cache=cache, max_text_tokens=tokens
    )


def loaded(family: QwenImage) -> bool:
    """Whether the text encoder is in memory."""
    return family._prompts._pipeline is not None


def files(cache: Path) -> list[Path]:
    return sorted(path for path in cache.rglob("*") if path.is_file())


def test_a_hit_needs_no_text_encoder(random_pipeline: Path, tmp_path: Path) -> None:
    first = load(random_pipeline, tmp_path)
    assert not loaded(first)
    made = first.encode([PROMPT, PROMPT, " "])
    assert loaded(first)
    assert made[0] is made[1]
    assert len(files(tmp_path)) == 2
    second = load(random_pipeline, tmp_path)
    assert torch.equal(second.encode([PROMPT])[0]["embeds"], made[0]["embeds"])
    assert not loaded(second)


@pytest.mark.parametrize("package", ["diffusers", "transformers", "tokenizers", "ftfy", "torchvision"])
def test_another_version_of_what_reads_prompts_makes_them_again(
    random_pipeline: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, package: str
) -> None:
    load(random_pipeline, tmp_path).encode([PROMPT])
    there = prompt_encoder.version
    monkeypatch.setattr(prompt_encoder, "version", lambda name: "99" if name == package else there(name))
    assert load(random_pipeline, tmp_path).not_embedded([PROMPT]) == [PROMPT]


def test_the_text_encoder_is_freed_and_comes_back(random_pipeline: Path, tmp_path: Path) -> None:
    family = load(random_pipeline, tmp_path)
    family.encode([PROMPT])
    family.free_text_encoder()
    assert not loaded(family)
    family.encode(["one blue square"])
    assert loaded(family)


def test_embeddings_do_not_depend_on_company(random_pipeline: Path, tmp_path: Path) -> None:
    prompts = [PROMPT, "two blue squares left of one yellow triangle", " "]
    together = load(random_pipeline, tmp_path / "a").encode(prompts)
    for prompt, condition in zip(reversed(prompts), reversed(together), strict=True):
        alone = load(random_pipeline, tmp_path / "b").encode([prompt])[0]
        assert torch.equal(alone["embeds"], condition["embeds"])


@pytest.mark.parametrize("damage", ["cut", "bits", "empty"])
def test_a_damaged_file_is_reported_and_made_again(
    random_pipeline: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture, damage: str
) -> None:
    sound = load(random_pipeline, tmp_path).encode([PROMPT])[0]["embeds"]
    (path,) = files(tmp_path)
    data = path.read_bytes()
    flipped = data[:-5] + bytes([data[-5] ^ 1]) + data[-4:]
    path.write_bytes({"cut": data[:-8], "bits": flipped, "empty": b""}[damage])
    with caplog.at_level(logging.WARNING):
        again = load(random_pipeline, tmp_path).encode([PROMPT])[0]["embeds"]
    assert torch.equal(again, sound)
    assert str(path) in caplog.text
    assert path.read_bytes() == data


def test_the_key_covers_all_that_shapes_an_embedding(random_pipeline: Path, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    changed = Path(shutil.copytree(random_pipeline, tmp_path / "changed"))
    weights = changed / "text_encoder" / "model.safetensors"
    tensors = safetensors.torch.load_file(weights)
    name = next(n for n in tensors if n.endswith("embed_tokens.weight"))
    tensors[name] = 2 * tensors[name]
    safetensors.torch.save_file(tensors, weights, {"format": "pt"})
    copied = Path(shutil.copytree(random_pipeline, tmp_path / "copied"))

    for count, family in enumerate(
        [
            load(random_pipeline, cache),
            load(random_pipeline, cache, tokens=6),
            load(random_pipeline, cache, dtype=torch.bfloat16),
            load(changed, cache),
        ],
        start=1,
    ):
        family.encode([PROMPT])
        assert len(files(cache)) == count
    load(copied, cache).encode([PROMPT])  # the same content elsewhere is the same model
    assert len(files(cache)) == 4


def test_large_files_are_told_apart_by_samples_and_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(file_contents, "_WHOLE_FILE_BYTES", 100_000)
    large = tmp_path / "text_encoder" / "model.safetensors"
    large.parent.mkdir()
    large.write_bytes(bytes(1_000_000))
    files = PipelineFiles(tmp_path)
    identities = {files.identity("text_encoder")}
    assert {files.identity("text_encoder")} == identities
    stat = large.stat()
    large.write_bytes(bytes(999_999) + b"x")
    os.utime(large, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    identities.add(files.identity("text_encoder"))
    os.utime(large, ns=(stat.st_atime_ns, stat.st_mtime_ns + 1))
    identities.add(files.identity("text_encoder"))
    large.write_bytes(bytes(999_998))
    os.utime(large, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    identities.add(files.identity("text_encoder"))
    assert len(identities) == 4


def test_a_failed_write_leaves_nothing(
    random_pipeline: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "replace", full)
    with pytest.raises(ModelError, match="No space left"):
        load(random_pipeline, tmp_path).encode([PROMPT])
    assert files(tmp_path) == []


def test_a_cache_that_cannot_be_written_is_reported_with_the_remedy(
    random_pipeline: Path, tmp_path: Path
) -> None:
    (tmp_path / "cache").write_text("a file in the way")
    with pytest.raises(ModelError, match=r"cannot write prompt embeddings to .*/cache.* set cache_dir"):
        load(random_pipeline, tmp_path / "cache").encode([PROMPT])
