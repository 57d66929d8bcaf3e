"""Prompts of Parquet files and Hugging Face datasets: rows as the same objects in .jsonl."""

from __future__ import annotations

import builtins
import os
from datetime import date
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from spotlight.cli.main import app
from spotlight.config.load import load_config
from spotlight.data.datasets import Prompts, load_prompts
from spotlight_rewards.base.errors import ConfigError
from spotlight_rewards.base.prompt_files import PromptFileError, parse_prompts

pyarrow = pytest.importorskip("pyarrow")
ROWS = [
    {"prompt": "two cats", "include": [{"class": "cat", "count": 2}], "seen": date(2026, 1, 2)},
    {"prompt": "a dog", "include": None, "seen": None},
]
LINES = (
    '{"prompt": "two cats", "include": [{"class": "cat", "count": 2}], "seen": "2026-01-02"}\n'
    '{"prompt": "a dog"}'
)
OTHERS = [{"prompt": f"{number} birds"} for number in (3, 4)]


def write_parquet(path: Path, rows: list[dict[str, Any]]) -> Path:
    from pyarrow import parquet

    path.parent.mkdir(parents=True, exist_ok=True)
    parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    return path


def read(train: object, test: object) -> Prompts:
    return load_prompts(load_config(Path(os.devnull), [f"data.train={train}", f"data.test={test}"]))


def test_a_parquet_file_is_read_as_its_objects(tmp_path: Path) -> None:
    found = read(
        write_parquet(tmp_path / "train.parquet", ROWS), write_parquet(tmp_path / "test.parquet", OTHERS)
    )
    assert list(found.train) == parse_prompts(LINES, "a.jsonl")
    assert [each.text for each in found.test] == ["3 birds", "4 birds"]
    name = str(tmp_path / "train.parquet")
    keys = [f"data.train={name}", f"data.test={name}", "rewards=[{name: jpeg_size}]", f"runs_dir={tmp_path}"]
    result = CliRunner().invoke(app, ["train", *keys, "--dry-run"])
    assert "2 of 2 held-out prompts are in data.train too" in " ".join(result.output.split())


def test_without_the_extra_the_error_names_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_parquet(tmp_path / "train.parquet", ROWS)
    real = builtins.__import__

    def absent(name: str, *rest: Any) -> Any:
        if name == "pyarrow":
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
        return real(name, *rest)

    monkeypatch.setattr(builtins, "__import__", absent)
    with pytest.raises(
        ConfigError, match=r"data.train: .*pyarrow is missing: pip install 'spotlight-rl\[datasets\]'"
    ):
        read(path, path)


def test_a_key_names_the_column_of_texts(tmp_path: Path) -> None:
    rows = [{"caption": text, "prompt": "other", "tag": "a"} for text in ("a cat", "a dog")]
    train = write_parquet(tmp_path / "train.parquet", rows)
    (tmp_path / "test.csv").write_text("tag,caption\na,a bird\n")
    (tmp_path / "test.jsonl").write_text('{"caption": "a fish"}')
    for name, text in (("test.csv", "a bird"), ("test.jsonl", "a fish")):
        keys = [f"data={{train: {train}, test: {tmp_path / name}, prompt_column: caption}}"]
        found = load_prompts(load_config(Path(os.devnull), keys))
        assert [(each.text, each.metadata) for each in found.train] == [
            ("a cat", {"tag": "a"}),
            ("a dog", {"tag": "a"}),
        ]
        assert [each.text for each in found.test] == [text]
    built_in = load_config(Path(os.devnull), [f"data.train={train}", "data.prompt_column=caption"])
    assert load_prompts(built_in).test
    with pytest.raises(ConfigError, match="expected one named text"):
        load_prompts(load_config(Path(os.devnull), [f"data.train={train}", "data.prompt_column=text"]))


