"""The reward ``ocr-vlm``: a VLM at an endpoint transcribes the picture, the prompt quotes the target.

Target and score are those of ``ocr`` (``reading/legibility.py``); only the reader differs.
"""

from __future__ import annotations

import string
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from spotlight_rewards.endpoints.chat import ChatAnswer, ask_about, parse_vlm, token_curves, try_out
from spotlight_rewards.endpoints.json_client import COSTS
from spotlight_rewards.example_pictures import example_picture
from spotlight_rewards.reading.legibility import legibility, normalized, target_of
from spotlight_rewards.reward import Image, RewardInputError, SampleError, adds_over_frames, best_with
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
def ocr_vlm(
    images: Sequence[Image],
    prompts: Sequence[str],
    metadata: Sequence[Mapping[str, Any]],
    *,
    endpoint: Mapping[str, Any] | None = None,
    model: Mapping[str, Any] | None = None,
    instruction: str = INSTRUCTION,
    tokens_max: int = 512,
) -> dict[str, list[float | SampleError]]:
    """Score how much of each prompt's quoted text a vision-language model reads in its image.

    Args:
        images: uint8 [height, width, 3].
        prompts: each with its target in straight double quotes; the model does not see them.
        metadata: ignored.
        endpoint: fields of :class:`ChatEndpoint`; ``base_url`` and ``model`` are required.
        model: instead of an endpoint, fields of :class:`LocalVlm`; ``path`` is required.
        instruction: what the model is asked; readers such as DeepSeek-OCR have one of their own.
        tokens_max: length limit of a transcription.

    Returns:
        ``score`` in [0, 1]; ``exact``: 1 if the target was read in full, else 0; ``cut_off``: 1 if the
        transcription reached ``tokens_max`` (what was read until then counts); tokens and cost.

    Raises:
        RewardInputError: a prompt without quoted text, or with the one that stands for none.
        RewardSetupError: invalid settings, a refused key or model.
    """
    place = parse_vlm("ocr-vlm", endpoint, model)
    targets = [_target(prompt) for prompt in prompts]
    answers = ask_about(
        place,
        images,
        [instruction] * len(images),
        tokens_max=tokens_max,
        read=lambda answer: reading(answer.text),
    )
    scores = [
        each if isinstance(each, SampleError) else legibility(target, each[1])
        for target, each in zip(targets, answers, strict=True)
    ]
    return {
        "score": scores,
        "exact": [float(score == 1.0) for score in scores],
        "cut_off": [float(not isinstance(each, SampleError) and each[0].cut_off) for each in answers],
        **token_curves(place, answers),
    }


def check(
    prompts: Sequence[str],
    metadata: Sequence[Mapping[str, Any]],
    *,
    endpoint: Mapping[str, Any] | None = None,
    model: Mapping[str, Any] | None = None,
    instruction: str = INSTRUCTION,
    tokens_max: int = 512,
) -> None:
    """Parse every prompt's target, and ask once about a picture with text.

    Raises:
        RewardInputError: a prompt without quoted text.
        RewardSetupError: invalid settings, or the model reads nothing.
    """
    for prompt in prompts:
        _target(prompt)
    try_out(
        parse_vlm("ocr-vlm", endpoint, model),
        example_picture("sign"),
        instruction,
        tokens_max=tokens_max,
        read=_something,
    )


def scored_by(
    *,
    endpoint: Mapping[str, Any] | None = None,
    model: Mapping[str, Any] | None = None,
    deadline_s: float | None = None,
) -> str:
    """What answers; checks an endpoint's settings, and loads a model."""
    return parse_vlm("ocr-vlm", endpoint, model, deadline_s).identity


def tiny(folder: Path) -> dict[str, Any]:
    """Write a small random model that reads a letter; the params that name it."""
    from spotlight_rewards.models.tiny_vlm import save_tiny_vlm

    words = string.ascii_uppercase
    return {"endpoint": None, "model": {"path": str(save_tiny_vlm(folder, words))}}


def _target(prompt: str) -> str:
    target = target_of(prompt, "ocr-vlm")
    if target.strip("[].") == normalized(NO_TEXT).strip("[]"):
        raise RewardInputError(
            f"ocr-vlm reward: the prompt {prompt!r} asks for {NO_TEXT.strip('[]')!r}, the model's answer "
            "where there is no text: the score could only be 0. Remove the prompt."
        )
    return target


def reading(answer: str) -> str:
    """What an answer says was read; empty if it says that there is no text."""
    bare = " ".join(answer.strip(" \n\t[].").casefold().split())
    return "" if bare == NO_TEXT.strip("[]") else answer.strip()


def _something(answer: ChatAnswer) -> None:
    if not reading(answer.text):
        raise SampleError(
            f"it read nothing ({answer.text!r}) in a picture of the word OPEN; expected it. Correct "
            "params.instruction, or use another model."
        )
