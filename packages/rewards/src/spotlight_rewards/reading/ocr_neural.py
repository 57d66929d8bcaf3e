"""The reward ``ocr-neural``: PP-OCR finds and reads the text of a picture, the prompt quotes the target.

Target and formula are those of ``ocr`` (``reading/legibility.py``). Starts without torch and opencv, which
its models import.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from spotlight_rewards.reading.legibility import legibility, missing_scripts, target_of
from spotlight_rewards.reward import Image, RewardInputError, RewardSetupError, best_with
from spotlight_rewards.reward_facts import Example, Reads, RewardFacts

if TYPE_CHECKING:
    from spotlight_rewards.reading.pp_ocr import TextDetector, TextRecognizer

DETECTOR = "PaddlePaddle/PP-OCRv6_small_det_safetensors"
RECOGNIZER = "PaddlePaddle/PP-OCRv6_small_rec_safetensors"
FACTS = RewardFacts(
    runs_on="CPU",
    typical=(0, 1),
    reads=Reads.TEXT,
    weights=(DETECTOR, RECOGNIZER),
    licence="Apache-2.0",
    example=Example("sign", score=(1, 1), prompt='a sign that says "OPEN"', wrong_prompt='a sign: "JAZZ"'),
)


@best_with(batch_size=16)
def ocr_neural(
    images: Sequence[Image],
    prompts: Sequence[str],
    metadata: Sequence[Mapping[str, Any]],
    *,
    detector: str = DETECTOR,
    recognizer: str = RECOGNIZER,
    device: str = "auto",
    batch_size: int = 8,
) -> dict[str, list[float]]:
    """Score how much of each prompt's quoted text PP-OCR reads in its image.

    Args:
        images: uint8 [height, width, 3].
        prompts: each with its target in straight double quotes.
        metadata: ignored.
        detector: hub id or directory of a PP-OCR detection model in transformers' format.
        recognizer: the same of a recognition model.
        device: ``auto`` (a GPU if there is one), ``cpu``, ``cuda`` or ``cuda:INDEX``.
        batch_size: pictures, and strips of text, in a forward.

    Returns:
        ``score`` in [0, 1]; ``exact``: 1 if the target was read in full, else 0; ``lines``, the number read:
        0 throughout tells a broken reader from a weak model.

    Raises:
        RewardInputError: a prompt without quoted text, or in a script that the recognizer lacks.
        RewardSetupError: a model or opencv is missing, or the device cannot be used.
        ValueError: a model's outputs are not finite.
    """
    finder, reader = _models(detector, recognizer, device, batch_size)
    targets = [_target(prompt, recognizer, reader) for prompt in prompts]
    from spotlight_rewards.reading.pp_ocr import read_pictures

    found = read_pictures(finder, reader, images)
    scores = [
        legibility(target, "\n".join(line.text for line in lines))
        for target, lines in zip(targets, found, strict=True)
    ]
    return {
        "score": scores,
        "exact": [float(score == 1.0) for score in scores],
        "lines": [float(len(lines)) for lines in found],
    }


def check(
    prompts: Sequence[str],
    metadata: Sequence[Mapping[str, Any]],
    *,
    detector: str = DETECTOR,
    recognizer: str = RECOGNIZER,
    device: str = "auto",
    batch_size: int = 8,
) -> None:
    """Load the models and parse every prompt's target. Raises as :func:`ocr_neural` does."""
    _, reader = _models(detector, recognizer, device, batch_size)
    for prompt in prompts:
        _target(prompt, recognizer, reader)


def scored_by(
    *, detector: str = DETECTOR, recognizer: str = RECOGNIZER, device: str = "auto", batch_size: int = 8
) -> str:
    """Load the models; which detector and which recognizer, each as ``SOURCE@DIGEST`` of its weights."""
    return " ".join(model.identity for model in _models(detector, recognizer, device, batch_size))


def tiny(folder: Path) -> dict[str, Any]:
    """Write a small random detector and recognizer; the params that name them."""
    from spotlight_rewards.reading.tiny_pp_ocr import save_tiny_detector, save_tiny_recognizer

    detector, recognizer = save_tiny_detector(folder / "det"), save_tiny_recognizer(folder / "rec")
    return {"detector": str(detector), "recognizer": str(recognizer), "device": "auto"}


def _target(prompt: str, recognizer: str, reader: TextRecognizer) -> str:
    target = target_of(prompt, "ocr-neural")
    lacking = missing_scripts(target, reader.known)
    if lacking:
        raise RewardInputError(
            f"ocr-neural reward: the prompt {prompt!r} asks for {' and '.join(lacking)} characters, of which "
            f"the recognizer {recognizer!r} has none: the score could only be 0. Name one for that script in "
            "params.recognizer, or remove the prompt."
        )
    return target


@lru_cache(maxsize=1)
def _models(
    detector: str, recognizer: str, device: str, batch_size: int
) -> tuple[TextDetector, TextRecognizer]:
    try:
        import cv2  # noqa: F401
    except ImportError as error:
        raise RewardSetupError(
            f"ocr-neural reward: the Python package 'cv2' cannot be imported ({error}). "
            "Install it: pip install 'spotlight-rewards[ocr-neural]'"
        ) from error
    from spotlight_rewards.models.pretrained_model import find_device
    from spotlight_rewards.reading.pp_ocr import TextDetector, TextRecognizer

    if not isinstance(batch_size, int) or batch_size < 1:
        raise RewardSetupError(f"ocr-neural reward: batch_size is {batch_size!r}; expected 1 or more")
    found = find_device(device, "ocr-neural reward: device")
    return TextDetector(detector, found, batch_size), TextRecognizer(recognizer, found, batch_size)
