"""The reward ``ocr-neural``: PP-OCR finds and reads the text of a picture, the prompt quotes the target.

Target and formula are those of ``ocr`` (``reading/legibility.py``). Starts without torch and opencv, which
its models import.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from spotlight_rewards.reading.legibility import missing_scripts, reading_curves, target_of
from spotlight_rewards.reward import Curves, Image, Reward, RewardInputError, RewardSetupError, best_with
from spotlight_rewards.reward_facts import Example, Reads, RewardFacts
from spotlight_rewards.reward_registry import require_package

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
@dataclass(frozen=True, kw_only=True)
class OcrNeural(Reward):
    """Score how much of each prompt's quoted text PP-OCR reads in its image.

    Prompts have their target in straight double quotes. ``score`` in [0, 1]; ``exact``: 1 if the target was
    read in full, else 0; ``lines``, the number read: 0 throughout tells a broken reader from a weak model.

    Attributes:
        detector: hub id or directory of a PP-OCR detection model in transformers' format.
        recognizer: the same of a recognition model.
        device: ``auto`` (a GPU if there is one), ``cpu``, ``cuda`` or ``cuda:INDEX``.
        batch_size: pictures, and strips of text, in a forward.
    """

    detector: str = DETECTOR
    recognizer: str = RECOGNIZER
    device: str = "auto"
    batch_size: int = 8

    def __call__(
        self, images: Sequence[Image], prompts: Sequence[str], metadata: Sequence[Mapping[str, Any]]
    ) -> Curves:
        """Raises ValueError: a model's outputs are not finite."""
        finder, reader = self._models
        targets = [self._target(prompt, reader) for prompt in prompts]
        from spotlight_rewards.reading.text_lines import read_pictures

        found = read_pictures(finder, reader, images)
        return reading_curves(targets, [[line.text for line in lines] for lines in found])

    def check(self, prompts: Sequence[str], metadata: Sequence[Mapping[str, Any]]) -> None:
        """Load the models and parse every prompt's target."""
        _, reader = self._models
        for prompt in prompts:
            self._target(prompt, reader)

    def scored_by(self) -> str:
        """Load the models; which detector and recognizer, each as ``SOURCE@DIGEST`` of its weights."""
        return " ".join(model.identity for model in self._models)

    def tiny(self, folder: Path) -> dict[str, Any]:
        from spotlight_rewards.reading.tiny_pp_ocr import save_tiny_detector, save_tiny_recognizer

        detector, recognizer = save_tiny_detector(folder / "det"), save_tiny_recognizer(folder / "rec")
        return {"detector": str(detector), "recognizer": str(recognizer), "device": "auto"}

    def _target(self, prompt: str, reader: TextRecognizer) -> str:
        target = target_of(prompt, "ocr-neural")
        lacking = missing_scripts(target, reader.known)
        if lacking:
            raise RewardInputError(
                f"ocr-neural reward: the prompt {prompt!r} asks for {' and '.join(lacking)} characters, of "
                f"which the recognizer {self.recognizer!r} has none: the score could only be 0. Name one for "
                "that script in params.recognizer, or remove the prompt."
            )
        return target

    @cached_property
    def _models(self) -> tuple[TextDetector, TextRecognizer]:
        require_package("ocr-neural", "cv2", "ocr-neural")
        from spotlight_rewards.models.pretrained_model import find_device
        from spotlight_rewards.reading.pp_ocr import TextDetector, TextRecognizer

        size = self.batch_size
        if not isinstance(size, int) or size < 1:
            raise RewardSetupError(f"ocr-neural reward: batch_size is {size!r}; expected 1 or more")
        found = find_device(self.device, "ocr-neural reward: device")
        return TextDetector(self.detector, found, size), TextRecognizer(self.recognizer, found, size)
