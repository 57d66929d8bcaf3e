"""The reward ``vlm-judge``: a VLM at an endpoint says how well a picture suits its prompt.

Two kinds of answer: ``yes-no`` is P("Yes") of the first token (VQAScore, arXiv 2404.01291), ``grade`` a
number on a scale. An answer that is neither is an error, never a zero.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from spotlight_rewards.endpoints.chat import ChatAnswer, Question, curve_of
from spotlight_rewards.endpoints.json_client import COSTS
from spotlight_rewards.endpoints.vlm_reward import GRAY, VlmSampleReward
from spotlight_rewards.reward import Curves, Image, RewardSetupError, SampleError, adds_over_frames, best_with
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
@dataclass(frozen=True, kw_only=True)
class VlmJudge(VlmSampleReward[tuple[float, float]]):
    """Let a vision-language model judge each picture.

    ``score`` in [0, 1]: P("Yes"), or the grade's place on the scale; ``no`` (P("No")) or ``grade``.

    Attributes:
        answer: ``yes-no`` needs an endpoint with logprobs; ``grade`` any.
        question: may contain ``{prompt}``, ``{low}`` and ``{high}``; empty: that of :data:`QUESTIONS`.
        scale: lowest and highest grade.
    """

    answer: AnswerKind = "yes-no"
    question: str = ""
    scale: Sequence[float] = (0, 10)

    name: ClassVar[str] = "vlm-judge"

    def __post_init__(self) -> None:
        self.require_one_of("answer", AnswerKind)
        numbers = isinstance(self.scale, Sequence) and all(
            isinstance(each, int | float) and math.isfinite(each) for each in self.scale
        )
        sound = numbers and len(self.scale) == 2 and self.scale[0] < self.scale[1]
        self.require("scale", sound, "lowest and highest grade, as [0, 10]")

    @property
    def tokens_max(self) -> int:
        return _TOKENS_MAX[self.answer]

    @property
    def logprobs(self) -> bool:
        return self.answer == "yes-no"

    @property
    def hint(self) -> str:
        return " If it offers no logprobs, set params.answer: grade." if self.answer == "yes-no" else ""

    @property
    def tiny_answers(self) -> Sequence[str]:
        grades = range(math.ceil(self.scale[0]), math.floor(self.scale[1]) + 1)
        return ["Yes", "No"] if self.answer == "yes-no" else [str(each) for each in grades]

    def ask(self, image: Image, prompt: str, record: Mapping[str, Any]) -> list[Question]:
        text, (low, high) = self.question or QUESTIONS[self.answer], self.scale
        scaled = text.replace("{low}", f"{low:g}").replace("{high}", f"{high:g}")
        # The prompt last: it may contain braces.
        return [Question(scaled.replace("{prompt}", prompt), (image,))]

    def first_question(self, prompts: Sequence[str]) -> Question:
        return self.ask(GRAY, prompts[0] if prompts else "a gray square", {})[0]

    def read(self, answer: ChatAnswer, question: Question) -> tuple[float, float]:
        if not answer.text.strip():
            raise SampleError("the model's answer is empty; expected Yes, No or one number.")
        if self.answer == "grade":
            if answer.cut_off:
                raise SampleError(f"the model's answer {answer.text!r} was cut off; expected one number.")
            low, high = self.scale
            grade = parse_grade(answer.text, low, high)
            return (grade - low) / (high - low), grade
        if answer.first_token is None:
            raise RewardSetupError(
                "vlm-judge reward: the endpoint sends no logprobs; expected them for params.answer 'yes-no', "
                "the probability of Yes. Set params.answer: grade, or use a server that offers them (vLLM, "
                "SGLang)."
            )
        return probability_of_yes(answer.first_token)

    def curves(self, answers: Sequence[tuple[ChatAnswer, list[tuple[float, float]]] | SampleError]) -> Curves:
        return {
            "score": curve_of(answers, lambda found: found[0][0]),
            "no" if self.answer == "yes-no" else "grade": curve_of(answers, lambda found: found[0][1]),
        }


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
