"""The testbed's prompts and scenes: what ships is what the code makes, and the splits are disjoint."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter

import numpy as np
import pytest
from tools.testbed.prompts import HELD_OUT, TAGS, all_records, split
from tools.testbed.scenes import render_all, sample_scene

from spotlight.testbed import TEST_PROMPTS, TRAIN_PROMPTS
from spotlight_rewards.shapes import PALETTE, SHAPES, parse_requirements

TRAIN, TEST = split()


def test_shipped_files_are_what_the_command_makes(tmp_path):
    subprocess.run([sys.executable, "-m", "tools.testbed.prompts", str(tmp_path)], check=True)
    for shipped in (TRAIN_PROMPTS, TEST_PROMPTS):
        assert shipped.read_bytes() == (tmp_path / shipped.name).read_bytes()
    for path, records in ((TRAIN_PROMPTS, TRAIN), (TEST_PROMPTS, TEST)):
        assert [json.loads(line) for line in path.read_text().splitlines()] == records


def test_no_prompt_is_in_both_splits_or_twice():
    texts = [record["prompt"] for record in TRAIN + TEST]
    assert len(set(texts)) == len(texts) == sum(map(len, all_records().values()))


def test_the_held_out_split_covers_every_tag_and_training_every_word():
    assert Counter(record["tag"] for record in TEST) == HELD_OUT
    for tag in TAGS:
        train = {word for r in TRAIN if r["tag"] == tag for word in r["prompt"].split()}
        test = {word for r in TEST if r["tag"] == tag for word in r["prompt"].split()}
        assert test <= train


def test_metadata_agrees_with_the_text():
    for record in TRAIN + TEST:
        text = record["prompt"]
        for entry in record["include"]:
            assert entry["class"] in text
            assert entry.get("color", "") in text
        for word in (*PALETTE, *SHAPES):
            assert (word in text) == any(word in (e["class"], e.get("color")) for e in record["include"])
        parse_requirements(text, record)
    position = next(r for r in TRAIN if r["tag"] == "position" and " left of " in r["prompt"])
    subject, reference = position["prompt"].split(" left of ")
    assert position["include"][0]["class"] in reference
    assert position["include"][1]["class"] in subject
    assert position["include"][1]["position"] == ["left of", 0]


def test_renders_are_reproducible_and_fresh():
    records = TEST[:20]
    first = render_all(records, seed=3)
    assert first.shape == (20, 32, 32, 3)
    assert first.dtype == np.uint8
    np.testing.assert_array_equal(first, render_all(records, seed=3))
    assert (first != render_all(records, seed=4)).any()


def test_impossible_scenes_are_refused():
    rng = np.random.default_rng(0)
    with pytest.raises(ValueError, match="10 objects; a scene has 9 cells"):
        sample_scene({"prompt": "many", "include": [{"class": "circle", "count": 10}]}, rng)
    cycle = [
        {"class": "circle", "count": 1},
        {"class": "square", "count": 1, "position": ["above", 0]},
        {"class": "triangle", "count": 3, "position": ["above", 1]},
    ]
    with pytest.raises(ValueError, match="no layout found for prompt 'odd'"):
        sample_scene({"prompt": "odd", "include": cycle}, rng)
