"""Prompts made for GenEval and OCR: in the official format, disjoint, and the same for the same seed."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from spotlight.cli.main import app
from spotlight_rewards.base.prompt_files import parse_prompts
from spotlight_rewards.geneval.geneval_reward import GenEval
from spotlight_rewards.geneval.vocabulary import TAGS
from spotlight_rewards.prompt_sets.geneval_prompts import geneval_prompts, record, scene_of, scenes
from spotlight_rewards.prompt_sets.ocr_prompts import ocr_prompts
from spotlight_rewards.prompt_sets.splitting import PromptSetError
from spotlight_rewards.reading.legibility import target_of
from spotlight_rewards.reward import RewardInputError


def need(name: str, count: int = 1, **more: Any) -> dict[str, Any]:
    return {"class": name, "count": count, **more}


OFFICIAL: list[dict[str, Any]] = [
    {
        "tag": "position",
        "include": [need("bench"), need("dog", position=["left of", 0])],
        "prompt": "a photo of a dog left of a bench",
    },
    {
        "tag": "color_attr",
        "include": [need("umbrella", color="red"), need("couch", color="blue")],
        "prompt": "a photo of a red umbrella and a blue couch",
    },
    {
        "tag": "counting",
        "include": [need("tv remote", 2)],
        "exclude": [need("tv remote", 3)],
        "prompt": "a photo of two tv remotes",
    },
]
"""In the form of the official script's prompts."""


@pytest.fixture(scope="module")
def sets() -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    return geneval_prompts(3000, 240, seed=7, without=OFFICIAL)


def test_no_scene_is_in_both_sets_nor_among_those_left_out(sets: Any) -> None:
    train, held_out = sets
    assert (len(train), len(held_out)) == (3000, 240)
    assert len({each["prompt"] for each in (*train, *held_out)}) == 3240
    trained, judged, official = ({scene_of(each) for each in part} for part in (train, held_out, OFFICIAL))
    assert not trained & judged
    assert not (trained | judged) & official
    assert len(judged) == 240
    for part in (train, held_out):
        shares = Counter(each["tag"] for each in part)
        assert set(shares) == set(TAGS)
        assert (
            len({shares[tag] for tag in TAGS if tag != "single_object"}) <= 2
        )  # a remainder may differ by one


def test_every_record_is_one_that_the_prompt_file_and_the_reward_take(sets: Any, tmp_path: Path) -> None:
    text = "\n".join(map(json.dumps, sets[0]))
    prompts = parse_prompts(text, "train.jsonl")
    GenEval().check([each.text for each in prompts], [each.metadata for each in prompts])
    official = parse_prompts("\n".join(map(json.dumps, OFFICIAL)), "evaluation_metadata.jsonl")
    GenEval().check([each.text for each in official], [each.metadata for each in official])


