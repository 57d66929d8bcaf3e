"""`spotlight score` and `spotlight rewards check`: the rewards' own scores, and every way to fail."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from click.testing import Result
from PIL import Image
from typer.testing import CliRunner

from spotlight.cli.main import app
from spotlight_rewards.base.file_errors import StoreError
from spotlight_rewards.base.media_files import encode_picture, read_media
from spotlight_rewards.commands.rewards_command import may_download
from spotlight_rewards.example_pictures import example_picture
from spotlight_rewards.originals import original_of
from spotlight_rewards.reward import RewardInputError
from spotlight_rewards.reward_config import RewardConfig
from spotlight_rewards.reward_registry import facts_of
from spotlight_rewards.shapes import FACTS, shapes

OWN = """
import os
from spotlight_rewards.reward import takes_groups

def dark(images, prompts, metadata, *, factor=1.0):
    if any(image.mean() > 250 for image in images):
        raise ValueError("too bright")
    return {"score": [-factor * float(image.mean()) for image in images], "frames": [1.0] * len(images)}

calls = 0

def moody(images, prompts, metadata):
    global calls
    calls += 1
    return [float(calls)] * len(images)

@takes_groups
def compared(images, prompts, metadata):
    levels = [float(image.mean()) for image in images]
    return [level - min(levels) for level in levels]