@pytest.mark.parametrize(
    ("rows", "expected"),
    [
        (
            [{"caption": "a cat"}],
            "expected one named prompt. A run takes texts from another column by data.prom",
        ),
        ([{"prompt": "a cat", "jpg": b"\xff\xd8"}], "its column 'jpg' holds bytes"),
        (
            [{"prompt": "a cat", "negative_prompt": "blurry"}],
            "rollout.negative_prompt, which is for all prompts",
        ),
        ([{"prompt": "a cat", "media": "cat.png"}], "set data.reference_column=media"),
        ([{"prompt": "a cat"}, {"prompt": "a cat"}], "drop_duplicates"),
        ([{"prompt": None}], "'prompt' is missing"),
    ],
)
def test_what_would_be_lost_is_refused(tmp_path: Path, rows: list[dict[str, Any]], expected: str) -> None:
    path = write_parquet(tmp_path / "train.parquet", rows)
    with pytest.raises((ConfigError, PromptFileError)) as error:
        read(path, path)
    assert expected in str(error.value)


def test_a_file_that_is_no_parquet_is_refused(tmp_path: Path) -> None:
    (tmp_path / "train.parquet").write_bytes(b"PAR1 and no more")
    with pytest.raises(ConfigError, match="no Parquet file"):
        read(tmp_path / "train.parquet", tmp_path / "train.parquet")


@pytest.mark.slow
def test_a_dataset_is_read_by_its_folder_and_split(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    datasets = pytest.importorskip("datasets")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    both = datasets.DatasetDict(
        {"train": datasets.Dataset.from_list(ROWS), "test": datasets.Dataset.from_list(OTHERS)}
    )
    both.save_to_disk(tmp_path / "saved")
    hub = tmp_path / "as-on-the-hub"  # what load_dataset finds by name, a folder of data files by split
    write_parquet(hub / "data" / "train-00000-of-00001.parquet", ROWS)
    write_parquet(hub / "data" / "test-00000-of-00001.parquet", OTHERS)
    for folder in (tmp_path / "saved", hub):
        found = read(folder, folder)
        assert list(found.train) == parse_prompts(LINES, "a.jsonl")
        assert [each.text for each in found.test] == ["3 birds", "4 birds"]
        assert [each.text for each in read(f"{folder}:test", folder).train] == ["3 birds", "4 birds"]
        with pytest.raises(ConfigError, match=f"no split 'val': say {folder}:train or {folder}:test"):
            read(f"{folder}:val", folder)
    picture = datasets.Dataset.from_dict(
        {"prompt": ["a cat"], "image": [{"bytes": b"\x89PNG", "path": None}]}
    )
    picture.cast_column("image", datasets.Image()).save_to_disk(tmp_path / "pictures")
    with pytest.raises(ConfigError, match="its column 'image' holds"):
        read(tmp_path / "pictures", hub)


@pytest.mark.slow
def test_a_name_of_the_hub_is_asked_for(tmp_path: Path) -> None:
    pytest.importorskip("datasets")
    with pytest.raises(ConfigError, match=r"data.train: found hf:nobody/no-such-prompts"):
        read("hf:nobody/no-such-prompts", tmp_path)


def test_lines_with_replaced_characters_are_named(tmp_path: Path) -> None:
    train, table = tmp_path / "train.txt", tmp_path / "test.csv"
    train.write_text("a caf\ufffd\na cat\na na\ufffdve fox\n", encoding="utf-8")
    table.write_text("prompt\na dog\na \ufffd\n", encoding="utf-8")
    config = load_config(Path(os.devnull), [f"data.train={train}", f"data.test={table}"])
    notes = [note for note in load_prompts(config).notes(config) if "U+FFFD" in note]
    assert [note.partition(" lines")[0] for note in notes] == ["2", "1"]
    assert "could not read: 1, 3. " in notes[0]
    assert "could not read: 3. " in notes[1]
    (objects := tmp_path / "train.jsonl").write_text('{"prompt": "a cat"}\n{"prompt": "a \\uFFFD"}\n')
    written = load_config(Path(os.devnull), [f"data.train={objects}", f"data.test={objects}"])
    found = [note for note in load_prompts(written).notes(written) if "FFFD" in note]
    assert ["could not read: 2. " in note for note in found] == [True, True]
    clean = load_config(None)
    assert not [note for note in load_prompts(clean).notes(clean) if "U+FFFD" in note]
