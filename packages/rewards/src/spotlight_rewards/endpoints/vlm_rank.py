"""The reward ``vlm-rank``: a VLM at an endpoint says which of two pictures of a prompt is better.

Each picture of a group meets some of the others, each pair in both orders, because models prefer a position.
The score is its share of wins.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from spotlight_rewards.endpoints.chat import (
    ChatAnswer,
    ChatEndpoint,
    TokenCount,
    Vlm,
    ask_about,
    parse_vlm,
    try_out,
)
from spotlight_rewards.frames import FrameRule
from spotlight_rewards.reward import Image, RewardSetupError, SampleError, takes_groups, takes_videos
from spotlight_rewards.reward_facts import Example, Reads, RewardFacts

FACTS = RewardFacts(
    runs_on="GPU or a server",
    typical=(0, 1),
    reads=Reads.TEXT,
    weights=("any VLM that takes two pictures",),
    licence="the model's",
    example=Example(
        "sign",
        score=(1, 1),
        prompt="a sign that says OPEN",
        wrong_prompt="a red circle left of a blue square",
    ),
)

QUESTION = (
    'Two pictures were made for the text "{prompt}". Which one shows it better, the first or the second? '
    "Answer with the single word First or Second."
)
_TOKENS_MAX = 8
_ANSWER = re.compile(r"(?:the\s+)?(first|second|1|2)(?:\s+(?:one|picture|image))?", re.I)
_FIRST = {"first", "1"}

Pair = tuple[int, int]


@takes_groups
@takes_videos
def vlm_rank(
    images: Sequence[Image],
    prompts: Sequence[str],
    metadata: Sequence[Mapping[str, Any]],
    *,
    endpoint: Mapping[str, Any] | None = None,
    model: Mapping[str, Any] | None = None,
    opponents: int = 4,
    question: str = QUESTION,
) -> dict[str, list[float | SampleError]]:
    """Let a vision-language model compare the pictures of a group.

    Args:
        images: uint8 [height, width, 3], all made for one prompt; of a video, some frames side by side.
        prompts: inserted for ``{prompt}`` in the question.
        metadata: ignored.
        endpoint: fields of :class:`ChatEndpoint`; ``base_url`` and ``model`` are required.
        model: instead of an endpoint, fields of :class:`LocalVlm`; ``path`` is required.
        opponents: how many others each picture meets; at least that, at most all.
        question: about two pictures; asks for First or Second.

    Returns:
        ``score``: share of comparisons won, in [0, 1]; ``comparisons``: how many were answered, of two per
        opponent; ``undecided``: share of pairs in which the answer went with the position. A picture alone in
        its group, or of which no comparison was answered, is an error. Tokens and cost are shared evenly.

    Raises:
        RewardSetupError: invalid settings, a refused key or model.
    """
    place = _settings(endpoint, model, opponents, question)
    if len(images) < 2:
        alone = "it is alone: no other member of its group was made; expected two or more to compare."
        return {"score": [SampleError(alone)] * len(images)}
    matches = pairings(len(images), opponents)
    both = [*matches, *((second, first) for first, second in matches)]
    answers = ask_about(
        place,
        [[still(images[first]), still(images[second])] for first, second in both],
        [question.replace("{prompt}", prompts[first]) for first, _ in both],
        tokens_max=_TOKENS_MAX,
        read=first_wins,
    )
    wins = {
        pair: each if isinstance(each, SampleError) else each[1]
        for pair, each in zip(both, answers, strict=True)
    }
    return {**tournament(len(images), wins), **_costs(place, answers, len(images))}


def check(
    prompts: Sequence[str],
    metadata: Sequence[Mapping[str, Any]],
    *,
    endpoint: Mapping[str, Any] | None = None,
    model: Mapping[str, Any] | None = None,
    opponents: int = 4,
    question: str = QUESTION,
) -> None:
    """Let the model compare two plain squares: is it there, and does it take two pictures?"""
    place = _settings(endpoint, model, opponents, question)
    squares = [np.full((64, 64, 3), level, np.uint8) for level in (64, 192)]
    first = question.replace("{prompt}", prompts[0] if prompts else "a bright square")
    try_out(place, squares, first, tokens_max=_TOKENS_MAX, read=first_wins)


def scored_by(
    *,
    endpoint: Mapping[str, Any] | None = None,
    model: Mapping[str, Any] | None = None,
    deadline_s: float | None = None,
) -> str:
    """What answers; checks an endpoint's settings, and loads a model."""
    return parse_vlm("vlm-rank", endpoint, model, deadline_s).identity


