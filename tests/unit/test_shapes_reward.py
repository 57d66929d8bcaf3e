"""The shapes reward: exact on renders, blind to nothing that is asked for, clear about bad metadata."""

from __future__ import annotations

import subprocess
import sys
import tracemalloc
import weakref
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tools.testbed.prompts import TAGS, all_records
from tools.testbed.scenes import SceneObject, render, render_all, sample_scene

from spotlight_rewards.reward import RewardInputError
from spotlight_rewards.shapes import PALETTE, SHAPES, check, coverage, detect, shapes

RECORDS = [record for records in all_records().values() for record in records]


def score(images, records):
    return shapes(list(images), [record["prompt"] for record in records], records)


def draw(*objects, side=32):
    """Squares, circles and triangles at chosen places on a white canvas of any size."""
    canvas = np.full((side, side, 3), 255.0)
    for shape, color, left, top, size in objects:
        alpha = coverage(shape, size, size)[..., None]
        box = canvas[top : top + size, left : left + size]
        box[:] = (1 - alpha) * box + alpha * np.array(PALETTE[color])
    return np.rint(canvas).astype(np.uint8)


def record(*include, exclude=()):
    return {"prompt": "a test", "include": list(include), "exclude": list(exclude)}


def need(shape, color=None, count=1, position=None):
    entry = {"class": shape, "count": count}
    if color is not None:
        entry["color"] = color
    if position is not None:
        entry["position"] = position
    return entry


