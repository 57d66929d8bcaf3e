"""The reward ``geneval2``: Soft-TIFA, the probability of the right answer to a question per atom of a prompt.

Formula: GenEval 2 (arXiv 2512.16853). A prompt's metadata carries its atoms in the official format,
``vqa_list: [[question, answer], ...]``; none are shipped.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np

from spotlight_rewards.endpoints.chat import (
    ChatAnswer,
    Vlm,
    ask_about,
    curve_of,
    merged,
    parse_vlm,
    token_curves,
    try_out,
)
from spotlight_rewards.endpoints.json_client import COSTS
from spotlight_rewards.reward import (
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
def geneval2(
    images: Sequence[Image],
    prompts: Sequence[str],
    metadata: Sequence[Mapping[str, Any]],
    *,
    endpoint: Mapping[str, Any] | None = None,
    model: Mapping[str, Any] | None = None,
    mean: Mean = "geometric",
    instruction: str = INSTRUCTION,
) -> dict[str, list[float | SampleError]]:
    """Score how probable a VLM finds the right answer to each question about a picture.

    Args:
        images: uint8 [height, width, 3].
        prompts: used in error messages only.
        metadata: each with ``vqa_list``, its atoms as ``[question, answer]``.
        endpoint: fields of :class:`ChatEndpoint`, which must offer logprobs.
        model: instead of an endpoint, fields of :class:`LocalVlm`; ``path`` is required.
        mean: over a picture's atoms, for ``score``; GenEval 2 reports both.
        instruction: contains ``{question}``.

    Returns:
        ``score`` in [0, 1], ``arithmetic`` and ``geometric`` mean, ``weakest`` atom; tokens and cost.

    Raises:
        RewardInputError: metadata without atoms.
        RewardSetupError: invalid settings, a refused key or model, or logprobs that are not offered.
    """
    place = _settings(endpoint, model, mean, instruction)
    atoms = [atoms_of(prompt, record) for prompt, record in zip(prompts, metadata, strict=True)]
    # One batch for all samples. The answer to look for differs by atom, so it is looked up afterwards.
    answers = ask_about(
        place,
        [image for image, own in zip(images, atoms, strict=True) for _ in own],
        [instruction.replace("{question}", question) for own in atoms for question, _ in own],
        tokens_max=1,
        read=_first_token,
        logprobs=True,
    )
    pairs = iter(zip((answer for own in atoms for _, answer in own), answers, strict=True))
    found = [merged([_judged(*next(pairs)) for _ in own]) for own in atoms]
    arithmetic = curve_of(found, lambda atoms: float(np.mean(atoms)))
    geometric = curve_of(found, geometric_mean)
    return {
        "score": list(geometric if mean == "geometric" else arithmetic),
        "arithmetic": arithmetic,
        "geometric": geometric,
        "weakest": curve_of(found, min),
        **token_curves(place, found),
    }


def check(
    prompts: Sequence[str],
    metadata: Sequence[Mapping[str, Any]],
    *,
    endpoint: Mapping[str, Any] | None = None,
    model: Mapping[str, Any] | None = None,
    mean: Mean = "geometric",
    instruction: str = INSTRUCTION,
) -> None:
    """Read every prompt's atoms, and ask one question about a gray picture."""
    place = _settings(endpoint, model, mean, instruction)
    for prompt, record in zip(prompts, metadata, strict=True):
        atoms_of(prompt, record)
    question = instruction.replace("{question}", "Is this picture gray?")
    gray = np.full((64, 64, 3), 128, np.uint8)
    try_out(place, gray, question, tokens_max=1, read=_first_token, logprobs=True)


def scored_by(
    *,
    endpoint: Mapping[str, Any] | None = None,
    model: Mapping[str, Any] | None = None,
    deadline_s: float | None = None,
) -> str:
    """What answers; checks an endpoint's settings, and loads a model."""
    return parse_vlm("geneval2", endpoint, model, deadline_s).identity


def tiny(folder: Path) -> dict[str, Any]:
    """Write a small random model that says Yes, No or a number; the params that name it."""
    from spotlight_rewards.models.tiny_vlm import save_tiny_vlm

    words = ["Yes", "No", *_NUMBERS]
    return {"endpoint": None, "model": {"path": str(save_tiny_vlm(folder, words))}}


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


def _judged(
    answer: str, found: tuple[ChatAnswer, Mapping[str, float]] | SampleError
) -> tuple[ChatAnswer, float] | SampleError:
    if isinstance(found, SampleError):
        return found
    try:
        return found[0], answer_probability(found[1], answer)
    except SampleError as error:
        return error


def _settings(
    endpoint: Mapping[str, Any] | None, model: Mapping[str, Any] | None, mean: Mean, instruction: str
) -> Vlm:
    if mean not in get_args(Mean):
        raise RewardSetupError(
            f"geneval2 reward: params.mean is {mean!r}; expected {' or '.join(get_args(Mean))}."
        )
    if "{question}" not in instruction:
        raise RewardSetupError(
            f"geneval2 reward: params.instruction is {instruction!r}; expected {{question}} in it."
        )
    return parse_vlm("geneval2", endpoint, model)
