"""The reward ``geneval2``: Soft-TIFA, the probability of the right answer to a question per atom of a prompt.

Formula: GenEval 2 (arXiv 2512.16853). A prompt's metadata carries its atoms in the official format,
``vqa_list: [[question, answer], ...]``; none are shipped.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import numpy as np

from spotlight_rewards.endpoints.chat import ChatAnswer, Question, curve_of
from spotlight_rewards.endpoints.json_client import COSTS
from spotlight_rewards.endpoints.vlm_reward import GRAY, VlmSampleReward
from spotlight_rewards.reward import (
    Curves,
    Image,
    RewardInputError,
    RewardSetupError,
    SampleError,
    adds_over_frames,
    best_with,
)
from spotlight_rewards.reward_facts import Example, Reads, RewardFacts

Mean = Literal["geometric", "arithmetic"]
Atom = tuple[str, str]
"""Question and answer."""

FACTS = RewardFacts(
    runs_on="GPU or a server",
    typical=(0, 1),
    reads=Reads.METADATA,
    weights=("Qwen/Qwen3-VL-8B-Instruct",),
    licence="Apache-2.0",
    example=Example(
        "sign",
        score=(0.5, 1),
        prompt="a sign that says OPEN",
        metadata={"vqa_list": [["Is there a sign in the picture?", "Yes"]]},
    ),
)
INSTRUCTION = "{question} Answer in one word."
_NUMBERS = (
    "zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten",
)  # fmt: skip
_KNOWN_MIN = 0.5
"""Least probability of all the tokens that are given; below it, an answer may hide among the others."""
_PREFIX_MIN = 2
"""Letters from which a token counts as the beginning of a longer answer."""
_UNCLEAR_MAX = 0.1
"""Probability of tokens that may or may not begin the answer, from which they are no detail."""


@best_with(batch_size=16)
@adds_over_frames(*COSTS)
@dataclass(frozen=True, kw_only=True)
class GenEval2(VlmSampleReward[float]):
    """Score how probable a VLM finds the right answer to each question about a picture.

    Metadata has ``vqa_list``, the atoms as ``[question, answer]``; an endpoint must offer logprobs.
    ``score`` in [0, 1], ``arithmetic`` and ``geometric`` mean, ``weakest`` atom.

    Attributes:
        mean: over a picture's atoms, for ``score``; GenEval 2 reports both.
        instruction: contains ``{question}``.
    """

    mean: Mean = "geometric"
    instruction: str = INSTRUCTION

    name: ClassVar[str] = "geneval2"
    tokens_max: ClassVar[int] = 1
    logprobs: ClassVar[bool] = True
    tiny_answers: ClassVar[Sequence[str]] = ("Yes", "No", *_NUMBERS)

    def __post_init__(self) -> None:
        self.require_one_of("mean", Mean)
        self.require("instruction", "{question}" in self.instruction, "{question} in it")

    def ask(self, image: Image, prompt: str, record: Mapping[str, Any]) -> list[Question]:
        return [
            Question(self.instruction.replace("{question}", question), (image,), answer)
            for question, answer in atoms_of(prompt, record)
        ]

    def first_question(self, prompts: Sequence[str]) -> Question:
        return Question(self.instruction.replace("{question}", "Is this picture gray?"), (GRAY,))

    def read(self, answer: ChatAnswer, question: Question) -> float:
        return answer_probability(_first_token(answer), question.answer)

    def read_first(self, answer: ChatAnswer, question: Question) -> object:
        return _first_token(answer)

    def curves(self, answers: Sequence[tuple[ChatAnswer, list[float]] | SampleError]) -> Curves:
        arithmetic = curve_of(answers, lambda atoms: float(np.mean(atoms)))
        geometric = curve_of(answers, geometric_mean)
        return {
            "score": geometric if self.mean == "geometric" else arithmetic,
            "arithmetic": arithmetic,
            "geometric": geometric,
            "weakest": curve_of(answers, min),
        }


def atoms_of(prompt: str, record: Mapping[str, Any]) -> list[Atom]:
    """The questions and answers of a prompt's metadata. Raises RewardInputError."""
    atoms = record.get("vqa_list")
    if (
        not isinstance(atoms, Sequence)
        or isinstance(atoms, str)
        or not atoms
        or not all(
            isinstance(atom, Sequence)
            and len(atom) == 2
            and all(isinstance(text, str) and text.strip() for text in atom)
            for atom in atoms
        )
    ):
        raise RewardInputError(
            f"geneval2 reward: 'vqa_list' of the prompt {prompt!r} is {atoms!r}; expected its atoms as "
            '[[question, answer], ...], as in [["How many dogs are there?", "two"]]. Correct its line in the '
            "prompts file."
        )
    return [(atom[0], atom[1]) for atom in atoms]


def answer_probability(first_token: Mapping[str, float], answer: str) -> float:
    """Probability that an answer begins as the right one does: in any case, numbers also as digits.

    Raises:
        SampleError: most of what could begin it is too short to tell, or a number of its own (``1`` of 12,
            ``seven`` of seventeen).
    """
    right = " ".join(answer.casefold().split()).strip(".")
    spellings = {right}
    if right in _NUMBERS:
        spellings.add(str(_NUMBERS.index(right)))
    elif right.isdecimal() and int(right) < len(_NUMBERS):
        spellings.add(_NUMBERS[int(right)])
    total = unclear = 0.0
    for token, probability in first_token.items():
        word = token.strip(" \n\t▁Ġ\"'*.,").casefold()
        if word in spellings:
            total += probability
        elif word and any(each.startswith(word) for each in spellings):
            if len(word) < _PREFIX_MIN or word.isdecimal() or word in _NUMBERS:
                unclear += probability
            else:
                total += probability
    if unclear > max(total, _UNCLEAR_MAX):
        raise SampleError(
            f"the first token begins {answer!r} with probability {unclear:.3f}, but may as well be another "
            "answer; expected a clear one. Ask for numbers up to ten, or for another form of the answer "
            "in params.instruction."
        )
    return min(total, 1.0)


def geometric_mean(probabilities: Sequence[float]) -> float:
    """0 if one of them is."""
    if min(probabilities) == 0:
        return 0.0
    return math.exp(sum(map(math.log, probabilities)) / len(probabilities))


def _first_token(found: ChatAnswer) -> Mapping[str, float]:
    if found.first_token is None:
        raise RewardSetupError(
            "geneval2 reward: the endpoint sends no logprobs; expected them, for the probability of the "
            "answer. Use a server that offers them (vLLM, SGLang)."
        )
    known = sum(found.first_token.values())
    if known < _KNOWN_MIN:
        raise SampleError(
            f"the endpoint gives first tokens of probability {known:.3f} in all; expected at least "
            f"{_KNOWN_MIN}: the answer may be among the others. Ask for one word in params.instruction."
        )
    return found.first_token
