"""The reward ``unified-reward``: UnifiedReward 2.0 grades alignment, coherence and style from 1 to 5.

The model and the form of its answers: https://github.com/CodeGoat24/UnifiedReward (arXiv 2503.05236).
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from operator import itemgetter
from pathlib import Path
from typing import Any, Literal, get_args

from spotlight_rewards.endpoints.chat import (
    ChatAnswer,
    Vlm,
    ask_about,
    curve_of,
    parse_vlm,
    token_curves,
    try_out,
)
from spotlight_rewards.endpoints.json_client import COSTS
from spotlight_rewards.example_pictures import example_picture
from spotlight_rewards.reward import Image, RewardSetupError, SampleError, adds_over_frames, best_with
from spotlight_rewards.reward_facts import Example, Reads, RewardFacts

Axis = Literal["mean", "alignment", "coherence", "style"]
AXES = ("alignment", "coherence", "style")

FACTS = RewardFacts(
    runs_on="GPU or a server",
    typical=(0.5, 0.9),
    reads=Reads.TEXT,
    weights=("CodeGoat24/UnifiedReward-2.0-qwen3vl-8b",),
    licence="MIT",
    example=Example("sign", score=(0.4, 1), prompt="a white sign with the word OPEN"),
)
QUESTION = """Rate the generated picture above against its caption on three axes, each from 1 to 5:
- Alignment: does it show what the caption says?
- Coherence: is it free of glitches and distorted objects?
- Style: is it pleasing, whatever the caption says?
Answer in exactly this form, without explanations:

Alignment Score (1-5): X
Coherence Score (1-5): Y
Style Score (1-5): Z

Text Caption: [{prompt}]"""
_TOKENS_MAX = 64
_GRADE_MAX = 5.0


@best_with(batch_size=16)
@adds_over_frames(*COSTS)
def unified_reward(
    images: Sequence[Image],
    prompts: Sequence[str],
    metadata: Sequence[Mapping[str, Any]],
    *,
    endpoint: Mapping[str, Any] | None = None,
    model: Mapping[str, Any] | None = None,
    train_on: Axis = "mean",
    question: str = QUESTION,
) -> dict[str, list[float | SampleError]]:
    """Let UnifiedReward grade each picture.

    Args:
        images: uint8 [height, width, 3].
        prompts: inserted for ``{prompt}`` in the question.
        metadata: ignored.
        endpoint: fields of :class:`ChatEndpoint`; ``base_url`` and ``model`` are required.
        model: instead of an endpoint, fields of :class:`LocalVlm`; ``path`` is required.
        train_on: the axis, or ``mean`` of the three, that becomes ``score``.
        question: what is asked.

    Returns:
        ``score`` in [0.2, 1], grade / 5; ``alignment``, ``coherence`` and ``style``, the grades; tokens and
        cost.

    Raises:
        RewardSetupError: invalid settings, a refused key or model.
    """
    place = _settings(endpoint, model, train_on)
    questions = [question.replace("{prompt}", prompt) for prompt in prompts]
    answers = ask_about(place, images, questions, tokens_max=_TOKENS_MAX, read=parse_grades)
    return {
        "score": curve_of(answers, lambda grades: grades[train_on] / _GRADE_MAX),
        **{axis: curve_of(answers, itemgetter(axis)) for axis in AXES},
        **token_curves(place, answers),
    }


def check(
    prompts: Sequence[str],
    metadata: Sequence[Mapping[str, Any]],
    *,
    endpoint: Mapping[str, Any] | None = None,
    model: Mapping[str, Any] | None = None,
    train_on: Axis = "mean",
    question: str = QUESTION,
) -> None:
    """Ask about a picture of a sign: does the model answer as it should?"""
    place = _settings(endpoint, model, train_on)
    asked = question.replace("{prompt}", "a sign that says OPEN")
    try_out(place, example_picture("sign"), asked, tokens_max=_TOKENS_MAX, read=parse_grades)


def scored_by(
    *,
    endpoint: Mapping[str, Any] | None = None,
    model: Mapping[str, Any] | None = None,
    deadline_s: float | None = None,
) -> str:
    """What answers; checks an endpoint's settings, and loads a model."""
    return parse_vlm("unified-reward", endpoint, model, deadline_s).identity


def tiny(folder: Path) -> dict[str, Any]:
    """Write a small random model that answers with three grades; the params that name it."""
    from spotlight_rewards.models.tiny_vlm import save_tiny_vlm

    titles = [axis.title() for axis in AXES]
    answers = [
        "\n".join(f"{title} Score (1-5): {(first + at) % 5 + 1}" for at, title in enumerate(titles))
        for first in range(5)
    ]
    return {"endpoint": None, "model": {"path": str(save_tiny_vlm(folder, answers))}}


def parse_grades(answer: ChatAnswer) -> dict[str, float]:
    """The three grades and their ``mean``. Raises SampleError unless each is there once, from 1 to 5."""
    grades = {}
    for axis in AXES:
        found = re.findall(rf"\b{axis}\s+score\s*(?:\(1-5\))?\s*:\s*\**(\d+(?:\.\d+)?)", answer.text, re.I)
        if len(found) != 1 or not 1 <= float(found[0]) <= _GRADE_MAX:
            raise SampleError(
                f"the model answered {answer.text!r}; expected one '{axis.title()} Score (1-5): X', X from "
                "1 to 5, and the same for the other axes. Is it a UnifiedReward 2.0?"
            )
        grades[axis] = float(found[0])
    return grades | {"mean": sum(grades.values()) / len(grades)}


def _settings(endpoint: Mapping[str, Any] | None, model: Mapping[str, Any] | None, train_on: Axis) -> Vlm:
    if train_on not in get_args(Axis):
        raise RewardSetupError(
            f"unified-reward reward: params.train_on is {train_on!r}; expected one of "
            f"{', '.join(get_args(Axis))}."
        )
    return parse_vlm("unified-reward", endpoint, model)
