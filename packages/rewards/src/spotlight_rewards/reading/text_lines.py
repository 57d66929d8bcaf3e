"""Lines of text in pictures, whichever of PaddleOCR's runtimes finds and reads them. Imports opencv."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from spotlight_rewards.reading.text_boxes import cut_out, find_boxes
from spotlight_rewards.reward import Image

CONFIDENCE_MIN = 0.5
"""Of a line, the mean over its letters; PaddleOCR drops lines below it."""


@dataclass(frozen=True, slots=True)
class Line:
    """One strip of text as read, and the mean confidence of its letters."""

    text: str
    confidence: float


class Detector(Protocol):
    """Finds text."""

    def maps(self, images: Sequence[Image]) -> list[NDArray[np.float32]]:
        """Text probability of every pixel [height, width], each near its picture's size."""


class Recognizer(Protocol):
    """Reads text."""

    def read(self, strips: Sequence[Image]) -> list[Line]:
        """The text of every strip [height, width, 3]."""


def read_pictures(detector: Detector, recognizer: Recognizer, images: Sequence[Image]) -> list[list[Line]]:
    """Every picture's lines in reading order, those of low confidence left out."""
    boxes = [
        find_boxes(found, *image.shape[:2])
        for found, image in zip(detector.maps(images), images, strict=True)
    ]
    lines = iter(
        recognizer.read(
            [cut_out(image, box) for image, own in zip(images, boxes, strict=True) for box in own]
        )
    )
    read = [[next(lines) for _ in own] for own in boxes]
    return [[line for line in own if line.confidence >= CONFIDENCE_MIN] for own in read]


def decoded(probabilities: NDArray[Any], characters: Sequence[str]) -> Line:
    """Greedy CTC.

    Args:
        probabilities: [steps, characters].
        characters: of which the first is no character.
    """
    index = probabilities.argmax(-1)
    kept = index != 0
    kept[1:] &= index[1:] != index[:-1]
    if not kept.any():
        return Line("", 0.0)
    text = "".join(characters[each] for each in index[kept].tolist())
    return Line(text, float(probabilities.max(-1)[kept].mean()))