@pytest.mark.parametrize("tag", TAGS)
def test_every_wording_of_a_scene_asks_for_that_scene_and_says_so(tag: str) -> None:
    every = list(scenes(tag))
    for scene in every[:: 1 + len(every) // 40]:
        for wording in range(4 * len(scene.things)):
            made = record(scene, wording)
            assert scene_of(made) == scene
            assert list(made)[-1] == "prompt"
            for thing in scene.things:
                assert (thing.color or "") in made["prompt"]
            if tag == "position":
                reference, placed = made["include"]
                relation = placed["position"][0]
                first, second = made["prompt"].split(f" {relation} ")
                assert (placed["class"] in first, reference["class"] in second) == (True, True)


def test_the_same_seed_makes_the_same_prompts_on_any_machine(sets: Any) -> None:
    digest = hashlib.sha256(json.dumps(sets).encode()).hexdigest()[:16]
    assert digest == "1720659c0b22a6d2"
    other, _ = geneval_prompts(10, 6, seed=8, without=OFFICIAL)
    assert not [each for each in other if each in sets[0][:10]]
    texts = hashlib.sha256(json.dumps(ocr_prompts(300, 30, seed=7)).encode()).hexdigest()[:16]
    assert texts == "f27f775c4ed50bc8"


def test_texts_to_draw_are_in_one_set_and_can_be_read() -> None:
    train, held_out = ocr_prompts(2000, 200, seed=1, without=["GOLDEN Anchor", "\uff43omet"])
    assert len({*train, *held_out}) == 2200
    trained, judged = ({target_of(each) for each in part} for part in (train, held_out))
    assert not trained & judged
    assert not (trained | judged) & {"goldenanchor", "comet"}
    assert min(map(len, trained | judged)) >= 4  # shorter ones are found in noise


def test_more_than_there_is_is_refused_with_the_most() -> None:
    with pytest.raises(
        PromptSetError, match=r"99,999,999 training prompts are asked for; there are at most [\d,]+."
    ):
        ocr_prompts(99_999_999, 1, seed=0)


@pytest.mark.parametrize("tag", [None, "counts", ["counting"]])
def test_a_record_to_leave_out_whose_tag_is_none_is_refused(tag: object) -> None:
    wrong = {**OFFICIAL[2], "tag": tag}
    with pytest.raises(RewardInputError, match=r"'tag' of prompt 'a photo of two tv remotes' is .*position"):
        geneval_prompts(10, 6, seed=7, without=[OFFICIAL[0], wrong])


def test_the_command_tells_the_prompts_per_tag_and_warns_of_a_tag_without_any(tmp_path: Path) -> None:
    known = tmp_path / "known.jsonl"
    known.write_text("".join(f"{json.dumps(record(each, 0))}\n" for each in scenes("single_object")))
    command = ["prompts", "geneval", str(tmp_path / "out"), "--count", "50"]
    done = CliRunner().invoke(app, [*command, "--without", str(known)])
    assert done.exit_code == 0, done.output
    assert "train.jsonl: 50 prompts (single_object 0, two_object 10, counting 10, colors 10," in done.stdout
    assert "no prompts with the tag single_object: --without has every such scene" in done.stderr


def test_the_default_held_out_set_is_no_larger_than_there_are_texts(tmp_path: Path) -> None:
    done = CliRunner().invoke(app, ["prompts", "ocr", str(tmp_path), "--count", "20000"])
    assert done.exit_code == 0, done.output
    assert "train.txt: 20,000 prompts" in done.stdout
    assert "test.txt: 1,000 prompts" in done.stdout


@pytest.mark.parametrize(("kind", "ending"), [("geneval", "jsonl"), ("ocr", "txt")])
def test_the_command_writes_both_files_once(kind: str, ending: str, tmp_path: Path) -> None:
    known = tmp_path / f"known.{ending}"
    known.write_text(
        "\n".join(map(json.dumps, OFFICIAL)) if kind == "geneval" else 'a sign that says "Golden Anchor"'
    )
    command = [
        "prompts",
        kind,
        str(tmp_path / "out"),
        "--count",
        "60",
        "--seed",
        "3",
        "--without",
        str(known),
    ]
    done = CliRunner().invoke(app, command)
    assert done.exit_code == 0, done.output
    assert done.stderr == ""
    lengths = [
        len(parse_prompts((tmp_path / "out" / f"{name}.{ending}").read_text(), f"{name}.{ending}"))
        for name in ("train", "test")
    ]
    assert lengths == [60, 6]
    again = CliRunner().invoke(app, command)
    assert again.exit_code == 2
    assert "is there already" in again.output
    gone = CliRunner().invoke(
        app, ["prompts", kind, str(tmp_path / "other"), "--without", str(tmp_path / "gone")]
    )
    assert gone.exit_code == 2
    assert "cannot be read" in gone.output


def test_a_place_that_is_no_directory_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    done = CliRunner().invoke(app, ["prompts", "ocr", str(tmp_path / "file"), "--count", "6"])
    assert done.exit_code == 2
    assert "expected a directory, or where one can be made" in " ".join(done.output.split())
