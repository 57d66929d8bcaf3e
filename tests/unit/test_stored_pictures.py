"""Training data that are pictures: folders, Pick-a-Pic's columns, and what is refused."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from spotlight.cli.runs.train import driver_of
from spotlight.config.load import load_config
from spotlight.data.datasets import load_prompts
from spotlight.diffusion.samplers import ODE
from spotlight.models.family import ModelFamily
from spotlight.models.media import MediaSize
from spotlight.registry import FAMILIES
from spotlight.rollout.state import Recipe
from spotlight.rollout.stored_pictures import StoredPictures, picture_of, require_readable
from spotlight.runtime.observer import Observer
from spotlight.scheduler.types import PolicyVersion, Purpose, Rollout, RolloutId
from spotlight.testbed import PIPELINE_DIR
from spotlight_rewards.base.errors import ConfigError
from spotlight_rewards.base.prompt_files import PromptFileError
from spotlight_rewards.base.prompts import Prompt, PromptId

SFT, DPO = "algorithm.name=sft", "algorithm={name: diffusion-dpo, stored: true}"


def picture(path: Path, color: str = "red", size: tuple[int, int] = (32, 32)) -> Path:
    Image.new("RGB", size, color).save(path)
    return path


def trained(path: Path, algorithm: str = SFT, *more: str) -> tuple[Prompt, ...]:
    given = [algorithm, "rollout.group_size=2", f"data.train={path}", *more]
    return load_prompts(load_config(None, given)).train


def test_a_folder_of_pictures_with_captions(tmp_path: Path) -> None:
    for name, caption in (("b.jpg", "a cat\n"), ("a.png", "two\n dogs")):
        picture(tmp_path / name)
        (tmp_path / name).with_suffix(".txt").write_text(caption)
    found = trained(tmp_path)
    assert [(each.text, each.pictures) for each in found] == [
        ("two dogs", (str(tmp_path / "a.png"),)),
        ("a cat", (str(tmp_path / "b.jpg"),)),
    ]


def test_a_folder_with_an_index_as_hugging_face_has_it(tmp_path: Path) -> None:
    picture(tmp_path / "x.png")
    (tmp_path / "metadata.jsonl").write_text('{"file_name": "x.png", "text": "a cat", "tag": "cats"}\n\n')
    (found,) = trained(tmp_path)
    assert (found.text, found.metadata["tag"], found.pictures) == (
        "a cat",
        "cats",
        (str(tmp_path / "x.png"),),
    )


@pytest.mark.parametrize(
    ("column", "more"), [("prompt", ()), ("caption", ("data.prompt_column=caption", "data.test=testbed"))]
)
def test_rows_of_pick_a_pic_become_pairs_the_preferred_picture_first(
    tmp_path: Path, column: str, more: tuple[str, ...]
) -> None:
    for name in "abc":
        picture(tmp_path / f"{name}.png")

    def row(caption: str, first: str, second: str, *labels: float) -> str:
        values = caption, f"{first}.png", f"{second}.png", *labels
        return json.dumps(dict(zip(("caption", "jpg_0", "jpg_1", "label_0", "label_1"), values, strict=True)))

    rows = [row("one", "a", "b", 1, 0), row("two", "a", "c", 0, 1), row("tie", "b", "c", 0.5, 0.5)]
    rows.append(f'{{"{column}": "three", "pictures": ["c.png", "a.png"]}}')
    (tmp_path / "pairs.jsonl").write_text("\n".join(rows))
    found = trained(tmp_path / "pairs.jsonl", DPO, *more)
    names = [(each.text, "".join(Path(path).stem for path in each.pictures)) for each in found]
    assert names == [("one", "ab"), ("two", "ca"), ("three", "ca")]


def test_files_as_windows_and_other_languages_write_them(tmp_path: Path) -> None:
    for name in ("captions", "index"):
        (tmp_path / name).mkdir()
        picture(tmp_path / name / "a.png")
    (tmp_path / "captions" / "a.txt").write_text("a cat\r\n", encoding="utf-8-sig")
    line = json.dumps({"file_name": "a.png", "text": "a\u2028cat\x85"}, ensure_ascii=False)
    (tmp_path / "index" / "metadata.jsonl").write_text(f"{line}\n", encoding="utf-8-sig")
    assert [each.text for each in trained(tmp_path / "captions")] == ["a cat"]
    assert [each.text for each in trained(tmp_path / "index")] == ["a\u2028cat"]


PAIR = '{"caption": "tie", "jpg_0": "a.png", "jpg_1": "a.png", "label_0": %s, "label_1": %s}'


@pytest.mark.parametrize("labels", [("NaN", "1"), ("Infinity", "Infinity")])
def test_a_label_that_compares_with_nothing_is_refused(tmp_path: Path, labels: tuple[str, str]) -> None:
    (tmp_path / "pairs.jsonl").write_text(PAIR % labels)
    with pytest.raises(ConfigError, match=r"line 1 has label_0=.*; expected numbers"):
        trained(tmp_path / "pairs.jsonl", DPO)


@pytest.mark.parametrize(
    ("file", "text"),
    [
        ("pairs.jsonl", f'{PAIR % (1, 1)}\n\n{{"prompt": ""}}'),
        ("metadata.jsonl", '\n\n{"prompt": "", "file_name": "x"}'),
    ],
)
def test_a_bad_line_has_the_number_that_it_has_in_the_file(tmp_path: Path, file: str, text: str) -> None:
    (tmp_path / file).write_text(text)
    with pytest.raises(PromptFileError, match=rf"{file}:3: 'prompt' is "):
        trained(tmp_path / file if file == "pairs.jsonl" else tmp_path)


def test_what_is_missing_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="folder without pictures"):
        trained(tmp_path)
    picture(tmp_path / "a.png")
    with pytest.raises(ConfigError, match=r"a\.png has no prompt; expected one in a\.txt"):
        trained(tmp_path)
    for content, said in ((b" \n", "a.txt is empty; expected the prompt of a.png"),
                          (b"caf\xe9", "a.txt: line 1 is not UTF-8")):  # fmt: skip
        (tmp_path / "a.txt").write_bytes(content)
        with pytest.raises(ConfigError, match=said):
            trained(tmp_path)
    for line, said in (('{"file": "a.png", "text": "a cat"}', "has .'file', 'text'.; expected 'file_name'"),
                       ('{"text": "a", "text": "b"}', "the key 'text' stands twice")):  # fmt: skip
        (tmp_path / "metadata.jsonl").write_text(line)
        with pytest.raises(ConfigError, match=rf"line 1 of its metadata\.jsonl .*{said}"):
            trained(tmp_path)
    (tmp_path / "metadata.jsonl").write_text('{"file_name": "b.png", "text": "a cat"}')
    with pytest.raises(ValueError, match=r"no file .*b\.png"):
        trained(tmp_path)


@pytest.mark.parametrize(
    ("algorithm", "pictures", "expected"),
    [(SFT, 0, "1 to 2"), (SFT, 3, "1 to 2"), (DPO, 1, "2 to 2")],
)
def test_too_few_and_too_many_pictures_of_a_prompt(
    tmp_path: Path, algorithm: str, pictures: int, expected: str
) -> None:
    paths = [str(picture(tmp_path / f"{at}.png")) for at in range(pictures)]
    line = {"prompt": "a cat", **({"pictures": paths} if paths else {})}
    (tmp_path / "train.jsonl").write_text(json.dumps(line))
    with pytest.raises(
        ConfigError, match=f"data.train: found {pictures} pictures of 'a cat'; expected {expected}"
    ):
        trained(tmp_path / "train.jsonl", algorithm)


def test_damaged_pictures_are_named_before_the_model_is_loaded(tmp_path: Path) -> None:
    paths = [picture(tmp_path / f"{name}.jpg", size=(256, 256)) for name in ("whole", "cut", "none")]
    paths[1].write_bytes(paths[1].read_bytes()[:-400])
    paths[2].write_bytes(b"")
    for path in paths:
        path.with_suffix(".txt").write_text(f"a {path.stem} cat")
    config = load_config(
        None,
        [SFT, "device=cpu", "rollout.group_size=2", f"data.train={tmp_path}", f"runs_dir={tmp_path}/runs"],
    )
    with pytest.raises(PromptFileError, match=r"data.train: 2 pictures cannot be read") as refused:
        driver_of(config)(config, Observer(), 0.0)
    assert re.findall(r"'a (\w+) cat'", str(refused.value)) == ["cut", "none"]
    assert not (tmp_path / "runs").exists()
    require_readable([Prompt(PromptId("p"), "a cat", {"pictures": [str(paths[0])]})])


def test_a_picture_is_cut_in_the_middle_and_scaled(tmp_path: Path) -> None:
    wide = Image.new("RGB", (96, 32), "blue")
    wide.paste((255, 0, 0), (32, 0, 64, 32))
    wide.save(tmp_path / "wide.png")
    found = picture_of(tmp_path / "wide.png", MediaSize(16, 16))
    assert found.shape == (16, 16, 3)
    assert np.all(found[:, 4:12] == (255, 0, 0))


def test_what_a_run_on_pictures_excludes() -> None:
    for more, key in (
        ("exploration={}", "exploration"),
        ("fleet.driver=ray", "fleet.driver"),
        ("algorithm.train_samples=2", "algorithm.train_samples"),
        ("algorithm.silent_groups=skip", "algorithm.silent_groups"),
    ):
        with pytest.raises(ConfigError, match=f"{key}: .*with algorithm.name=sft on pictures of data.train"):
            load_config(None, [SFT, more])


@pytest.mark.parametrize("label", [None, "left"])
def test_labels_that_are_no_numbers_are_named_with_their_line(tmp_path: Path, label: object) -> None:
    row = {"caption": "a cat", "jpg_0": "a.png", "jpg_1": "b.png", "label_0": label, "label_1": 0}
    (tmp_path / "pairs.jsonl").write_text("\n" + json.dumps(row))
    with pytest.raises(ConfigError, match=f"line 2 has label_0={label!r}, label_1=0; expected numbers"):
        trained(tmp_path / "pairs.jsonl", DPO)


def test_lines_of_an_index_that_are_no_objects_are_named(tmp_path: Path) -> None:
    for line, problem in (('["a.png"]', "is a list"), ('{"file_name": ', "is no JSON")):
        (tmp_path / "metadata.jsonl").write_text(line)
        with pytest.raises(
            ConfigError, match=rf"line 1 of its metadata\.jsonl {problem}.*expected an object"
        ):
            trained(tmp_path)


def test_large_pictures_are_encoded_one_at_a_time(tmp_path: Path) -> None:
    paths = tuple(str(picture(tmp_path / f"{at}.png", size=(64, 64))) for at in range(3))
    family, size = load_tiny(tmp_path), MediaSize(512, 512)
    asked: list[int] = []

    def encode(frames: torch.Tensor, of: MediaSize) -> torch.Tensor:
        asked.append(len(frames))
        return torch.zeros(len(frames), *family.latent_shape(of))

    family.encode_frames = encode  # type: ignore[method-assign]
    prompt = Prompt(PromptId("p"), "a cat", {"pictures": paths})
    rollouts = [
        Rollout(RolloutId(f"a-{at}"), Purpose.TRAIN, 0, prompt.id, at, at, 3, PolicyVersion(0))
        for at in range(3)
    ]
    made = StoredPictures(family, {prompt.id: prompt}, 3).samples(
        rollouts, Recipe(size, ODE(), None, 1.0, "final")
    )
    assert (asked, len(made)) == ([1, 1, 1], 3)


def load_tiny(folder: Path) -> ModelFamily:
    return FAMILIES.load("qwen-image").load(
        PIPELINE_DIR,
        device="cpu",
        dtype=torch.float32,
        embeddings_cache=folder / "embeddings",
        max_text_tokens=64,
    )
