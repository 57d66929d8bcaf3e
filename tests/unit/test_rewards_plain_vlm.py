"""Rewards that ask a VLM, against their formulas on what the same network answers when asked plainly."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from tests.unit.vlm_oracle import PlainVlm

from spotlight_rewards.endpoints import edit_score, geneval2, ocr_vlm, unified_reward, vlm_rank
from spotlight_rewards.models.tiny_vlm import save_tiny_vlm
from spotlight_rewards.reward_registry import load

Pictures = Sequence[np.ndarray]
Records = Sequence[Mapping[str, Any]]
Expected = Callable[[PlainVlm, Pictures, Sequence[str], Records], list[float]]
PROMPTS = ['a "STOP" sign', 'a "STOP" sign', 'the "hop" of a dog', 'a "shelf"']
SHOWN = ("STOP", "SHOP", "HOP", "sheep", "shelf")


def pictures(seed: int) -> list[np.ndarray]:
    rng = np.random.default_rng(seed)
    sizes = ((64, 64), (32, 96), (64, 64), (128, 32))
    return [rng.integers(0, 256, (*size, 3), dtype=np.uint8) for size in sizes]


def read(vlm: PlainVlm, images: Pictures, prompts: Sequence[str], records: Records) -> list[float]:
    @cache
    def edits(one: str, other: str) -> int:
        if not (one and other):
            return len(one) + len(other)
        swapped = edits(one[1:], other[1:]) + (one[0] != other[0])
        return min(swapped, edits(one[1:], other) + 1, edits(one, other[1:]) + 1)

    scores = []
    for image, prompt in zip(images, prompts, strict=True):
        target = prompt.split('"')[1].lower()
        found = vlm.ask([image], ocr_vlm.INSTRUCTION, 2)[0].lower()
        inside = found == target if len(target) <= 3 else target in found
        scores.append(1 - (0 if inside else min(1, edits(target, found) / len(target))))
    return scores


def compared(vlm: PlainVlm, images: Pictures, prompts: Sequence[str], records: Records) -> list[float]:
    wins = np.zeros((len(images), len(images)))
    for first, one in enumerate(images):
        for second, other in enumerate(images):
            if first != second:
                asked = vlm_rank.QUESTION.replace("{prompt}", prompts[0])
                won = vlm.ask([one, other], asked, 2)[0] == "First"
                wins[(first, second) if won else (second, first)] += 1
    return [float(each) for each in wins.sum(1) / (2 * (len(images) - 1))]


def answered(vlm: PlainVlm, images: Pictures, prompts: Sequence[str], records: Records) -> list[float]:
    numbers = {"two": ("two", "2"), "3": ("three", "3")}
    scores = []
    for image, record in zip(images, records, strict=True):
        logs = []
        for question, answer in record["vqa_list"]:
            asked = geneval2.INSTRUCTION.replace("{question}", question)
            chances = vlm.ask([image], asked, 1)[1][0].exp()
            words = numbers.get(answer, (answer, answer.lower()))
            logs.append(math.log(sum(float(chances[vlm.id_of(each)]) for each in words if each in KNOWN)))
        scores.append(math.exp(sum(logs) / len(logs)))
    return scores


def graded(vlm: PlainVlm, images: Pictures, prompts: Sequence[str], records: Records) -> list[float]:
    asked = [unified_reward.QUESTION.replace("{prompt}", prompt) for prompt in prompts]
    lines = [vlm.ask([image], each, 2)[0].split("\n") for image, each in zip(images, asked, strict=True)]
    return [sum(int(line[-1]) for line in each) / 15 for each in lines]


def edited(vlm: PlainVlm, images: Pictures, prompts: Sequence[str], records: Records) -> list[float]:
    scores = []
    for image, prompt, record in zip(images, prompts, records, strict=True):
        before = np.asarray(Image.open(record["reference"]))
        same = edit_score.FAITHFULNESS.replace("{prompt}", prompt)
        texts = [vlm.ask([before, image], same, 2)[0], vlm.ask([image], edit_score.QUALITY, 2)[0]]
        scores.append(math.sqrt(math.prod(min(json.loads(text)["score"]) for text in texts)))
    return scores


KNOWN = ("Yes", "No", "one", "two", "three")
GRADES = [f"Alignment Score (1-5): {a}\nCoherence Score (1-5): {b}\nStyle Score (1-5): {c}"
          for a, b, c in ((1, 5, 3), (2, 2, 4), (5, 4, 4), (3, 1, 1))]  # fmt: skip
PAIRS = [json.dumps({"score": [first, second]}) for first, second in ((3, 9), (20, 11), (25, 24), (7, 7))]


@pytest.mark.parametrize(
    ("name", "words", "expected"),
    [
        ("ocr-vlm", SHOWN, read),
        ("vlm-rank", ("First", "Second"), compared),
        ("geneval2", KNOWN, answered),
        ("unified-reward", GRADES, graded),
        ("edit-score", PAIRS, edited),
    ],
)
def test_scores_equal_the_formula_on_plain_answers(
    name: str,
    words: Sequence[str],
    expected: Expected,
    tmp_path: Path,
    record_property: Callable[[str, float], None],
) -> None:
    folder = save_tiny_vlm(tmp_path / "vlm", words, seed=0)
    reward = load(name, {"model": {"path": str(folder), "device": "cpu", "batch_size": 3}})
    plain = PlainVlm(folder)
    scores = set()
    for seed in range(2):
        images = pictures(seed)
        Image.fromarray(pictures(seed + 100)[0]).save(tmp_path / f"{seed}.png")
        atoms = [["How many dogs?", "two"], ["Is it red?", "Yes"], ["How many cats are there?", "3"]]
        records = [
            {"vqa_list": atoms[at % 2 :], "reference": str(tmp_path / f"{seed}.png")} for at in range(4)
        ]
        prompts = PROMPTS[:1] * 4 if name == "vlm-rank" else PROMPTS
        found = reward.function(images, prompts, records)
        assert isinstance(found, Mapping)
        for score, other in zip(found["score"], expected(plain, images, prompts, records), strict=True):
            assert isinstance(score, float)
            record_property(f"{name}/difference", abs(score - other))
            assert score == pytest.approx(other, abs=1e-5)
            scores.add(round(score, 3))
    assert len(scores) > 1  # or it would prove little
