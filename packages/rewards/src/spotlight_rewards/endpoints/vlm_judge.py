"""The reward ``vlm-judge``: a VLM at an endpoint says how well a picture suits its prompt.

Two kinds of answer: ``yes-no`` is P("Yes") of the first token (VQAScore, arXiv 2404.01291), ``grade`` a
number on a scale. An answer that is neither is an error, never a zero.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from functools import partial
from operator import itemgetter
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np

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
from spotlight_rewards.reward import Image, RewardSetupError, SampleError, adds_over_frames, best_with
from spotlight_rewards.reward_facts import Example, Reads, RewardFacts

AnswerKind = Literal["yes-no", "grade"]
FACTS = RewardFacts(
    runs_on="GPU or a server",
    typical=(0, 1),
    reads=Reads.TEXT,
    weights=("any VLM",),
    licence="the model's",
    example=Example(
        "sign",
        score=(0.5, 1),
        prompt="a white sign with the word OPEN",
        wrong_prompt="a photo of a dog in the snow",
    ),
)

QUESTIONS: Mapping[AnswerKind, str] = {
    "yes-no": 'Does this picture show "{prompt}"? Answer with the single word Yes or No.',
    "grade": 'How well does this picture show "{prompt}"? Answer with one number from {low} to {high}, where '
    "{low} is not at all and {high} is perfectly, and with nothing else.",
}
_TOKENS_MAX: Mapping[AnswerKind, int] = {"yes-no": 1, "grade": 16}
_YES_OR_NO_MIN = 0.5
"""Least probability of the two words together; below it the model is answering something else."""
_GRADE = re.compile(
    r"(?:(?:score|grade|rating)\s*[:=]\s*)?(-?\d+(?:\.\d+)?)(?:\s*/\s*(\d+(?:\.\d+)?))?\.?", re.I
)


@best_with(batch_size=16)
@adds_over_frames(*COSTS)
def vlm_judge(
    images: Sequence[Image],
    prompts: Sequence[str],
    metadata: Sequence[Mapping[str, Any]],
    *,
    endpoint: Mapping[str, Any] | None = None,
    model: Mapping[str, Any] | None = None,
    answer: AnswerKind = "yes-no",
    question: str = "",
    scale: Sequence[float] = (0, 10),
) -> dict[str, list[float | SampleError]]:
    """Let a vision-language model judge each picture.

    Args:
        images: uint8 [height, width, 3].
        prompts: inserted for ``{prompt}`` in the question.
        metadata: ignored.
        endpoint: fields of :class:`ChatEndpoint`; ``base_url`` and ``model`` are required.
        model: instead of an endpoint, fields of :class:`LocalVlm`; ``path`` is required.
        answer: ``yes-no`` needs an endpoint with logprobs; ``grade`` any.
        question: may contain ``{prompt}``, ``{low}`` and ``{high}``; empty: that of :data:`QUESTIONS`.
        scale: lowest and highest grade.

    Returns:
        ``score`` in [0, 1]: P("Yes"), or the grade's place on the scale; ``no`` (P("No")) or ``grade``;
        tokens and cost as :func:`token_curves` has them.

    Raises:
        RewardSetupError: invalid settings, a refused key or model, or logprobs that are not offered.
    """
    place = _settings(endpoint, model, answer, scale)
    questions = [_question(question, answer, prompt, scale) for prompt in prompts]
    answers = ask_about(
        place,
        images,
        questions,
        tokens_max=_TOKENS_MAX[answer],
        read=partial(_score, answer, scale),
        logprobs=answer == "yes-no",
    )
    second = "no" if answer == "yes-no" else "grade"
    return {
        "score": curve_of(answers, itemgetter(0)),
        second: curve_of(answers, itemgetter(1)),
        **token_curves(place, answers),
    }


def check(
    prompts: Sequence[str],
    metadata: Sequence[Mapping[str, Any]],
    *,
    endpoint: Mapping[str, Any] | None = None,
    model: Mapping[str, Any] | None = None,
    answer: AnswerKind = "yes-no",
    question: str = "",
    scale: Sequence[float] = (0, 10),
) -> None:
    """Ask one question about a gray picture: is the model there, and does it answer as it should?"""
    place = _settings(endpoint, model, answer, scale)
    first = _question(question, answer, prompts[0] if prompts else "a gray square", scale)
    try_out(
        place,
        np.full((64, 64, 3), 128, np.uint8),
        first,
        tokens_max=_TOKENS_MAX[answer],
        read=partial(_score, answer, scale),
        logprobs=answer == "yes-no",
        hint=" If it offers no logprobs, set params.answer: grade." if answer == "yes-no" else "",
    )


def scored_by(
    *,
    endpoint: Mapping[str, Any] | None = None,
    model: Mapping[str, Any] | None = None,
    deadline_s: float | None = None,
) -> str:
    """What answers; checks an endpoint's settings, and loads a model."""
    return parse_vlm("vlm-judge", endpoint, model, deadline_s).identity


