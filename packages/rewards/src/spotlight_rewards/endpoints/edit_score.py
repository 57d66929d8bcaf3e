"""The reward ``edit-score``: a VLM grades an edit for faithfulness (SC) and quality (PQ), each from 0 to 25.

Formula: EditScore (arXiv 2509.23909), after VIEScore: each side is the lower of its two grades, and the score
the geometric mean of both sides; EditScore itself divides both by 2.5. A prompt's metadata names
the picture that was to be edited.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import Any, ClassVar

from spotlight_rewards.endpoints.chat import ChatAnswer, Question, curve_of
from spotlight_rewards.endpoints.json_client import COSTS
from spotlight_rewards.endpoints.vlm_reward import VlmSampleReward
from spotlight_rewards.example_pictures import example_picture
from spotlight_rewards.originals import original_of
from spotlight_rewards.reward import (
    Curves,
    Image,
    SampleError,
    adds_over_frames,
    best_with,
    reads_files,
)
from spotlight_rewards.reward_facts import Example, Reads, RewardFacts

FACTS = RewardFacts(
    runs_on="GPU or a server",
    typical=(0, 25),
    reads=Reads.METADATA,
    weights=("EditScore/EditScore-Qwen3-VL-4B-Instruct",),
    licence="Apache-2.0",
    example=Example(
        "sign",
        score=(0, 25),
        prompt="Leave the picture as it is.",
        files={"reference": "sign"},
        wrong_prompt="Paint the whole sign red.",
    ),
)
GRADE_MAX = 25.0
_FORM = 'Answer with JSON only: {"reasoning": "in a few words", "score": [first, second]}.'
FAITHFULNESS = (
    "The first picture was to be edited as instructed, the second is the result. Instruction: {prompt}\n"
    "Grade twice from 0 to 25. First: was the instruction carried out, from 0 (not at all) to 25 (fully)? "
    "Second: was nothing else changed, from 0 (a different scene) to 25 (all that should stay has stayed)? "
    + _FORM
)
QUALITY = (
    "This picture was made by a model. Grade it twice from 0 to 25. First: does it look natural, in light, "
    "shadows and distances, from 0 (not at all) to 25 (like a photograph or a drawing)? Second: is it "
    "free of artifacts such as blur, distortions, extra limbs, from 0 (full of them) to 25 (none)? " + _FORM
)


@best_with(batch_size=16)
@reads_files
@adds_over_frames(*COSTS)
@dataclass(frozen=True, kw_only=True)
class EditScore(VlmSampleReward[float]):
    """Let a VLM compare each edited picture with the picture it was made from.

    Prompts are the instructions, and each one's metadata names its original picture. ``score`` in [0, 25];
    ``faithfulness`` and ``quality``, each the lower of its two grades.

    Attributes:
        reference: the metadata field with the original's path, absolute or from the current directory;
            default: the first of the prompt's ``references``, else ``reference``.
        tokens_max: length limit of an answer, reasoning included.
    """

    reference: str | None = None
    tokens_max: int = 512

    name: ClassVar[str] = "edit-score"

    @property
    def tiny_answers(self) -> Sequence[str]:
        return [json.dumps({"score": [first, first + 2]}) for first in range(0, 24, 3)]

    def ask(self, image: Image, prompt: str, record: Mapping[str, Any]) -> list[Question]:
        original = original_of(self.name, prompt, record, self.reference)
        faithfulness = FAITHFULNESS.replace("{prompt}", prompt)
        return [Question(faithfulness, (original, image)), Question(QUALITY, (image,))]

    def first_question(self, prompts: Sequence[str]) -> Question:
        return Question(QUALITY, (example_picture("sign"),))

    def read(self, answer: ChatAnswer, question: Question) -> float:
        return parse_grade_pair(answer)

    def curves(self, answers: Sequence[tuple[ChatAnswer, list[float]] | SampleError]) -> Curves:
        return {
            "score": curve_of(answers, lambda sides: math.sqrt(math.prod(sides))),
            "faithfulness": curve_of(answers, itemgetter(0)),
            "quality": curve_of(answers, itemgetter(1)),
        }


def parse_grade_pair(answer: ChatAnswer) -> float:
    """The lower of an answer's two grades. Raises SampleError unless both are from 0 to 25."""
    text = answer.text
    try:
        grades = json.loads(text[text.find("{") : text.rfind("}") + 1])["score"]
    except (ValueError, KeyError, TypeError, RecursionError):
        grades = None
    if (
        not isinstance(grades, list)
        or len(grades) != 2
        or not all(type(each) in (int, float) and 0 <= each <= GRADE_MAX for each in grades)
    ):
        cut = ", which was cut off" if answer.cut_off else ""
        raise SampleError(
            f'the model answered {answer.text!r}{cut}; expected {{"score": [first, second]}}, both from 0 to '
            f"{GRADE_MAX:g}. Use an EditScore model, or raise params.tokens_max."
        )
    return float(min(grades))
