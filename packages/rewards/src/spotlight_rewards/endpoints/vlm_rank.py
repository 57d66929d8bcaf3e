"""The reward ``vlm-rank``: a VLM at an endpoint says which of two pictures of a prompt is better.

Each picture of a group meets some of the others, each pair in both orders, because models prefer a position.
The score is its share of wins.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from spotlight_rewards.endpoints.chat import ChatAnswer, Question, token_curves
from spotlight_rewards.endpoints.vlm_reward import VlmReward
from spotlight_rewards.frames import FrameRule
from spotlight_rewards.reward import Curves, Image, SampleError, takes_groups, takes_videos
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
_ANSWER = re.compile(r"(?:the\s+)?(first|second|1|2)(?:\s+(?:one|picture|image))?", re.I)
_FIRST = {"first", "1"}

Pair = tuple[int, int]


@takes_groups
@takes_videos
@dataclass(frozen=True, kw_only=True)
class VlmRank(VlmReward[bool]):
    """Let a vision-language model compare the pictures of a group.

    Of a video it sees some frames side by side. ``score``: share of comparisons won, in [0, 1];
    ``comparisons``: how many were answered, of two per opponent; ``undecided``: share of pairs in which the
    answer went with the position. A picture alone in its group, or of which no comparison was answered, is an
    error. Tokens and cost are shared evenly.

    Attributes:
        opponents: how many others each picture meets; at least that, at most all.
        question: about two pictures; asks for First or Second, the prompt stands in for ``{prompt}``.
    """

    opponents: int = 4
    question: str = QUESTION

    name: ClassVar[str] = "vlm-rank"
    tokens_max: ClassVar[int] = 8
    tiny_answers: ClassVar[Sequence[str]] = ("First", "Second")

    def __post_init__(self) -> None:
        number = isinstance(self.opponents, int) and not isinstance(self.opponents, bool)
        self.require("opponents", number and self.opponents >= 1, "1 or more")
        asks = isinstance(self.question, str) and bool(self.question.strip())
        self.require("question", asks, "a question about two pictures that asks for First or Second")

    def __call__(
        self, images: Sequence[Image], prompts: Sequence[str], metadata: Sequence[Mapping[str, Any]]
    ) -> Curves:
        if len(images) < 2:
            alone = "it is alone: no other member of its group was made; expected two or more to compare."
            return {"score": [SampleError(alone)] * len(images)}
        matches = pairings(len(images), self.opponents)
        both = [*matches, *((second, first) for first, second in matches)]
        stills, vlm = [still(image) for image in images], self.vlm()
        answers = self.answers(
            vlm, [self._about(stills[first], stills[second], prompts[first]) for first, second in both]
        )
        wins = {
            pair: each if isinstance(each, SampleError) else each[1]
            for pair, each in zip(both, answers, strict=True)
        }
        costs = token_curves(vlm, answers)
        shared = {name: [sum(each) / len(images)] * len(images) for name, each in costs.items()}
        return {**tournament(len(images), wins), **shared}

    def first_question(self, prompts: Sequence[str]) -> Question:
        dark, bright = (np.full((64, 64, 3), level, np.uint8) for level in (64, 192))
        return self._about(dark, bright, prompts[0] if prompts else "a bright square")

    def read(self, answer: ChatAnswer, question: Question) -> bool:
        return first_wins(answer)

    def _about(self, first: Image, second: Image, prompt: str) -> Question:
        return Question(self.question.replace("{prompt}", prompt), (first, second))


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
    """Scores from the answers for ordered pairs (first, second); see :class:`VlmRank`."""
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