def tiny(folder: Path, *, answer: AnswerKind = "yes-no", scale: Sequence[float] = (0, 10)) -> dict[str, Any]:
    """Write a small random model that answers as asked; the params that name it."""
    from spotlight_rewards.models.tiny_vlm import save_tiny_vlm

    grades = [f"{each}" for each in range(math.ceil(scale[0]), math.floor(scale[1]) + 1)]
    words = ["Yes", "No"] if answer == "yes-no" else grades
    return {"endpoint": None, "model": {"path": str(save_tiny_vlm(folder, words))}}


def probability_of_yes(first_token: Mapping[str, float]) -> tuple[float, float]:
    """P("Yes") and P("No") of the first token, in any spelling. Raises SampleError if it is neither."""
    words = {"yes": 0.0, "no": 0.0}
    for token, probability in first_token.items():
        word = token.strip(" \n\t▁Ġ\"'*.,").casefold()
        if word in words:
            words[word] += probability
    if sum(words.values()) < _YES_OR_NO_MIN:
        likely = sorted(first_token, key=lambda token: -first_token[token])[:5]
        raise SampleError(
            f"the model begins its answer with {likely}, with Yes or No only at probability "
            f"{sum(words.values()):.3f}; expected at least {_YES_OR_NO_MIN}. End the question with "
            "'Answer Yes or No.', switch reasoning off (endpoint.extra_body), or set params.answer: grade."
        )
    return words["yes"], words["no"]


def parse_grade(text: str, low: float, high: float) -> float:
    """The number that an answer consists of: ``7``, ``7.5``, ``7/10``, ``Score: 7``. Raises SampleError."""
    match = _GRADE.fullmatch(text.strip().strip("*"))
    grade = float(match[1]) if match else math.nan
    if match is None or not low <= grade <= high or (match[2] and float(match[2]) != high):
        raise SampleError(
            f"the model answered {text!r}; expected one number from {low:g} to {high:g} and nothing "
            "else. Ask for that in params.question, or set params.scale to what it uses."
        )
    return grade


def _score(answer: AnswerKind, scale: Sequence[float], found: ChatAnswer) -> tuple[float, float]:
    if not found.text.strip():
        raise SampleError("the model's answer is empty; expected Yes, No or one number.")
    if answer == "grade":
        if found.cut_off:
            raise SampleError(f"the model's answer {found.text!r} was cut off; expected one number.")
        grade = parse_grade(found.text, scale[0], scale[1])
        return (grade - scale[0]) / (scale[1] - scale[0]), grade
    if found.first_token is None:
        raise RewardSetupError(
            "vlm-judge reward: the endpoint sends no logprobs; expected them for params.answer 'yes-no', the "
            "probability of Yes. Set params.answer: grade, or use a server that offers them (vLLM, SGLang)."
        )
    return probability_of_yes(found.first_token)


def _settings(
    endpoint: Mapping[str, Any] | None,
    model: Mapping[str, Any] | None,
    answer: AnswerKind,
    scale: Sequence[float],
) -> Vlm:
    if answer not in get_args(AnswerKind):
        raise RewardSetupError(
            f"vlm-judge reward: params.answer is {answer!r}; expected {' or '.join(get_args(AnswerKind))}."
        )
    numbers = isinstance(scale, Sequence) and all(
        isinstance(each, int | float) and math.isfinite(each) for each in scale
    )
    if not numbers or len(scale) != 2 or not scale[0] < scale[1]:
        raise RewardSetupError(
            f"vlm-judge reward: params.scale is {scale!r}; expected lowest and highest grade, as [0, 10]."
        )
    return parse_vlm("vlm-judge", endpoint, model)


def _question(question: str, answer: AnswerKind, prompt: str, scale: Sequence[float]) -> str:
    text = question or QUESTIONS[answer]  # the prompt last: it may contain braces
    return (
        text.replace("{low}", f"{scale[0]:g}").replace("{high}", f"{scale[1]:g}").replace("{prompt}", prompt)
    )
