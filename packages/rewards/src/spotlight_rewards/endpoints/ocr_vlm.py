"""The reward ``ocr-vlm``: a VLM at an endpoint transcribes the picture, the prompt quotes the target.

Target and score are those of ``ocr`` (``reading/legibility.py``); only the reader differs.
"""

from __future__ import annotations

import string
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from spotlight_rewards.endpoints.chat import ChatAnswer, Question, curve_of
from spotlight_rewards.endpoints.json_client import COSTS
from spotlight_rewards.endpoints.vlm_reward import VlmSampleReward
from spotlight_rewards.example_pictures import example_picture
from spotlight_rewards.reading.legibility import legibility, normalized, target_of
from spotlight_rewards.reward import Curves, Image, RewardInputError, SampleError, adds_over_frames, best_with
from spotlight_rewards.reward_facts import Example, Reads, RewardFacts

FACTS = RewardFacts(
    runs_on="GPU or a server",
    typical=(0, 1),
    reads=Reads.TEXT,
    weights=("any VLM",),
    licence="the model's",
    example=Example("sign", score=(1, 1), prompt='a sign that says "OPEN"', wrong_prompt='a sign: "JAZZ"'),
)
NO_TEXT = "[no text]"
INSTRUCTION = (
    "Transcribe all text in this picture exactly as it is drawn, misspellings included. Answer with the text "
    f"and nothing else; if there is no text, answer {NO_TEXT}"
)


@best_with(batch_size=16)
@adds_over_frames(*COSTS)
@dataclass(frozen=True, kw_only=True)
class OcrVlm(VlmSampleReward[float]):
    """Score how much of each prompt's quoted text a vision-language model reads in its image.

    Prompts have their target in straight double quotes; the model does not see them. ``score`` in [0, 1];
    ``exact``: 1 if the target was read in full, else 0; ``cut_off``: 1 if the transcription reached
    ``tokens_max`` (what was read until then counts).

    Attributes:
        instruction: what the model is asked; readers such as DeepSeek-OCR have one of their own.
        tokens_max: length limit of a transcription.
    """

    instruction: str = INSTRUCTION
    tokens_max: int = 512

    name: ClassVar[str] = "ocr-vlm"
    tiny_answers: ClassVar[Sequence[str]] = string.ascii_uppercase

    def ask(self, image: Image, prompt: str, record: Mapping[str, Any]) -> list[Question]:
        return [Question(self.instruction, (image,), _target(prompt))]

    def first_question(self, prompts: Sequence[str]) -> Question:
        return Question(self.instruction, (example_picture("sign"),))

    def read(self, answer: ChatAnswer, question: Question) -> float:
        return legibility(question.answer, reading(answer.text))

    def read_first(self, answer: ChatAnswer, question: Question) -> None:
        if not reading(answer.text):
            raise SampleError(
                f"it read nothing ({answer.text!r}) in a picture of the word OPEN; expected it. Correct "
                "params.instruction, or use another model."
            )

    def curves(self, answers: Sequence[tuple[ChatAnswer, list[float]] | SampleError]) -> Curves:
        cut_off = [float(not isinstance(each, SampleError) and each[0].cut_off) for each in answers]
        return {
            "score": curve_of(answers, lambda scores: scores[0]),
            "exact": curve_of(answers, lambda scores: float(scores[0] == 1.0)),
            "cut_off": cut_off,
        }


def _target(prompt: str) -> str:
    target = target_of(prompt, "ocr-vlm")
    if _bare(target) == _bare(NO_TEXT):
        raise RewardInputError(
            f"ocr-vlm reward: the prompt {prompt!r} asks for {NO_TEXT.strip('[]')!r}, the model's answer "
            "where there is no text: the score could only be 0. Remove the prompt."
        )
    return target


def reading(answer: str) -> str:
    """What an answer says was read; empty if it says that there is no text."""
    return "" if _bare(answer) == _bare(NO_TEXT) else answer.strip()


def _bare(answer: str) -> str:
    return normalized(answer).strip("[].")
