"""PaddleOCR's models in ONNX: one finds text, one reads it. Imports opencv and onnxruntime.

rapidocr's wheel brings the models; its own pipeline takes one picture a call, pads strips to 320 pixels and
enlarges every picture to 736. Here pictures and strips of one size share a pass, at their own size: readings
do not depend on what else is in a batch.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import onnxruntime
from numpy.typing import NDArray

from spotlight_rewards.models.batches import same_shape
from spotlight_rewards.reading.legibility import KnownCharacters
from spotlight_rewards.reading.text_lines import Line, decoded
from spotlight_rewards.reward import Image, RewardSetupError

_DIVISOR_PX = 32
_SIDE_MIN_PX, _SIDE_MAX_PX = 224, 960
"""Pictures whose longer side is smaller are enlarged to be looked at, larger ones reduced. Words of 6 to 40
pixels in pictures of 64 to 512: ``benchmarks/ocr_readers.py``.
"""
_HEIGHT_PX, _WIDTH_MAX_PX = 48, 3200
"""Of a strip of text as the recognizer reads it."""


class OnnxDetector:
    """Finds boxes of text. Raises RewardSetupError if the file cannot be loaded."""

    def __init__(self, path: Path, threads: int, batch_size: int) -> None:
        self._session = _session(path, threads)
        self._batch_size = batch_size

    def maps(self, images: Sequence[Image]) -> list[NDArray[np.float32]]:
        """Text probability of every pixel [height, width], each near its picture's size."""
        found: dict[int, NDArray[np.float32]] = {}
        for part in same_shape([image.shape for image in images], self._batch_size):
            pixels = np.stack([self._prepared(images[index]) for index in part])
            found |= zip(part, _run(self._session, pixels)[:, 0], strict=True)
        return [found[index] for index in range(len(images))]

    def _prepared(self, image: Image) -> NDArray[np.float32]:
        height, width = image.shape[:2]
        longer = max(height, width)
        ratio = min(max(longer, _SIDE_MIN_PX), _SIDE_MAX_PX) / longer
        tall, wide = (max(round(side * ratio / _DIVISOR_PX), 1) * _DIVISOR_PX for side in (height, width))
        return _normalized(cv2.resize(image, (wide, tall)))


class OnnxRecognizer:
    """Reads strips of text. Raises RewardSetupError if the file cannot be loaded or lists no characters."""

    def __init__(self, path: Path, threads: int, batch_size: int) -> None:
        self._session = _session(path, threads)
        self._batch_size = batch_size
        listed = self._session.get_modelmeta().custom_metadata_map.get("character", "").splitlines()
        classes = self._session.get_outputs()[0].shape[-1]
        # The first class is no character, the last a space.
        self._characters = ["", *listed, " "]
        if len(self._characters) != classes:
            raise RewardSetupError(
                f"ocr-onnx reward: {path} lists {len(listed)} characters; expected {classes} - 2, as its "
                f"model has. {_REMEDY}"
            )
        self.known = KnownCharacters.of(self._characters[1:])

    def read(self, strips: Sequence[Image]) -> list[Line]:
        """The text of every strip [height, width, 3]."""
        prepared = [_normalized(cv2.resize(strip, _strip_size(strip))) for strip in strips]
        found: dict[int, Line] = {}
        for part in same_shape([each.shape for each in prepared], self._batch_size):
            rows = _run(self._session, np.stack([prepared[index] for index in part]))
            found |= zip(part, (decoded(row, self._characters) for row in rows), strict=True)
        return [found[index] for index in range(len(strips))]


_REMEDY = "Install it again: pip install --force-reinstall 'spotlight-rewards[ocr-onnx]'"


def _strip_size(strip: Image) -> tuple[int, int]:
    height, width = strip.shape[:2]
    wide = math.ceil(_HEIGHT_PX * width / height / 8) * 8  # few sizes, so that strips share a pass
    return min(wide, _WIDTH_MAX_PX), _HEIGHT_PX


def _normalized(image: NDArray[Any]) -> NDArray[np.float32]:
    """[3, height, width], blue first, from -1 to 1."""
    return np.ascontiguousarray(image[..., ::-1].transpose(2, 0, 1), np.float32) / 127.5 - 1


def _session(path: Path, threads: int) -> onnxruntime.InferenceSession:
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads, options.inter_op_num_threads = threads, 1
    try:
        return onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    except Exception as error:  # onnxruntime's own classes derive from RuntimeError or nothing in common
        raise RewardSetupError(f"ocr-onnx reward: {path} cannot be loaded: {error}. {_REMEDY}") from error


def _run(session: onnxruntime.InferenceSession, pixels: NDArray[np.float32]) -> NDArray[Any]:
    (found,) = session.run(None, {session.get_inputs()[0].name: pixels})
    if not np.isfinite(found).all():
        raise ValueError("PP-OCR returned numbers that are not finite; is its file damaged?")
    return np.asarray(found)
