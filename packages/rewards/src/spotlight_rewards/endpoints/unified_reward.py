"""The reward ``unified-reward``: UnifiedReward 2.0 grades alignment, coherence and style from 1 to 5.

The model and the form of its answers: https://github.com/CodeGoat24/UnifiedReward (arXiv 2503.05236).
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import Any, ClassVar, Literal

from spotlight_rewards.endpoints.chat import ChatAnswer, Question, curve_of
from spotlight_rewards.endpoints.json_client import COSTS
from spotlight_rewards.endpoints.vlm_reward import VlmSampleReward
from spotlight_rewards.example_pictures import example_picture
from spotlight_rewards.reward import Curves, Image, SampleError, adds_over_frames, best_with
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
_GRADE_MAX = 5.0


@best_with(batch_size=16)
@adds_over_frames(*COSTS)
@dataclass(frozen=True, kw_only=True)
class UnifiedReward(VlmSampleReward[dict[str, float]]):
    """Let UnifiedReward grade each picture.

    ``score`` in [0.2, 1], grade / 5; ``alignment``, ``coherence`` and ``style``, the grades.

    Attributes:
        train_on: the axis, or ``mean`` of the three, that becomes ``score``.
        question: what is asked; the prompt stands in for ``{prompt}``.
    """

    train_on: Axis = "mean"
    question: str = QUESTION

    name: ClassVar[str] = "unified-reward"
    tokens_max: ClassVar[int] = 64

    def __post_init__(self) -> None:
        self.require_one_of("train_on", Axis)

    @property
    def tiny_answers(self) -> Sequence[str]:
        return [
            "\n".join(f"{axis.title()} Score (1-5): {(first + at) % 5 + 1}" for at, axis in enumerate(AXES))
            for first in range(5)
        ]

    def ask(self, image: Image, prompt: str, record: Mapping[str, Any]) -> list[Question]:
        return [Question(self.question.replace("{prompt}", prompt), (image,))]

    def first_question(self, prompts: Sequence[str]) -> Question:
        return self.ask(example_picture("sign"), "a sign that says OPEN", {})[0]

    def read(self, answer: ChatAnswer, question: Question) -> dict[str, float]:
        return parse_grades(answer)

    def curves(self, answers: Sequence[tuple[ChatAnswer, list[dict[str, float]]] | SampleError]) -> Curves:
        first = [each if isinstance(each, SampleError) else (each[0], each[1][0]) for each in answers]
        return {
            "score": curve_of(first, lambda grades: grades[self.train_on] / _GRADE_MAX),
            **{axis: curve_of(first, itemgetter(axis)) for axis in AXES},
        }


def parse_grades(answer: ChatAnswer) -> dict[str, float]:
    """The three grades and their ``mean``. Raises SampleError unless each is there once, from 1 to 5."""
    grades = {}
    for axis in AXES:
        found = re.findall(rf"\b{axis}\s+score(?:\s*\(1-5\))?\s*:\s*\**(\d+(?:\.\d+)?)", answer.text, re.I)
        if len(found) != 1 or not 1 <= float(found[0]) <= _GRADE_MAX:
            raise SampleError(
                f"the model answered {answer.text!r}; expected one '{axis.title()} Score (1-5): X', X from "
                "1 to 5, and the same for the other axes. Is it a UnifiedReward 2.0?"
            )
        grades[axis] = float(found[0])
    return grades | {"mean": sum(grades.values()) / len(grades)}