@pytest.mark.parametrize("tag", TAGS)
def test_every_render_of_every_tag_scores_one(tag):
    records = all_records()[tag]
    records = (records * (1 + 1000 // len(records)))[:1000]
    scores = score(render_all(records, seed=1), records)
    assert np.mean(scores["strict"]) >= 0.995
    assert np.mean(np.array(scores["graded"]) > 1 - 1e-9) >= 0.995


def test_mismatched_prompts_score_near_zero():
    rng = np.random.default_rng(2)
    images = render_all(RECORDS * 6, seed=2)
    wrong, kept = [], []
    for image, own in zip(images, RECORDS * 6, strict=True):
        other = RECORDS[rng.integers(len(RECORDS))]
        if not _entails(own, other):
            wrong.append(other)
            kept.append(image)
    assert len(kept) >= 2000
    scores = score(kept, wrong)
    assert np.mean(scores["strict"]) <= 0.01
    assert np.mean(scores["graded"]) < 0.75


def _entails(own, other):
    """Whether a picture of ``own`` can rightly satisfy ``other`` (GenEval tolerates surplus objects)."""
    have, want = own["include"], other["include"]
    return all(
        any(
            h["class"] == w["class"]
            and h["count"] >= w["count"]
            and (w.get("color") is None or h.get("color") in (None, w["color"]))
            for h in have
        )
        for w in want
    )


@given(st.integers(0, len(RECORDS) - 1), st.integers(0, 2**32 - 1))
def test_a_missing_or_surplus_object_lowers_the_graded_score(index, seed):
    wanted = RECORDS[index]
    scene = sample_scene(wanted, np.random.default_rng(seed))
    fewer = render(scene[:-1])
    free = next(
        box
        for box in ((x, y) for y in (0, 12, 23) for x in (0, 12, 23))
        if all(max(abs(box[0] - o.left), abs(box[1] - o.top)) >= 11 for o in scene)
    )
    more = render([*scene, SceneObject("circle", "red", free[0], free[1], 8)])
    full, less, surplus = score([render(scene), fewer, more], [wanted] * 3)["graded"]
    assert full == pytest.approx(1.0)
    assert less < full - 0.1
    assert surplus < full - 0.1


def test_graded_orders_partial_successes():
    wanted = record(need("circle", "red"), need("square", "blue", position=["right of", 0]))
    red, blue = ("circle", "red", 2, 12, 8), ("square", "blue", 20, 12, 8)
    pictures = [
        draw(),
        draw(("triangle", "green", 2, 12, 8)),
        draw(("circle", "green", 2, 12, 8)),
        draw(red),
        draw(red, ("square", "green", 20, 12, 8)),
        draw(red, blue),
    ]
    graded = score(pictures, [wanted] * len(pictures))["graded"]
    assert graded[0] == 0
    assert graded[-1] == pytest.approx(1)
    assert all(a <= b for a, b in pairwise(graded))
    assert graded[2] < graded[3] < graded[4] < graded[5]


def test_position_counts_in_both_scores():
    wanted = record(need("square"), need("circle", position=["left of", 0]))
    right_way = draw(("circle", "red", 2, 12, 8), ("square", "red", 20, 12, 8))
    diagonal = draw(("circle", "red", 10, 22, 8), ("square", "red", 20, 2, 8))
    wrong_way = right_way[:, ::-1]
    scores = score([right_way, diagonal, wrong_way], [wanted] * 3)
    assert scores["strict"] == [1.0, 0.0, 0.0]
    assert scores["graded"] == sorted(scores["graded"], reverse=True)
    assert scores["graded"][2] == pytest.approx(0.5)


def test_counting_excludes_one_too_many_of_the_shape_only():
    wanted = record(need("circle", count=2), exclude=[{"class": "circle", "count": 3}])
    two = [("circle", "red", 2, 2, 8), ("circle", "blue", 20, 2, 8)]
    pictures = [draw(two[0]), draw(*two), draw(*two, ("circle", "red", 2, 20, 8))]
    pictures.append(draw(*two, ("square", "red", 2, 20, 8)))
    assert score(pictures, [wanted] * 4)["strict"] == [0.0, 1.0, 0.0, 1.0]


@pytest.mark.parametrize("side", [24, 32, 48, 64, 100, 128, 256])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("color", PALETTE)
def test_any_image_size(side, shape, color):
    size = round(side * 0.27)
    image = draw((shape, color, side // 8, side // 2, size), side=side)
    scores = score([image], [record(need(shape, color))])
    assert scores["strict"] == [1.0]
    assert scores["graded"] == pytest.approx([1.0])


def test_filling_the_canvas_or_sprinkling_specks_earns_nothing():
    red = np.zeros((32, 32, 3), np.uint8) + np.array(PALETTE["red"], np.uint8)
    specks = np.full((32, 32, 3), 255, np.uint8)
    specks[::4, ::4] = PALETTE["red"]
    wanted = record(need("square", "red"))
    scores = score([red, specks], [wanted] * 2)
    assert scores["strict"] == [0.0, 0.0]
    assert max(scores["graded"]) <= 0.5
    assert detect(specks) == []


@given(st.integers(0, 2**32 - 1))
def test_noise_neither_crashes_nor_scores(seed):
    noise = np.random.default_rng(seed).integers(0, 256, (32, 32, 3), dtype=np.uint8)
    scores = score([noise], [record(need("circle", "red"), need("square", "blue"))])
    assert scores["strict"] == [0.0]
    assert 0 <= scores["graded"][0] < 0.5


def test_many_templates_of_boxes_are_held_if_these_are_small_and_few_if_large():
    for width, height, held in ((1, 1, 100), (100, 50, 100), (1900, 500, 16)):
        made = [weakref.ref(coverage("square", width + index, height)) for index in range(100)]
        assert sum(each() is not None for each in made) == held


def test_a_large_picture_takes_little_memory(monkeypatch):
    picture = draw(("square", "red", 0, 0, 511), side=1024)
    monkeypatch.setattr("spotlight_rewards.shapes.coverage", coverage.__wrapped__)  # which keeps none
    tracemalloc.start()
    try:
        assert [each.shape for each in detect(picture)] == ["square"]
        _, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak_bytes < 400e6


def test_train_on_chooses_the_score():
    image, wanted = draw(("circle", "red", 2, 2, 8)), record(need("circle"), need("square"))
    for key in ("graded", "strict"):
        scores = shapes([image], ["p"], [wanted], train_on=key)
        assert scores["score"] == scores[key]
    with pytest.raises(RewardInputError, match="train_on is 'soft'; expected one of graded, strict"):
        shapes([image], ["p"], [wanted], train_on="soft")


@pytest.mark.parametrize(
    ("metadata", "field"),
    [
        ({}, "'include' .* is missing"),
        ({"include": []}, "'include'"),
        ({"include": ["circle"]}, r"include\[0\]"),
        ({"include": [{"count": 1}]}, r"include\[0\].class' .* is missing"),
        ({"include": [{"class": "zebra", "count": 1}]}, r"include\[0\].class' .* is 'zebra'"),
        ({"include": [{"class": "circle"}]}, r"include\[0\].count' .* is missing"),
        ({"include": [{"class": "circle", "count": 0}]}, r"include\[0\].count' .* is 0"),
        ({"include": [need("circle", "pink")]}, r"include\[0\].color' .* is 'pink'"),
        ({"include": [need("circle"), need("circle", position=["near", 0])]}, r"include\[1\].position'"),
        ({"include": [need("circle", position=["above", 0])]}, r"include\[0\].position\[1\]"),
        ({"include": [need("circle")], "exclude": [{"class": "circle"}]}, r"exclude\[0\].count"),
    ],
)
def test_incomplete_metadata_names_prompt_and_field(metadata, field):
    with pytest.raises(RewardInputError, match=f"{field}.*") as caught:
        check(["a test prompt"], [metadata])
    assert "'a test prompt'" in str(caught.value)


def test_bad_pictures_are_refused():
    wanted = [record(need("circle"))]
    with pytest.raises(ValueError, match="16 x 16; shapes need at least 24"):
        shapes([np.zeros((16, 16, 3), np.uint8)], ["p"], wanted)
    with pytest.raises(ValueError, match="float64"):
        shapes([np.zeros((32, 32, 3))], ["p"], wanted)
    with pytest.raises(ValueError, match="0 images, 1 prompts"):
        shapes([], ["p"], wanted)


def test_needs_no_torch():
    code = "import sys, spotlight_rewards.shapes, tools.testbed.scenes; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
