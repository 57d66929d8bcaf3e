"""Gradients of rewards by pixels: against scores of changed pictures, and through the pool."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from tools.testbed.prompts import all_records
from tools.testbed.scenes import render_all

from spotlight_rewards.pool.reward_pool import RewardPool
from spotlight_rewards.preference.clip_rewards import Aesthetic, ClipReward, ClipScore, Hps, PickScore
from spotlight_rewards.results import ScoredSample
from spotlight_rewards.reward import Image, Reward
from spotlight_rewards.reward_config import RewardConfig
from spotlight_rewards.reward_registry import differentiable_names
from spotlight_rewards.shape_counter import _FORMAT, HEADS, ShapeCounter, counts_of, pixels_of
from spotlight_rewards.shapes import shapes

CLIPS: tuple[type[ClipReward], ...] = (PickScore, Hps, ClipScore, Aesthetic)
PROMPTS = ["a red dog", "two cats", "a red dog"]


def smooth(count: int = 3, height: int = 40, width: int = 40) -> list[Image]:
    """Pictures whose resize by Pillow and by torch agree well, not near black or white."""
    rng = np.random.default_rng(5)
    x, y = np.meshgrid(np.linspace(0, 1, width), np.linspace(0, 1, height))
    across, down, phase = (rng.uniform(0, top, (3 * count, 1, 1)) for top in (2, 2, 1))
    waves = np.sin(2 * np.pi * (across * x + down * y + phase))
    stacked = waves.reshape(count, 3, height, width).transpose(0, 2, 3, 1)
    return list((128 + 70 * stacked).astype(np.uint8))


@pytest.mark.parametrize("kind", CLIPS)
def test_the_gradient_is_the_slope_of_the_score(kind: type[ClipReward], tmp_path: Path) -> None:
    reward = kind(**kind().tiny(tmp_path), batch_size=2)
    images = smooth()
    found = reward.gradient(images, PROMPTS, [{}] * 3)
    assert [each.shape for each in found] == [(40, 40, 3)] * 3
    assert found[0].dtype == np.float32
    for at, gradient in enumerate(found):
        # 8-bit pictures take steps of their own size along the gradient's direction.
        step = np.rint(6 * gradient / np.abs(gradient).max()).astype(int)
        up, down = (list(images) for _ in range(2))
        up[at], down[at] = ((images[at].astype(int) + sign * step).astype(np.uint8) for sign in (1, -1))
        scores = [_scores(reward, each)[at] for each in (up, down)]
        measured, promised = scores[0] - scores[1], 2 * float((gradient * step).sum()) / 255
        assert promised > 0
        assert measured == pytest.approx(promised, rel=0.25)


def _scores(reward: Reward, images: list[Image]) -> list[float]:
    found = reward(images, PROMPTS, [{}] * 3)
    return list(found["score"] if isinstance(found, dict) else found)


def test_the_counters_gradient_is_that_of_its_score_in_float64() -> None:
    records = all_records()["counting"][::7]
    images = list(render_all(records, seed=1))
    counter = ShapeCounter()
    found = counter.gradient(images, [""] * len(records), records)
    generator = torch.Generator().manual_seed(0)
    weights = {name: tensor.double() for name, tensor in counter.weights.items()}
    exact = ShapeCounter()
    object.__setattr__(exact, "weights", weights)
    pixels = pixels_of(images).double()
    direction = torch.randn(pixels.shape, generator=generator, dtype=torch.float64)
    asked = [""] * len(records), records
    up, down = (exact._scores(pixels + sign * 1e-4 * direction, *asked) for sign in (1, -1))
    along = (torch.from_numpy(np.stack(found)).permute(0, 3, 1, 2).double() * direction).sum((1, 2, 3))
    torch.testing.assert_close(along, (up - down) / 2e-4, rtol=1e-3, atol=1e-3)


def test_the_counter_agrees_with_the_exact_detector_on_clean_scenes() -> None:
    every = [record for records in all_records().values() for record in records]
    records = [each for each in every if not any("position" in need for need in each["include"])][::3]
    right = list(render_all(records, seed=7))
    wrong = list(render_all(records[1:] + records[:1], seed=8))
    asked = [""] * len(records), records
    counter = ShapeCounter()
    likely = np.array(counter(right, *asked)["score"]), np.array(counter(wrong, *asked)["score"])
    strict = np.array(shapes(wrong, *asked)["strict"])
    assert (likely[0] > np.log(0.5)).mean() > 0.9
    assert (likely[1][strict == 0] < likely[0][strict == 0]).mean() > 0.98


def test_what_is_counted_of_a_prompt() -> None:
    record = {"include": [{"class": "circle", "color": "red", "count": 2}, {"class": "circle", "count": 1}]}
    found = {HEADS[head]: count for head, count in counts_of(_FORMAT.parse("", record)).items()}
    assert found == {
        ("circle", None): 3, ("square", None): 0, ("triangle", None): 0, ("circle", "red"): 2
    }  # fmt: skip


def test_the_pool_sums_gradients_by_weight_and_only_where_they_are_asked_for() -> None:
    records = all_records()["counting"][:2]
    images = list(render_all(records, seed=1))
    counters = [
        RewardConfig(name="shape-counter", label=name, weight=w) for name, w in (("a", 2.0), ("b", -0.5))
    ]
    watched = RewardConfig(name="shape-counter", label="judge", weight=0.0)
    with RewardPool([*counters, watched]) as pool:
        assert pool.without_gradient == ()
        plain = pool.score(images, ["", ""], records).samples
        found = pool.submit(images, ["", ""], records, gradients=True).result().samples
    expected = ShapeCounter().gradient(images, ["", ""], records)
    for before, after, gradient in zip(plain, found, expected, strict=True):
        assert isinstance(before, ScoredSample)
        assert isinstance(after, ScoredSample)
        assert before.gradient is None
        assert before.curves() == after.curves()
        assert after.gradient is not None
        np.testing.assert_allclose(after.gradient, 1.5 * gradient, rtol=1e-5, atol=1e-7)
        assert after.scores["judge"].gradient is None, "a judge that only watches is not differentiated"


def test_rewards_without_a_gradient_are_named() -> None:
    with RewardPool([RewardConfig(name="jpeg_size"), RewardConfig(name="shape-counter")]) as pool:
        assert pool.without_gradient == ("jpeg_size",)
    assert differentiable_names() == ["shape-counter", "pickscore", "hps", "clip-score", "aesthetic"]
