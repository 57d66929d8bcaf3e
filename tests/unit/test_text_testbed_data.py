"""The writing testbed's prompts and pictures: what ships is what the code makes, and readers read it."""

from __future__ import annotations

import json
import subprocess
import sys

import numpy as np
import pytest
from tools.testbed.text.make import misspelled, random_words
from tools.testbed.text.pictures import HEIGHT_PX, WIDTH_PX, render_all
from tools.testbed.text.prompts import INKS, LETTERS, WORDS, is_held_out, record, split

from spotlight.testbed import TESTBEDS
from spotlight_rewards.reading.legibility import target_of

TRAIN, TEST = split()
SHIPPED = TESTBEDS["testbed-text"]


def test_shipped_files_are_what_the_command_makes(tmp_path):
    subprocess.run([sys.executable, "-m", "tools.testbed.text.prompts", str(tmp_path)], check=True)
    for path, records in ((SHIPPED.train, TRAIN), (SHIPPED.test, TEST)):
        assert path.read_bytes() == (tmp_path / path.name).read_bytes()
        assert [json.loads(line) for line in path.read_text().splitlines()] == records


def test_held_out_words_are_seen_nowhere_else():
    assert set("".join(WORDS)) <= set(LETTERS)
    targets = [[target_of(each["prompt"]).upper() for each in records] for records in (TRAIN, TEST)]
    assert sorted(targets[0] + targets[1]) == sorted(WORDS)
    assert len(set(WORDS)) == len(WORDS) == 226
    assert {word for word in WORDS if is_held_out(word)} == set(targets[1])
    assert not any(map(is_held_out, random_words(2000, seed=0)[0]))


def test_pictures_are_reproducible_and_fresh():
    first = render_all(["CAT", "HORSE"], ["red", "blue"], seed=3)
    assert first.shape == (2, HEIGHT_PX, WIDTH_PX, 3)
    np.testing.assert_array_equal(first, render_all(["CAT", "HORSE"], ["red", "blue"], seed=3))
    assert any(
        (first != render_all(["CAT", "HORSE"], ["red", "blue"], seed=seed)).any() for seed in range(4, 9)
    )


def test_captions_misspell_as_often_as_asked():
    rng = np.random.default_rng(0)
    right = np.mean([misspelled("CAT", 0.3, rng)[1] == "A" for _ in range(2000)])
    assert right == pytest.approx(0.7 + 0.3 / len(LETTERS), abs=0.03)


@pytest.mark.slow
def test_readers_read_what_is_drawn():
    from tools.testbed.text.make import read

    words, inks = random_words(200, seed=1)
    records = [record(word, ink) for word, ink in zip(words, inks, strict=True)]
    assert set(inks) == set(INKS)
    scores = read(render_all(words, inks, seed=1), records)
    assert scores["exact"] > 0.97
    assert scores["tesseract_exact"] > 0.6
