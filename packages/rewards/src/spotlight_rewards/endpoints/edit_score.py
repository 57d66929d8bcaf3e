"""The reward ``edit-score``: a VLM grades an edit for faithfulness (SC) and quality (PQ), each from 0 to 25.

Formula: EditScore (arXiv 2509.23909), after VIEScore: each side is the lower of its two grades, and the score
the geometric mean of both sides; EditScore itself divides both by 2.5. A prompt's metadata names
the picture that was to be edited.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from functools import lru_cache
from operator import itemgetter
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image as PILImage
from PIL import ImageOps

from spotlight_rewards.endpoints.chat import (
    ChatAnswer,
    ask_about,
    curve_of,
    merged,
    parse_vlm,
    token_curves,
    try_out,
)
from spotlight_rewards.endpoints.json_client import COSTS
from spotlight_rewards.example_pictures import example_picture
from spotlight_rewards.reward import (
    Image,
    RewardInputError,
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
def edit_score(
    images: Sequence[Image],
    prompts: Sequence[str],
    metadata: Sequence[Mapping[str, Any]],
    *,
    endpoint: Mapping[str, Any] | None = None,
    model: Mapping[str, Any] | None = None,
    reference: str | None = None,
    tokens_max: int = 512,
) -> dict[str, list[float | SampleError]]:
    """Let a VLM compare each edited picture with the picture it was made from.

    Args:
        images: uint8 [height, width, 3], edited.
        prompts: the instructions.
        metadata: each names its original picture.
        endpoint: fields of :class:`ChatEndpoint`; ``base_url`` and ``model`` are required.
        model: instead of an endpoint, fields of :class:`LocalVlm`; ``path`` is required.
        reference: the metadata field with the original's path, absolute or from the current directory;
            default: the first of the prompt's ``references``, else ``reference``.
        tokens_max: length limit of an answer, reasoning included.

    Returns:
        ``score`` in [0, 25]; ``faithfulness`` and ``quality``, each the lower of its two grades; tokens and
        cost of both questions.

    Raises:
        RewardInputError: an original is missing, or cannot be read as a picture.
        RewardSetupError: invalid settings, a refused key or model.
    """
    place = parse_vlm("edit-score", endpoint, model)
    originals = [
        original_of(prompt, record, reference) for prompt, record in zip(prompts, metadata, strict=True)
    ]
    shown: list[Image | Sequence[Image]] = []
    questions: list[str] = []
    for image, original, prompt in zip(images, originals, prompts, strict=True):
        shown += [(original, image), image]
        questions += [FAITHFULNESS.replace("{prompt}", prompt), QUALITY]
    answers = ask_about(place, shown, questions, tokens_max=tokens_max, read=parse_grade_pair)
    found = [merged(answers[at : at + 2]) for at in range(0, len(answers), 2)]
    return {
        "score": curve_of(found, lambda sides: math.sqrt(math.prod(sides))),
        "faithfulness": curve_of(found, itemgetter(0)),
        "quality": curve_of(found, itemgetter(1)),
        **token_curves(place, found),
    }


def check(
    prompts: Sequence[str],
    metadata: Sequence[Mapping[str, Any]],
    *,
    endpoint: Mapping[str, Any] | None = None,
    model: Mapping[str, Any] | None = None,
    reference: str | None = None,
    tokens_max: int = 512,
) -> None:
    """Open every prompt's original, and ask once about a picture of a sign."""
    place = parse_vlm("edit-score", endpoint, model)
    for prompt, record in zip(prompts, metadata, strict=True):
        original_of(prompt, record, reference)
    try_out(place, example_picture("sign"), QUALITY, tokens_max=tokens_max, read=parse_grade_pair)


def scored_by(
    *,
    endpoint: Mapping[str, Any] | None = None,
    model: Mapping[str, Any] | None = None,
    deadline_s: float | None = None,
) -> str:
    """What answers; checks an endpoint's settings, and loads a model."""
    return parse_vlm("edit-score", endpoint, model, deadline_s).identity


def tiny(folder: Path) -> dict[str, Any]:
    """Write a small random model that answers with two grades; the params that name it."""
    from spotlight_rewards.models.tiny_vlm import save_tiny_vlm

    answers = [json.dumps({"score": [first, first + 2]}) for first in range(0, 24, 3)]
    return {"endpoint": None, "model": {"path": str(save_tiny_vlm(folder, answers))}}


def original_of(prompt: str, record: Mapping[str, Any], field: str | None = None) -> Image:
    """The picture that a prompt's metadata names: [height, width, 3]. Raises RewardInputError.

    Args:
        field: the metadata field; None: ``references``, else ``reference``.
    """
    name = field or next((each for each in ("references", "reference") if each in record), "references")
    found = record.get(name)
    path = found[0] if isinstance(found, list) and found else found
    if not isinstance(path, str) or not path:
        raise RewardInputError(
            f"edit-score reward: {name!r} of the prompt {prompt!r} is {found!r}; expected the path of the "
            "picture to edit. Add it to its line of the prompts file, or name another field in "
            "params.reference."
        )
    try:
        return _opened(path)
    except (OSError, ValueError, SyntaxError, PILImage.DecompressionBombError) as error:
        raise RewardInputError(
            f"edit-score reward: {name!r} of the prompt {prompt!r} is {path!r}, which cannot be read as a "
            f"picture ({type(error).__name__}: {error}); expected one, by its absolute path or from "
            f"{Path.cwd()}."
        ) from error


def parse_grade_pair(answer: ChatAnswer) -> float:
    """The lower of an answer's two grades. Raises SampleError unless both are from 0 to 25."""
    match = re.search(r"\{.*\}", answer.text, re.S)
    try:
        grades = json.loads(match[0])["score"] if match else None
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


@lru_cache(maxsize=64)  # the members of a group share theirs
def _opened(path: str) -> Image:
    with PILImage.open(Path(path).expanduser()) as picture:
        return np.asarray(ImageOps.exif_transpose(picture).convert("RGB"))