"""


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "mine.py").write_text(OWN)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")
    return tmp_path


def spotlight(*arguments: str) -> Result:
    return CliRunner().invoke(app, arguments)


def save(name: str, picture: np.ndarray, **about: object) -> str:
    Path(name).parent.mkdir(parents=True, exist_ok=True)
    Path(name).write_bytes(encode_picture(picture, about))
    return name


def grey(level: int) -> np.ndarray:
    return np.full((32, 48, 3), level, np.uint8)


def test_scores_are_the_rewards_own_best_first(here: Path) -> None:
    assert FACTS.example is not None
    wanted = dict(FACTS.example.metadata)
    white = np.full((64, 64, 3), 255, np.uint8)
    save("a/1.png", white)
    save("a/2.png", example_picture("shapes"))
    lines = [{"prompt": name, **wanted} for name in ("first", "second")]
    (here / "prompts.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    done = spotlight("score", "shapes", "a", "--prompts", "prompts.jsonl", "-p", "train_on=strict", "--json")
    assert done.exit_code == 0, done.output
    found = json.loads(done.stdout)
    direct = shapes([white, example_picture("shapes")], ["", ""], [wanted] * 2, train_on="strict")
    assert [each["score"] for each in found["pictures"]] == sorted(direct["score"], reverse=True) == [1, 0]
    assert [each["file"] for each in found["pictures"]] == ["a/2.png", "a/1.png"]
    assert found["pictures"][0]["details"]["graded"] == direct["graded"][1]
    with Image.open(found["sheet"]) as sheet:
        assert sheet.width > 2 * 128


def test_one_prompt_serves_as_many_pictures_in_a_row(here: Path) -> None:
    names = [save(f"{index}.png", example_picture("shapes")) for index in range(4)]
    lines = [{"prompt": name, **dict(FACTS.example.metadata)} for name in ("x", "y")]  # type: ignore[union-attr]
    (here / "p.jsonl").write_text("\n".join(map(json.dumps, lines)))
    found = json.loads(spotlight("score", "shapes", *names, "--prompts", "p.jsonl", "--json").stdout)
    prompts = {each["file"]: each["prompt"] for each in found["pictures"]}
    assert [prompts[name] for name in names] == ["x", "x", "y", "y"]
    wrong = spotlight("score", "shapes", *names[:3], "--prompts", "p.jsonl")
    assert wrong.exit_code == 2
    assert "--prompts: found 2 prompts for 3 pictures" in wrong.stderr


def test_a_comparing_reward_gets_whole_groups_even_of_equal_prompts(here: Path) -> None:
    names = [save(f"{index:02}.png", grey(index)) for index in range(36)]
    lines = [json.dumps({"prompt": "a dog", "line": line}) for line in range(2)]
    (here / "p.jsonl").write_text("\n".join(lines))
    done = spotlight("score", "mine:compared", *names, "--prompts", "p.jsonl", "--json")
    assert done.exit_code == 0, done.output
    found = {each["file"]: each for each in json.loads(done.stdout)["pictures"]}
    assert [found[name]["score"] for name in names] == [*range(18)] * 2
    assert {tuple(each["details"].values()) for each in found.values()} == {(18.0, 0.0)}


def test_what_was_drawn_of_the_pictures_is_no_sample(here: Path) -> None:
    for name in ("before-after.png", "before-after.webp", "1.png"):
        save(f"a/{name}", grey(10))
    for _ in range(2):
        done = spotlight("score", "mine:dark", "a", "--sheet", "a/scores.png", "--json")
        assert [each["file"] for each in json.loads(done.stdout)["pictures"]] == ["a/1.png"]


def test_a_reward_of_ones_own_its_failures_and_videos(here: Path) -> None:
    dark, bright = save("dark.png", grey(10)), save("bright.png", grey(255))
    frames = [Image.fromarray(grey(level)) for level in (20, 40)]
    frames[0].save("video.webp", save_all=True, append_images=frames[1:], lossless=True)
    done = spotlight("score", "mine:dark", dark, bright, "video.webp", "-p", "factor=2", "--sheet", "s/t.png")
    assert done.exit_code == 1
    lines = done.output.splitlines()
    assert lines[0].split() == ["score", "frames", "picture", "prompt"]
    assert [line.split()[:3] for line in lines[1:3]] == [["-20", "1", "dark.png"], ["-60", "1", "video.webp"]]
    assert "bright.png: reward 'dark' raised ValueError: too bright" in done.output
    assert "best and worst: s/t.png" in done.output
    assert (here / "s" / "t.png").is_file()
    assert read_media(Path("video.webp"))[0].shape == (2, 32, 48, 3)


def test_scores_outlive_a_sheet_that_cannot_be_written(here: Path) -> None:
    dark = save("dark.png", grey(10))
    done = spotlight("score", "mine:dark", dark, "--sheet", f"{dark}/sheet.png")
    assert done.exit_code == 2
    assert "dark.png" in done.stdout.splitlines()[1]
    assert "cannot write the picture" in done.stderr


def test_prompts_come_from_the_pictures_where_generate_wrote_them() -> None:
    name = save("sign.png", example_picture("sign"), prompt='a sign that says "OPEN"', seed=3)
    pytest.importorskip("tesserocr")
    done = spotlight("score", "ocr", name, "--json")
    assert done.exit_code == 0, done.output
    (found,) = json.loads(done.stdout)["pictures"]
    assert (found["score"], found["prompt"]) == (1.0, 'a sign that says "OPEN"')


def test_pictures_are_read_as_viewers_show_them(here: Path) -> None:
    lying, turned = Image.fromarray(np.arange(24, dtype=np.uint8).reshape(2, 4, 3)), Image.Exif()
    turned[0x0112] = 6  # a camera held upright
    lying.save("turned.png", exif=turned)
    assert read_media(Path("turned.png"))[0].shape == (4, 2, 3)
    assert (read_media(Path("turned.png"))[0] == np.rot90(np.asarray(lying), -1)).all()
    Image.new("RGBA", (3, 2), (0, 0, 0, 0)).save("clear.png")
    assert (read_media(Path("clear.png"))[0] == 255).all()
    Image.fromarray(np.full((2, 2), 4000, np.uint16)).save("deep.png")
    with pytest.raises(StoreError, match=r"more than 8 bits .* save it with 8"):
        read_media(Path("deep.png"))
    with pytest.raises(RewardInputError, match=r"more than 8 bits .* save it with 8"):
        original_of("edit-score", "a cat", {"references": ["deep.png"]})
    preview = Image.new("RGB", (2, 1), "red")
    for behind in (preview, lying):
        lying.save("photo.jpg", format="MPO", save_all=True, append_images=[behind])
        assert read_media(Path("photo.jpg"))[0].shape == (2, 4, 3)


def test_what_is_wrong_is_named_before_any_work(here: Path) -> None:
    bare = save("bare.png", grey(10))
    (here / "empty").mkdir()
    (here / "text.png").write_text("no picture")
    (here / "p.txt").write_text("a dog\n")
    for arguments, words in (
        (["ocr", bare], "the reward 'ocr' reads the prompt's text, which bare.png does not hold"),
        (["ocr", bare, bare], "reads the prompt's text, which bare.png and 1 more do not hold"),
        (["shapes", bare, "--prompts", "p.txt"], "reads the prompt's metadata"),
        (["ocr", bare, "--prompts", "p.txt"], "has no text in double quotes"),
        (["ocr", bare, "--prompts", "gone.txt"], "--prompts gone.txt cannot be read"),
        (["jpeg_size", "empty"], "empty holds no pictures"),
        (["jpeg_size", "gone.png"], "gone.png cannot be read (FileNotFoundError"),
        (["jpeg_size", "text.png"], "text.png cannot be read (UnidentifiedImageError"),
        (["jpeg_sizes", bare], "Did you mean 'jpeg_size'?"),
        (["jpeg_size", bare, "-p", "size=3"], "unexpected params 'size'; it accepts quality"),
        (["jpeg_size", bare, "-p", "quality"], "expected key.subkey=value"),
        (["jpeg_size", bare, "--deadline-s", "2000000"], "Invalid value for '--deadline-s'"),
    ):
        done = spotlight("score", *arguments)
        assert done.exit_code == 2, done.output
        assert words in " ".join(done.stderr.split())
        assert "Traceback" not in done.output


def test_check_compares_with_what_is_known() -> None:
    done = spotlight("rewards", "check", "shapes")
    assert done.exit_code == 0, done.output
    assert "ok    score: 1, expected 1\n" in done.output
    assert "stands in" not in done.output
    done = spotlight("rewards", "check", "motion")
    assert "ok    score: 1, expected 1\n" in done.output
    done = spotlight("rewards", "check", "mine:compared")
    assert "ok    once more" in done.output
    done = spotlight("rewards", "check", "mine:moody")
    assert done.exit_code == 1
    assert "ok    score: 1, expected a number" in done.output
    assert "WRONG once more: 2, expected the same" in done.output
    done = spotlight("rewards", "check", "mine:gone")
    assert done.exit_code == 2
    assert "has no 'gone'; the functions it defines are: dark, moody" in done.stderr


@pytest.mark.parametrize(
    ("name", "params", "downloads"),
    [
        ("ocr", {}, False),
        ("pickscore", {}, True),
        ("geneval2", {}, True),
        ("geneval2", {"endpoint": {}}, False),
        ("vlm-judge", {"endpoint": {}}, False),
        ("vlm-judge", {"model": {}}, True),
        ("http", {"server": {}}, False),
    ],
)
def test_check_promises_a_download_only_of_what_is_at_the_hub(
    name: str, params: dict[str, object], downloads: bool
) -> None:
    assert may_download(RewardConfig(name=name, params=params), facts_of(name)) == downloads


def test_the_command_without_a_trainer_has_examples_of_its_own(here: Path) -> None:
    from spotlight_rewards.commands.main import app as standalone

    for command in ("score", "check", "serve", "prompts", "convert-geneval"):
        shown = CliRunner().invoke(standalone, [command, "--help"]).output
        assert f"spotlight-rewards {command} " in shown
        assert "spotlight rewards" not in shown
    save("a.png", grey(3))
    done = CliRunner().invoke(standalone, ["score", "jpeg_size", "a.png"])
    assert done.exit_code == 0, done.output
    assert "pickscore" in CliRunner().invoke(standalone, ["list"]).output


@pytest.mark.slow  # a process that imports transformers
def test_check_refuses_a_model_that_prefers_the_wrong_prompt(here: Path) -> None:
    from spotlight_rewards.preference.clip_rewards import ClipScore

    params = [word for key, value in ClipScore().tiny(here).items() for word in ("-p", f"{key}={value}")]
    done = spotlight("rewards", "check", "clip-score", *params)
    assert f"scored by {here}/clip@" in done.output
    assert "a range stands in" in done.output
    assert ("WRONG" in done.output) == bool(done.exit_code)
    assert "ok    once more" in done.output
