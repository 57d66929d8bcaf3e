"""A reward that misbehaves on the prompts whose metadata say how; by itself it is never below 1."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from spotlight_rewards.reward import Gradient, Image, Reward, takes_groups

GATE = "REWARD_FUNCTIONS_WAIT_FOR"
"""Environment variable: the file that must be there before ``moody`` scores; unset: none."""


def moody(
    images: Sequence[Image], prompts: Sequence[str], metadata: Sequence[Mapping[str, Any]]
) -> list[float]:
    """1 + the picture's brightness, or what the prompt's mood makes of it."""
    while (gate := os.environ.get(GATE)) and not Path(gate).exists():
        time.sleep(0.05)
    values: list[float] = []
    for index, (image, each) in enumerate(zip(images, metadata, strict=True)):
        mood = each.get("mood")
        if mood == "raise":
            raise ValueError("cannot bear this picture")
        if mood == "hang":
            time.sleep(60)
        again = prompts[index] in prompts[:index]
        second_rank = os.environ.get("RANK") == "1"
        if mood == "nan" or (mood == "nan but first" and again) or (mood == "nan on rank 1" and second_rank):
            values.append(math.nan)
        else:
            values.append(1 + float(image.mean()) / 255)
    return values


def chatty(
    images: Sequence[Image], prompts: Sequence[str], metadata: Sequence[Mapping[str, Any]]
) -> list[float]:
    """The pictures' brightness, and a word on it."""
    print(f"scoring {len(images)} pictures")
    return [float(image.mean()) / 255 for image in images]


def unhurried(
    images: Sequence[Image], prompts: Sequence[str], metadata: Sequence[Mapping[str, Any]]
) -> list[float]:
    """The pictures' brightness, slowly enough for a killer to come in time."""
    time.sleep(0.4 * len(images))
    return [1 + float(image.mean()) / 255 for image in images]


@takes_groups
def brightest(
    images: Sequence[Image], prompts: Sequence[str], metadata: Sequence[Mapping[str, Any]]
) -> list[float]:
    """How many others of the group are darker."""
    levels = [float(image.mean()) for image in images]
    return [float(sum(other < level for other in levels)) for level in levels]


@dataclass(frozen=True, kw_only=True)
class Redder(Reward):
    """How much more red than green a picture has, in [-1, 1]: linear in its pixels."""

    def __call__(
        self, images: Sequence[Image], prompts: Sequence[str], metadata: Sequence[Mapping[str, Any]]
    ) -> list[float]:
        return [
            float((image / 255 * slope).sum())
            for image, slope in zip(images, map(_slope, images), strict=True)
        ]

    def gradient(
        self, images: Sequence[Image], prompts: Sequence[str], metadata: Sequence[Mapping[str, Any]]
    ) -> list[Gradient]:
        return [_slope(image) for image in images]


def _slope(image: Image) -> Gradient:
    height, width, _ = image.shape
    return np.full(image.shape, [1, -1, 0], np.float32) / (height * width)
