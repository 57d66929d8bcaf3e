"""The reward ``ocr-onnx``: PP-OCR from ``rapidocr``'s wheel reads a picture, the prompt quotes the target.

Target and formula are those of ``ocr`` (``reading/legibility.py``). Needs neither torch nor a download.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from hashlib import sha256
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from spotlight_rewards.reading.legibility import missing_scripts, reading_curves, target_of
from spotlight_rewards.reward import Curves, Image, Reward, RewardInputError, RewardSetupError, best_with
from spotlight_rewards.reward_facts import Example, Reads, RewardFacts

if TYPE_CHECKING:
    from spotlight_rewards.reading.onnx_reader import OnnxDetector, OnnxRecognizer

DETECTOR, RECOGNIZER = "PP-OCRv6_det_small.onnx", "PP-OCRv6_rec_small.onnx"
FACTS = RewardFacts(
    runs_on="CPU",
    typical=(0, 1),
    reads=Reads.TEXT,
    weights=("PP-OCRv6 small, in the wheel of rapidocr",),
    licence="Apache-2.0",
    example=Example("sign", score=(1, 1), prompt='a sign that says "OPEN"', wrong_prompt='a sign: "JAZZ"'),
)
_INSTALL = "Install it: pip install 'spotlight-rewards[ocr-onnx]'"


@best_with(batch_size=16, cores_per_process=2)
@dataclass(frozen=True, kw_only=True)
class OcrOnnx(Reward):
    """Score how much of each prompt's quoted text PP-OCR reads in its image; no download.

    Prompts have their target in straight double quotes. ``score`` in [0, 1]; ``exact``: 1 if the target was
    read in full, else 0; ``lines``, the number read: 0 throughout tells a broken reader from a weak model.

    Attributes:
        find: look for text first; false: every picture is one line of text, which is read as it is.
        threads: of a process. Several processes (``rewards[].replicas``) use cores better.
        batch_size: pictures, and strips of text, in a pass.
    """

    find: bool = True
    threads: int = 1
    batch_size: int = 8

    def __call__(
        self, images: Sequence[Image], prompts: Sequence[str], metadata: Sequence[Mapping[str, Any]]
    ) -> Curves:
        """Raises ValueError: a model's outputs are not finite."""
        finder, reader = self._models
        targets = [self._target(prompt, reader) for prompt in prompts]
        from spotlight_rewards.reading.text_lines import read_pictures

        if finder is None:
            found = [[line] if line.text else [] for line in reader.read(images)]
        else:
            found = read_pictures(finder, reader, images)
        return reading_curves(targets, [[line.text for line in lines] for lines in found])

    def check(self, prompts: Sequence[str], metadata: Sequence[Mapping[str, Any]]) -> None:
        """Load the models and parse every prompt's target."""
        _, reader = self._models
        for prompt in prompts:
            self._target(prompt, reader)

    def scored_by(self) -> str:
        """Which detector and recognizer, each as ``FILE@DIGEST``."""
        names = (DETECTOR, RECOGNIZER) if self.find else (RECOGNIZER,)
        folder = _models_folder()
        return " ".join(f"{name}@{sha256((folder / name).read_bytes()).hexdigest()[:12]}" for name in names)

    def _target(self, prompt: str, reader: OnnxRecognizer) -> str:
        target = target_of(prompt, "ocr-onnx")
        if lacking := missing_scripts(target, reader.known):
            raise RewardInputError(
                f"ocr-onnx reward: the prompt {prompt!r} asks for {' and '.join(lacking)} characters, of "
                "which PP-OCRv6 small has none: the score could only be 0. Use ocr with params.language, or "
                "ocr-neural with a recognizer for that script, or remove the prompt."
            )
        return target

    @cached_property
    def _models(self) -> tuple[OnnxDetector | None, OnnxRecognizer]:
        for name in ("threads", "batch_size"):
            if not isinstance(value := getattr(self, name), int) or value < 1:
                raise RewardSetupError(f"ocr-onnx reward: params.{name} is {value!r}; expected 1 or more")
        folder = _models_folder()
        try:
            from spotlight_rewards.reading.onnx_reader import OnnxDetector, OnnxRecognizer
        except ImportError as error:
            raise RewardSetupError(
                f"ocr-onnx reward: a Python package cannot be imported ({error}). {_INSTALL}"
            ) from error
        finder = OnnxDetector(folder / DETECTOR, self.threads, self.batch_size) if self.find else None
        return finder, OnnxRecognizer(folder / RECOGNIZER, self.threads, self.batch_size)


def _models_folder() -> Path:
    """Where rapidocr's wheel has its models, without importing it: that takes half a second."""
    found = find_spec("rapidocr")
    if found is None or found.origin is None:
        raise RewardSetupError(f"ocr-onnx reward: the Python package 'rapidocr' is missing. {_INSTALL}")
    folder = Path(found.origin).parent / "models"
    for name in (DETECTOR, RECOGNIZER):
        if not (folder / name).is_file():
            raise RewardSetupError(
                f"ocr-onnx reward: {folder} has no {name}; expected the models of rapidocr 3.10. {_INSTALL}"
            )
    return folder
