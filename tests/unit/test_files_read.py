"""A run goes on only with the weights and pictures that it began with."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from test_runtime_scorers import go_on

from spotlight.config.load import load_config
from spotlight.data.datasets import Prompts
from spotlight.runtime.resuming.files_read import files_read, require_same_files
from spotlight.store.checkpoints import CheckpointStore
from spotlight.testbed import PIPELINE_DIR
from spotlight_files import file_contents, hub_snapshot
from spotlight_files.pipeline_files import PipelineFiles
from spotlight_rewards.base.file_errors import StoreError
from spotlight_rewards.base.prompt_files import parse_prompts, with_found_pictures

LORA = "pytorch_lora_weights.safetensors"


@pytest.fixture
def overrides(tmp_path: Path) -> list[str]:
    shutil.copytree(PIPELINE_DIR, tmp_path / "pipeline")
    for name in ("lora", "transformer"):
        (tmp_path / name).mkdir()
        save_file({"layer": torch.zeros(4)}, tmp_path / name / LORA)
    (tmp_path / "cat.png").write_bytes(b"a cat")
    given = {"path": "pipeline", "lora": "lora", "transformer": "transformer"}
    return [f"model.{key}={tmp_path / name}" for key, name in given.items()]


def pictured(folder: Path) -> Prompts:
    line = f'{{"prompt": "a cat", "references": ["{folder / "cat.png"}"]}}'
    return Prompts(tuple(parse_prompts(line, "train.jsonl")), ())


def retrained(path: Path) -> None:
    save_file({"layer": torch.ones(4)}, path)


@pytest.mark.parametrize(
    ("file", "change", "key"),
    [
        (f"lora/{LORA}", retrained, "model.lora"),
        (f"transformer/{LORA}", retrained, "model.transformer"),
        ("pipeline/scheduler/scheduler_config.json", lambda path: path.write_text("{}"), "model.path"),
        ("pipeline/vae/new.txt", lambda path: path.write_text("new"), "model.path"),
        ("cat.png", lambda path: path.write_bytes(b"a dog"), "data.train"),
    ],
)
def test_a_run_is_refused_with_other_files_and_goes_on_with_the_first(
    tmp_path: Path, overrides: list[str], file: str, change: Callable[[Path], object], key: str
) -> None:
    given, path = pictured(tmp_path), tmp_path / file
    go_on(tmp_path, {}, *overrides, save=True, given=given)
    saved = path.read_bytes() if path.exists() else None
    change(path)
    with pytest.raises(StoreError, match=rf"{re.escape(key)} \(.*\) holds other .* Put back the files"):
        go_on(tmp_path, {}, *overrides, given=given)
    path.unlink() if saved is None else path.write_bytes(saved)
    os.utime(path.parent)
    go_on(tmp_path, {}, *overrides, given=given)


def test_a_copy_is_the_same_and_an_older_checkpoint_says_nothing(
    tmp_path: Path, overrides: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(file_contents, "_WHOLE_FILE_BYTES", 100_000)  # as files of gigabytes
    found = files_read(load_config(None, overrides), pictured(tmp_path))
    assert sorted(found) == ["data.train", "model.lora", "model.path", "model.transformer"]
    copied = tmp_path / "copy"
    shutil.copytree(tmp_path / "pipeline", copied)
    (copied / ".cache/huggingface").mkdir(parents=True)  # of `hf download --local-dir`
    (copied / ".cache/huggingface/model_index.json.metadata").write_text("when it was loaded")
    shutil.copy(tmp_path / "cat.png", copied)
    config = load_config(None, [*overrides, f"model.path={copied}"])
    assert files_read(config, pictured(copied)) == found
    require_same_files({}, found, config)


def test_pictures_are_the_same_wherever_they_lie(tmp_path: Path) -> None:
    found = set[str]()
    for name, content in (("here", b"a cat"), ("there", b"a cat"), ("changed", b"a dog")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "cat.png").write_bytes(content)
        prompts = parse_prompts('{"prompt": "a cat", "references": ["cat.png"]}', "train.jsonl")
        prompts = with_found_pictures(prompts, str(tmp_path / name / "train.jsonl"))
        found.add(files_read(load_config(None, []), Prompts(tuple(prompts), ()))["data.train"])
    assert len(found) == 2


def test_pictures_may_change_where_the_command_names_the_run(tmp_path: Path, overrides: list[str]) -> None:
    config = load_config(None, overrides)
    require_same_files({"data.train": "a"}, {"data.train": "b"}, config.naming_run())
    with pytest.raises(StoreError, match=r"data\.train"):
        require_same_files({"data.train": "a"}, {"data.train": "b"}, config)
    with pytest.raises(StoreError, match=r"model\.lora"):
        require_same_files({"model.lora": "a"}, {"model.lora": "b"}, config.naming_run())


def test_a_file_may_be_called_what_is_no_utf_8(tmp_path: Path) -> None:
    shutil.copytree(PIPELINE_DIR, tmp_path / "model")
    files = PipelineFiles(tmp_path / "model")
    known = [files.contents(), files.identity("transformer")]
    (tmp_path / "model" / "transformer" / os.fsdecode(b"\xff.txt")).touch()
    assert not {files.contents(), files.identity("transformer")} & set(known)


def test_a_hubs_lora_is_known_by_its_commit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hub_snapshot, "cache_directory", lambda: tmp_path)
    config = load_config(None, ["model.lora=owner/adapter"])
    assert "model.lora" not in files_read(config, Prompts((), ()))
    branch = tmp_path / "models--owner--adapter" / "refs" / "main"
    branch.parent.mkdir(parents=True)
    branch.write_text("c0ffee")
    assert files_read(config, Prompts((), ()))["model.lora"] == "c0ffee"


def test_a_checkpoint_keeps_them(tmp_path: Path, overrides: list[str]) -> None:
    go_on(tmp_path, {}, *overrides, save=True)
    newest = CheckpointStore(tmp_path / "run/checkpoints", keep=1).newest_valid()
    assert newest is not None
    assert newest.header.contents == files_read(load_config(None, overrides), Prompts((), ()))
