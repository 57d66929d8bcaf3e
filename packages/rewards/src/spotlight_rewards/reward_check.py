"""Does a reward work here? Loads it, scores a built-in picture, and compares with what is known.

The same processes as in training: what loads and scores here does so there.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from PIL import Image as PILImage

from spotlight_rewards.example_pictures import example_picture
from spotlight_rewards.pool.reward_pool import RewardPool
from spotlight_rewards.results import RewardFailure
from spotlight_rewards.reward_config import RewardConfig
from spotlight_rewards.reward_facts import Example, RewardFacts

_COMPARED_WITH = "shapes"
"""Second picture of a group, for rewards that compare."""
_UNKNOWN = Example("sign", (-math.inf, math.inf), prompt='a white sign with the word "OPEN"')
_SAME, _SAME_FROM_A_SERVER = 1e-5, 0.02
"""Largest difference of two scores of one picture; servers batch requests of others, too."""


@dataclass(frozen=True, slots=True)
class ComparedScore:
    """One comparison."""

    what: str
    found: str
    expected: str
    good: bool


@dataclass(frozen=True, slots=True)
class RewardReport:
    """What :func:`check_reward` found.

    Attributes:
        scored_by: models with digests of their weights; empty if the reward names none.
        load_s, score_s: to start and load, with downloads; of the first and of a later call.
        exact: the expected score is one figure; else a range.
    """

    scored_by: str
    load_s: float
    score_s: tuple[float, float]
    exact: bool
    findings: tuple[ComparedScore, ...]

    @property
    def good(self) -> bool:
        """Whether all comparisons hold."""
        return all(each.good for each in self.findings)


def check_reward(reward: RewardConfig, facts: RewardFacts | None, *, start_deadline_s: float) -> RewardReport:
    """Load a reward and score its built-in picture: twice, and with a wrong prompt.

    A reward that compares gets a group of two, of which the first counts.

    Raises:
        RewardSetupError: it cannot be loaded; names the remedy.
        RewardInputError: it cannot score the built-in picture's prompt.
    """
    example = (facts and facts.example) or _UNKNOWN
    begun_s = time.monotonic()
    with (
        TemporaryDirectory() as folder,
        RewardPool([reward], start_deadline_s=start_deadline_s) as pool,
    ):
        record = example_record(example, Path(folder))
        pool.check([example.prompt], [record])
        load_s = time.monotonic() - begun_s
        shown = [example_picture(example.picture)]
        if pool.compares_groups:
            shown.append(example_picture(_COMPARED_WITH))

        def scored(prompt: str) -> tuple[float | str, float]:
            began_s = time.monotonic()
            sample = pool.score(shown, [prompt] * len(shown), [record] * len(shown)).samples[0]
            took_s = time.monotonic() - began_s
            if isinstance(sample, RewardFailure):
                return sample.message, took_s
            return sample.scores[reward.curve].value, took_s

        first, first_s = scored(example.prompt)
        again, again_s = scored(example.prompt)
        wrong = scored(example.wrong_prompt)[0] if example.wrong_prompt else None
        asks = reward.params.get("endpoint") or (facts and facts.runs_on == "a server")
        same = _SAME_FROM_A_SERVER if asks else _SAME
        findings = tuple(_findings(example, first, again, wrong, same))
        low, high = example.score
        scored_by = pool.scored_by.get(reward.curve, "")
    return RewardReport(scored_by, load_s, (first_s, again_s), low == high, findings)


def example_record(example: Example, folder: Path) -> dict[str, Any]:
    """The example's metadata, with paths of its pictures, which are written into ``folder``."""
    paths = {}
    for key, name in example.files.items():
        paths[key] = str(folder / f"{name}.png")
        PILImage.fromarray(example_picture(name)).save(paths[key])
    return {**example.metadata, **paths}


def _findings(
    example: Example, first: float | str, again: float | str, wrong: float | str | None, same: float
) -> Iterator[ComparedScore]:
    low, high = example.score
    if isinstance(first, str):
        yield ComparedScore("score", first, "a number", good=False)
        return
    expected = f"{low:g}" if low == high else f"{low:g} to {high:g}"
    if math.isinf(low) and math.isinf(high):
        expected = "a number"
    yield ComparedScore("score", f"{first:.6g}", expected, low <= first <= high)
    repeats = isinstance(again, float) and abs(again - first) <= same
    yield ComparedScore("once more", _shown(again), "the same", repeats)
    if wrong is not None:
        less = isinstance(wrong, float) and wrong < first
        yield ComparedScore("with a wrong prompt", _shown(wrong), "less", less)


def _shown(score: float | str) -> str:
    return score if isinstance(score, str) else f"{score:.6g}"
