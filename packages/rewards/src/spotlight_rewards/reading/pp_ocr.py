"""PaddleOCR's models in transformers: one finds text, one reads it. Imports torch and opencv.

transformers' image processors of these models want torchvision, and stretch all strips of a batch to the
widest; here their steps are taken strip by strip, so that a reading does not depend on its batch.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from spotlight_rewards.models.batches import same_shape
from spotlight_rewards.models.pretrained_model import load_pretrained, where_from, why_not
from spotlight_rewards.reading.legibility import KnownCharacters
from spotlight_rewards.reading.text_lines import Line, decoded
from spotlight_rewards.reward import Image, RewardSetupError

_UNREAD = r"num_batches_tracked$"
_DIVISOR_PX = 32
_DETECTOR_DEFAULTS: Mapping[str, Any] = {
    "image_mean": [0.406, 0.456, 0.485],
    "image_std": [0.225, 0.224, 0.229],
    "limit_side_len": 960,
    "limit_type": "max",
    "max_side_limit": 4000,
}
_RECOGNIZER_DEFAULTS: Mapping[str, Any] = {
    "image_mean": [0.5, 0.5, 0.5],
    "image_std": [0.5, 0.5, 0.5],
    "size": {"height": 48, "width": 320},
    "max_image_width": 3200,
    "character_list": [],
}
"""What transformers' image processors assume where ``preprocessor_config.json`` is silent."""


class TextDetector:
    """Finds boxes of text. Raises RewardSetupError if its weights are missing or incomplete."""

    def __init__(self, source: str, device: torch.device, batch_size: int) -> None:
        from transformers import AutoModelForObjectDetection

        key = "ocr-neural reward: detector"
        remedy = _remedy("det")
        self._settings = read_settings(source, _DETECTOR_DEFAULTS, key, remedy)
        self._model, self.identity = load_pretrained(
            AutoModelForObjectDetection, source, key=key, remedy=remedy, unread=_UNREAD, device=device
        )
        self._device, self._batch_size = device, batch_size

    @torch.inference_mode()
    def maps(self, images: Sequence[Image]) -> list[np.ndarray]:
        """Text probability of every pixel [height, width], each near its picture's size."""
        found: dict[int, np.ndarray] = {}
        for part in same_shape([image.shape for image in images], self._batch_size):
            pixels = torch.stack([self.prepare(images[index]) for index in part])
            maps = self._model(pixel_values=pixels).last_hidden_state[:, 0].float()
            if not torch.isfinite(maps).all():
                raise ValueError("PP-OCR's detector returned numbers that are not finite; is it damaged?")
            found |= zip(part, maps.cpu().numpy(), strict=True)
        return [found[index] for index in range(len(images))]

    def prepare(self, image: Image) -> torch.Tensor:
        """[3, height, width]: scaled to multiples of 32, normalised, blue first."""
        pixels = F.interpolate(
            _tensor(image, self._device)[None],
            self.scaled(*image.shape[:2]),
            mode="bilinear",
            antialias=True,
        )[0]
        return _normalised(pixels, self._settings).flip(0)

    def scaled(self, height: int, width: int) -> tuple[int, int]:
        """The size at which a picture is looked at."""
        limit, ratio = self._settings["limit_side_len"], 1.0
        match self._settings["limit_type"]:
            case "min":
                ratio = max(1.0, limit / min(height, width))
            case "resize_long":
                ratio = limit / max(height, width)
            case _:
                ratio = min(1.0, limit / max(height, width))
        sides = [int(height * ratio), int(width * ratio)]
        if max(sides) > self._settings["max_side_limit"]:
            shrink = self._settings["max_side_limit"] / max(sides)
            sides = [int(side * shrink) for side in sides]
        tall, wide = (max(round(side / _DIVISOR_PX) * _DIVISOR_PX, _DIVISOR_PX) for side in sides)
        return tall, wide


