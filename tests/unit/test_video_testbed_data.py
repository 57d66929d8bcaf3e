"""The video testbed's prompts and clips: what ships is what the code makes, and the splits are disjoint."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter

import numpy as np
from tools.testbed.video.clips import FRAMES, SIDE_PX, render_all
from tools.testbed.video.prompts import split

from spotlight.testbed import TESTBEDS

TRAIN, TEST = split()
SHIPPED = TESTBEDS["testbed-video"]


def test_shipped_files_are_what_the_command_makes(tmp_path):
    subprocess.run([sys.executable, "-m", "tools.testbed.video.prompts", str(tmp_path)], check=True)
    for path, records in ((SHIPPED.train, TRAIN), (SHIPPED.test, TEST)):
        assert path.read_bytes() == (tmp_path / path.name).read_bytes()
        assert [json.loads(line) for line in path.read_text().splitlines()] == records


def test_held_out_combinations_are_balanced_and_new():
    texts = [record["prompt"] for record in TRAIN + TEST]
    assert len(set(texts)) == len(texts) == 48
    for pick, each in (
        (lambda record: record["motion"], 3),
        (lambda record: record["include"][0]["color"], 3),
        (lambda record: record["include"][0]["class"], 4),
    ):
        assert set(Counter(map(pick, TEST)).values()) == {each}
    words = {word for record in TRAIN for word in record["prompt"].split()}
    assert {word for record in TEST for word in record["prompt"].split()} <= words


def test_metadata_agrees_with_the_text():
    for record in TRAIN + TEST:
        (thing,) = record["include"]
        assert record["prompt"] == f"a {thing['color']} {thing['class']} moving {record['motion']}"


def test_clips_are_reproducible_and_fresh():
    first = render_all(TEST, seed=3)
    assert first.shape == (12, FRAMES, SIDE_PX, SIDE_PX, 3)
    assert first.dtype == np.uint8
    np.testing.assert_array_equal(first, render_all(TEST, seed=3))
    assert (first != render_all(TEST, seed=4)).any()
