"""GenEval's verdicts equal those of the official evaluation, strict and graded, on random detection sets."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from tests.unit.geneval_oracle import Case, graded, random_case, verdict

from spotlight_rewards.geneval.requirements import MetadataFormat
from spotlight_rewards.geneval.verdicts import (
    Detection,
    direction,
    graded_score,
    is_correct,
    present_objects,
    relations,
    to_color,
)
from spotlight_rewards.geneval.vocabulary import COLORS, OBJECTS, TAGS
from spotlight_rewards.reward import RewardInputError

NAMES = ("person", "computer mouse", "tv", "orange")
FORMAT = MetadataFormat("geneval", OBJECTS, COLORS, count_max=16)
NO_MASK = np.zeros((1, 1), dtype=bool)


def judge(case: Case) -> tuple[bool, float]:
    detections, seen = [], {}
    for name, boxes, colors in zip(case.names, case.boxes, case.colors, strict=True):
        for row, color in zip(boxes, colors, strict=True):
            detections.append(Detection(name, row[4], row[:4], NO_MASK))
            seen[detections[-1]] = color
    wanted = FORMAT.parse("a prompt", case.metadata)
    objects = present_objects(detections, case.metadata["tag"])
    colors = {each: seen[each] for each in to_color(objects, wanted)}
    return is_correct(objects, wanted, colors), graded_score(objects, wanted, colors)


LONG = [pytest.param(seed, 10_000, marks=pytest.mark.slow) for seed in (1, 2, 3)]


@pytest.mark.parametrize(("seed", "draws"), [(0, 400), *LONG])
def test_verdicts_and_graded_scores_equal_the_official_ones(seed: int, draws: int) -> None:
    rng = np.random.default_rng(seed)
    correct: Counter[tuple[str, bool]] = Counter()
    for index in range(draws):
        case = random_case(rng, NAMES, TAGS)
        expected = verdict(case), graded(case)
        assert judge(case) == expected, (index, case)
        correct[case.metadata["tag"], expected[0]] += 1
    for tag in TAGS:  # neither verdict is rare: the comparison means something under every tag
        assert 0.04 < correct[tag, True] / (correct[tag, True] + correct[tag, False]) < 0.96, correct


def box(left: float, top: float, right: float, bottom: float) -> np.ndarray:
    return np.array([left, top, right, bottom], dtype=np.float32)


def test_relations_turn_with_the_picture_and_need_half_of_the_distance() -> None:
    rng = np.random.default_rng(0)
    opposite = {"left of": "right of", "above": "below", "right of": "left of", "below": "above"}
    for _ in range(200):
        a, b = (box(*corner, *(corner + rng.integers(1, 60, 2))) for corner in rng.integers(0, 200, (2, 2)))
        assert relations(b, a) == {opposite[each] for each in relations(a, b)}
        assert np.hypot(*direction(a, b)) <= 1 + 1e-6
    near = box(0, 0, 10, 10)
    assert relations(near, near) == set()
    assert relations(near, box(2, 0, 12, 10)) == set()  # 10 % of both extents is all of the distance
    assert relations(near, box(20, 0, 30, 10)) == {"left of"}
    assert relations(near, box(40, 40, 50, 50)) == {"left of", "above"}


def test_boxes_of_other_precisions_keep_it() -> None:
    wide = np.array([[0, 0, 10, 10], [20, 3, 31, 10]], dtype=np.float64)
    assert direction(*wide) == pytest.approx(direction(*wide.astype(np.float32)), abs=1e-6)
    assert direction(*wide) != direction(*wide.astype(np.float32))


@pytest.mark.parametrize(
    ("field", "entry"),
    [
        ("include", None),
        ("include", "a dog"),
        ("include[0]", "dog"),
        ("include[0].class", {"class": "motorbike", "count": 1}),
        ("include[0].count", {"class": "dog", "count": True}),
        ("include[0].count", {"class": "dog", "count": 17}),
        ("include[0].color", {"class": "dog", "count": 1, "color": "teal"}),
        ("include[0].position", {"class": "dog", "count": 1, "position": ["near", 0]}),
        ("include[0].position[1]", {"class": "dog", "count": 1, "position": ["above", 0]}),
    ],
)
def test_metadata_that_cannot_be_scored_is_refused_by_field(field: str, entry: object) -> None:
    include = [entry] if field.startswith("include[") else entry
    with pytest.raises(RewardInputError, match=r"geneval reward: metadata field '(include[^']*)'") as caught:
        FORMAT.parse("a photo of a dog", {"include": include})
    assert f"'{field}'" in str(caught.value)


def test_vocabulary_is_cocos_80_categories_and_no_name_occurs_twice() -> None:
    assert len(set(OBJECTS)) == len(OBJECTS) == 80
    assert [OBJECTS.index(name) for name in ("person", "cat", "toothbrush")] == [0, 15, 79]
