"""From scores to the numbers people compare."""

from __future__ import annotations

import math
import statistics

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spotlight.runtime.recorder import shown
from spotlight.runtime.validation import estimate, strict_curve, summarise
from spotlight.scheduler.types import PolicyVersion, Purpose, Rollout, RolloutId
from spotlight_rewards.base.prompts import Prompt, PromptId

PROMPTS = {
    PromptId(name): Prompt(PromptId(name), f"a {name}", {"tag": tag} if tag else {})
    for name, tag in (("circle", "colors"), ("square", "colors"), ("cross", "counting"), ("star", None))
}


def rollouts(images: int) -> list[Rollout]:
    return [
        Rollout(RolloutId(f"{prompt}{n}"), Purpose.EVAL, 3, prompt, n, n, 10, PolicyVersion(2))
        for prompt in PROMPTS
        for n in range(images)
    ]


@given(st.lists(st.floats(-1e6, 1e6), min_size=2, max_size=50))
def test_the_standard_error_is_that_of_the_mean(values: list[float]) -> None:
    found = estimate(values)
    assert found.mean == pytest.approx(statistics.fmean(values), abs=1e-6)
    assert found.stderr == pytest.approx(statistics.stdev(values) / math.sqrt(len(values)), abs=1e-6)


def test_one_value_has_no_error_bar() -> None:
    assert estimate([0.5]).mean == 0.5
    assert math.isinf(estimate([0.5]).stderr)


def test_the_strict_curve_judges_by_prompt_tag_and_as_a_whole() -> None:
    made = rollouts(2)
    scores = {
        rollout.id: {
            "reward": 0.25,
            "shapes": 0.25,
            "shapes/strict": float(
                rollout.prompt_id == "cross" or (rollout.prompt_id, rollout.member) == ("circle", 0)
            ),
        }
        for rollout in made
    }
    found = summarise(made, scores, PROMPTS, None)
    assert found.strict == "shapes/strict"
    assert found.judged.mean == 3 / 8
    assert {tag: each.mean for tag, each in found.by_tag.items()} == {"colors": 0.25, "counting": 1.0}
    row = found.row()
    assert (row["strict"], row["graded"], row["tag/counting"], row["shapes"]) == (3 / 8, 0.25, 1.0, 0.25)
    assert "reward" not in row  # it is called graded here
    assert all(f"{name}_stderr" in row for name in row if not name.endswith("_stderr"))


def test_without_a_strict_curve_the_reward_judges() -> None:
    made = rollouts(1)
    found = summarise(made, {rollout.id: {"reward": 2.0, "ocr": 2.0} for rollout in made}, PROMPTS, None)
    assert found.strict is None
    assert found.judged.mean == 2.0
    assert "strict" not in found.row()
    assert found.by_tag["colors"].mean == 2.0


def test_a_detail_that_some_samples_lack_is_of_those_that_have_it() -> None:
    made = rollouts(2)
    scores: dict[RolloutId, dict[str, float]] = {rollout.id: {"reward": 1.0} for rollout in made}
    scores[made[-1].id]["http/seen"] = 3.0
    found = summarise(made, scores, PROMPTS, None)
    assert found.curves["http/seen"].mean == 3.0
    assert found.judged.mean == 1.0


def test_a_strict_curve_that_does_not_exist_is_named() -> None:
    assert strict_curve("ocr/exact", ["reward", "ocr/exact", "shapes/strict"]) == "ocr/exact"
    with pytest.raises(ValueError, match=r"evaluation\.strict: found 'exact'; expected one of ocr, reward"):
        strict_curve("exact", ["reward", "ocr"])


def test_nothing_scored_is_an_error() -> None:
    with pytest.raises(ValueError, match="not one evaluation sample could be scored"):
        summarise([], {}, PROMPTS, None)


@given(images=st.integers(1, 4), prompts=st.integers(1, 6), columns=st.integers(1, 4))
def test_grids_show_the_same_evenly_spaced_prompts_every_time(
    images: int, prompts: int, columns: int
) -> None:
    made = rollouts(images)
    chosen = shown(made, prompts, columns)
    assert chosen == [rollout for rollout in made if rollout in chosen]
    met = list(dict.fromkeys(rollout.prompt_id for rollout in chosen))
    assert len(met) == min(prompts, len(PROMPTS))
    assert met[0] == "circle"
    assert len(chosen) == len(met) * min(images, columns)