def tiny(folder: Path) -> dict[str, Any]:
    """Write a small random model that prefers one of two pictures; the params that name it."""
    from spotlight_rewards.models.tiny_vlm import save_tiny_vlm

    words = ["First", "Second"]
    return {"endpoint": None, "model": {"path": str(save_tiny_vlm(folder, words))}}


def pairings(members: int, opponents: int) -> list[Pair]:
    """Who meets whom: neighbours at growing distance in a ring, so that all meet (almost) equally many.

    Each member meets at least ``opponents`` others, or all; with an odd number, one more than that if the
    ring cannot be halved.
    """
    pairs: dict[frozenset[int], Pair] = {}
    met = 0
    for distance in range(1, members // 2 + 1):
        if met >= opponents:
            break
        for one in range(members):
            other = (one + distance) % members
            pairs.setdefault(frozenset((one, other)), (one, other))
        met += 1 if 2 * distance == members else 2
    return list(pairs.values())


def tournament(
    members: int, first_won: Mapping[Pair, bool | SampleError]
) -> dict[str, list[float | SampleError]]:
    """Scores from the answers for ordered pairs (first, second); see :func:`vlm_rank`."""
    won: list[list[float]] = [[] for _ in range(members)]
    split: list[list[float]] = [[] for _ in range(members)]
    why: dict[int, SampleError] = {}
    for (first, second), answer in first_won.items():
        if isinstance(answer, SampleError):
            why[first] = why[second] = answer
            continue
        won[first].append(float(answer))
        won[second].append(float(not answer))
        reverse = first_won.get((second, first))
        if isinstance(reverse, bool):
            for each in (first, second):
                split[each].append(float(answer == reverse))
    return {
        "score": [
            sum(each) / len(each) if each else why.get(member, SampleError("it was not compared"))
            for member, each in enumerate(won)
        ],
        "comparisons": [float(len(each)) for each in won],
        "undecided": [sum(each) / len(each) if each else 0.0 for each in split],
    }


def still(image: Image) -> Image:
    """A picture as it is; of a video [frames, height, width, 3], chosen frames side by side."""
    if image.ndim == 3:
        return image
    return np.concatenate([image[at] for at in FrameRule().chosen(len(image))], axis=1)


def first_wins(answer: ChatAnswer) -> bool:
    """Whether an answer names the first picture. Raises SampleError if it names neither, or says more."""
    match = _ANSWER.fullmatch(answer.text.strip(" \n\t*\"'."))
    if match is None:
        raise SampleError(
            f"the model answered {answer.text!r}; expected First or Second and nothing else. Ask for that in "
            "params.question, or switch reasoning off (endpoint.extra_body)."
        )
    return match[1].lower() in _FIRST


def _costs(
    place: Vlm, answers: Sequence[tuple[ChatAnswer, bool] | SampleError], members: int
) -> dict[str, list[float | SampleError]]:
    answered = [each[0].tokens for each in answers if not isinstance(each, SampleError)]
    counts = [each for each in answered if each is not None]
    if not counts or len(counts) < len(answered):
        return {}
    total = TokenCount(sum(each.prompt for each in counts), sum(each.completion for each in counts))
    curves: dict[str, list[float | SampleError]] = {
        "prompt_tokens": [total.prompt / members] * members,
        "completion_tokens": [total.completion / members] * members,
    }
    if isinstance(place, ChatEndpoint) and place.priced:
        curves["cost_usd"] = [place.cost_usd(total) / members] * members
    return curves


def _settings(
    endpoint: Mapping[str, Any] | None, model: Mapping[str, Any] | None, opponents: int, question: str
) -> Vlm:
    if isinstance(opponents, bool) or not isinstance(opponents, int) or opponents < 1:
        raise RewardSetupError(f"vlm-rank reward: params.opponents is {opponents!r}; expected 1 or more.")
    if not isinstance(question, str) or not question.strip():
        raise RewardSetupError(
            f"vlm-rank reward: params.question is {question!r}; expected a question about two pictures that "
            "asks for First or Second."
        )
    return parse_vlm("vlm-rank", endpoint, model)