class TextRecognizer:
    """Reads strips of text. Raises RewardSetupError if weights or characters are missing or do not fit."""

    def __init__(self, source: str, device: torch.device, batch_size: int) -> None:
        from transformers import AutoModelForTextRecognition

        key = "ocr-neural reward: recognizer"
        remedy = _remedy("rec")
        self._settings = read_settings(source, _RECOGNIZER_DEFAULTS, key, remedy)
        self._model, self.identity = load_pretrained(
            AutoModelForTextRecognition, source, key=key, remedy=remedy, unread=_UNREAD, device=device
        )
        self.characters: list[str] = self._settings["character_list"]
        classes = self._model.config.head_out_channels
        if len(self.characters) != classes:
            raise RewardSetupError(
                f"{key} is {source!r}, whose preprocessor_config.json lists {len(self.characters)} "
                f"characters; expected {classes}, as its model has. {remedy}"
            )
        self.known = KnownCharacters.of(self.characters)
        self._device, self._batch_size = device, batch_size
        # PP-OCRv5 was trained with red first and with smoothing, PP-OCRv6 as opencv does it.
        self._as_opencv = "pp_ocrv6" in self._model.config.model_type

    @torch.inference_mode()
    def read(self, strips: Sequence[Image]) -> list[Line]:
        """The text of every strip [height, width, 3]."""
        prepared = [self.prepare(strip) for strip in strips]
        found: dict[int, Line] = {}
        for part in same_shape([each.shape for each in prepared], self._batch_size):
            outputs = self._model(pixel_values=torch.stack([prepared[index] for index in part]))
            probabilities = outputs.last_hidden_state.float()
            if not torch.isfinite(probabilities).all():
                raise ValueError("PP-OCR's recognizer returned numbers that are not finite; is it damaged?")
            lines = (decoded(each, self.characters) for each in probabilities.cpu().numpy())
            found |= zip(part, lines, strict=True)
        return [found[index] for index in range(len(strips))]

    def prepare(self, strip: Image) -> torch.Tensor:
        """[3, height, width]: scaled to the model's height, normalised, padded right to its least width."""
        size = self._settings["size"]
        width = self.scaled_width(*strip.shape[:2])
        pixels = F.interpolate(
            _tensor(strip, self._device)[None],
            (size["height"], width),
            mode="bilinear",
            antialias=not self._as_opencv,
        )[0]
        if self._as_opencv:
            pixels = pixels.round().flip(0)
        return F.pad(_normalised(pixels, self._settings), (0, max(size["width"] - width, 0)))

    def scaled_width(self, height: int, width: int) -> int:
        """Width of a strip at the model's height: in proportion, up to a limit."""
        size: dict[str, int] = self._settings["size"]
        limit: int = self._settings["max_image_width"]
        most = max(int(size["height"] * width / height), size["width"])
        if most > limit:
            return limit
        return min(math.ceil(size["height"] * width / height), most)


def read_settings(source: str, defaults: Mapping[str, Any], key: str, remedy: str) -> dict[str, Any]:
    """The image processor's settings. Raises RewardSetupError."""
    from transformers.utils import cached_file

    place, options = where_from(source)
    try:
        here = options.get("local_files_only", False)
        path = cached_file(place, "preprocessor_config.json", local_files_only=here)
        written = json.loads(Path(path).read_text(encoding="utf-8"))
        if not isinstance(written, dict):
            raise ValueError(f"it holds {type(written).__name__}, no object")
    except (OSError, ValueError) as error:
        reason = why_not(error, options)
        raise RewardSetupError(
            f"{key} is {source!r}, which has no preprocessor_config.json that can be read: {reason}. {remedy}"
        ) from error
    return {name: written.get(name) or default for name, default in defaults.items()}


def _tensor(image: Image, device: torch.device) -> torch.Tensor:
    return torch.from_numpy(np.ascontiguousarray(image)).to(device).permute(2, 0, 1).float()


def _normalised(pixels: torch.Tensor, settings: Mapping[str, Any]) -> torch.Tensor:
    mean, std = (
        torch.tensor(settings[name], device=pixels.device)[:, None, None]
        for name in ("image_mean", "image_std")
    )
    return (pixels / 255 - mean) / std


def _remedy(kind: str) -> str:
    return (
        f"Name PaddlePaddle/PP-OCRv6_tiny_{kind}_safetensors (or small, medium, or PP-OCRv5_server), or a "
        "directory that `hf download` filled with it elsewhere."
    )
