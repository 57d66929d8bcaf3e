"""The motion reward: exact on renders; only one shape that moves the right way is worth anything."""

from __future__ import annotations

import subprocess
import sys
from itertools import product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tools.testbed.video.clips import SIDE_PX, render, render_all, sample_clip
from tools.testbed.video.prompts import record, split

from spotlight_rewards.motion import DIRECTIONS, check, motion
from spotlight_rewards.reward import RewardInputError
from spotlight_rewards.shapes import PALETTE, SHAPES

RECORDS = [each for records in split() for each in records]
OPPOSITE = {"left": "right", "right": "left", "up": "down", "down": "up"}
SEEDS = st.integers(0, 10**6)


def score(video, asked):
    curves = motion([video], ["a test"], [asked])
    return {name: values[0] for name, values in curves.items()}


def clip_of(seed):
    rng = np.random.default_rng(seed)
    asked = RECORDS[seed % len(RECORDS)]
    return asked, render(sample_clip(asked, rng))


def towards(asked, direction):
    (thing,) = asked["include"]
    return record(thing["class"], thing["color"], direction)


def test_every_render_of_every_prompt_scores_one():
    records = RECORDS * 10
    scores = motion(render_all(records, seed=1), [""] * len(records), records)
    assert {name: min(values) for name, values in scores.items()} == dict.fromkeys(scores, 1.0)


@given(SEEDS, st.sampled_from(sorted(DIRECTIONS)), st.sampled_from(SHAPES), st.sampled_from(sorted(PALETTE)))
def test_only_what_was_asked_for_passes(seed, direction, shape, color):
    asked, video = clip_of(seed)
    other = record(shape, color, direction)
    found = score(video, other)
    assert found["strict"] == (other == asked)
    if direction != asked["motion"]:
        assert found["graded"] == 0
    elif other != asked:
        assert found["graded"] < 0.95


@given(SEEDS)
def test_played_backwards_it_moves_the_other_way(seed):
    asked, video = clip_of(seed)
    assert score(video[::-1], asked)["graded"] == 0
    assert score(video[::-1], towards(asked, OPPOSITE[asked["motion"]]))["strict"] == 1


@given(SEEDS)
def test_mirrored_it_moves_the_mirrored_way(seed):
    asked, video = clip_of(seed)
    seen = OPPOSITE[asked["motion"]] if asked["motion"] in ("left", "right") else asked["motion"]
    assert score(video[:, :, ::-1], towards(asked, seen))["strict"] == 1


@given(SEEDS, st.integers(0, 4))
def test_blank_and_still_videos_score_nothing(seed, frame):
    asked, video = clip_of(seed)
    assert score(np.full_like(video, 255), asked)["graded"] == 0
    still = score(np.repeat(video[frame : frame + 1], len(video), axis=0), asked)
    assert still["graded"] == still["strict"] == 0
    assert still["appearance"] == 1


@given(SEEDS, st.integers(1, 4))
def test_a_jump_is_one_step_of_a_way(seed, at):
    asked, video = clip_of(seed)
    jump = score(np.repeat(video[[0, -1]], [at, len(video) - at], axis=0), asked)
    assert jump["strict"] == 0
    assert jump["movement"] <= 0.25 + 1e-9


@given(SEEDS)
def test_blinking_hides_every_step(seed):
    asked, video = clip_of(seed)
    video = video.copy()
    video[1::2] = 255
    assert score(video, asked)["graded"] == 0


@given(SEEDS, st.sampled_from(sorted(DIRECTIONS)))
def test_a_second_shape_takes_everything(seed, direction):
    """Whichever way it moves: two moving shapes would please any prompt."""
    asked, video = clip_of(seed)
    other = render(sample_clip(towards(asked, direction), np.random.default_rng(seed + 1)))
    for both in (np.concatenate([video, other], axis=1), np.concatenate([other, video], axis=2)):
        assert score(both, asked)["graded"] == 0


def test_slanted_paths_count_less_the_steeper_they_are():
    asked = record("square", "red", "right")
    found = []
    for across in range(4):
        video = np.full((5, 40, 40, 3), 255, np.uint8)
        for time in range(5):
            video[time, 5 + across * time :, 5 + 3 * time :][:8, :8] = PALETTE["red"]
        found.append(score(video, asked))
    graded = [each["graded"] for each in found]
    assert graded[0] == 1
    assert graded == sorted(graded, reverse=True)
    assert graded[3] == 0
    assert [each["strict"] for each in found] == [1, 1, 0, 0]


def test_the_chosen_score_is_trained_on():
    asked, video = clip_of(3)
    half = np.concatenate([video[:3], video[2:3], video[2:3]])
    for name in ("graded", "strict"):
        curves = motion([half], ["a test"], [asked], train_on=name)
        assert curves["score"] == curves[name]
    assert 0 < curves["graded"][0] < 1


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (
            {"motion": "sideways"},
            "'motion' of prompt 'p' is 'sideways'; expected one of left, right, up, down",
        ),
        ({"motion": None}, "'motion' of prompt 'p' is missing"),
        ({"include": []}, "'include' of prompt 'p'"),
        ({"include": [{"class": "circle", "count": 2}]}, "count"),
        ({"include": [{"class": shape, "count": 1} for shape in SHAPES]}, "expected one object"),
        ({"exclude": [{"class": "circle", "count": 2}]}, "expected one object"),
    ],
)
def test_a_record_that_cannot_be_scored_is_refused(change, says):
    with pytest.raises(RewardInputError, match=says):
        check(["p"], [{**RECORDS[0], **change}])


def test_settings_and_samples_that_do_not_fit_are_refused():
    asked, video = clip_of(0)
    with pytest.raises(RewardInputError, match="train_on is 'both'"):
        check([], [], train_on="both")
    for wrong in (video[0], video[:1]):
        with pytest.raises(ValueError, match=r"expected a video.*Set rollout\.frames"):
            motion([wrong], ["p"], [asked])
    with pytest.raises(ValueError, match="1 videos, 0 prompts"):
        motion([video], [], [])


def test_it_takes_whole_videos_and_needs_no_torch():
    assert motion.takes_videos
    code = "import sys, spotlight_rewards.motion; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_prompts_cover_every_combination_once():
    said = {(each["include"][0]["class"], each["include"][0]["color"], each["motion"]) for each in RECORDS}
    assert len(RECORDS) == len(said) == len(list(product(SHAPES, PALETTE, DIRECTIONS)))
    assert SIDE_PX >= 24  # what the detector needs
