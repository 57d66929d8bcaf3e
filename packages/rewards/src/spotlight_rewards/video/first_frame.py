"""The reward ``first-frame``: does a video made from a picture begin with that picture?

Structural similarity (Wang et al., IEEE TIP 2004: Gaussian of 11 pixels and sigma 1.5, K = .01 and .03) of
the first frame and the first of the prompt's ``references``, scaled to the video's size as diffusers'
pipelines do. 1: the same.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image as PILImage
from scipy.ndimage import correlate1d

from spotlight_rewards.originals import original_of
from spotlight_rewards.reward import Image, best_with, reads_files, takes_videos
from spotlight_rewards.reward_facts import Example, Reads, RewardFacts
from spotlight_rewards.video.videos import luma, require_frames

FACTS = RewardFacts(
    runs_on="CPU",
    typical=(0.5, 1),
    reads=Reads.METADATA,
    example=Example(
        "moving", score=(0.1, 0.95), prompt="a red circle, moving", files={"reference": "shapes"}
    ),
)
_LEVELS, _RADIUS, _SIGMA = 255.0, 5, 1.5
_C1, _C2 = (0.01 * _LEVELS) ** 2, (0.03 * _LEVELS) ** 2
_PSNR_MAX_DB = 100.0


@best_with(batch_size=16)
@reads_files
@takes_videos
def first_frame(
    images: Sequence[Image], prompts: Sequence[str], metadata: Sequence[Mapping[str, Any]]
) -> dict[str, list[float]]:
    """Score how alike each video's first frame and its prompt's reference picture are.

    Args:
        images: videos, uint8 [frames, height, width, 3].
        prompts: used in error messages only.
        metadata: per video ``references``, paths of pictures, of which the first counts; or ``reference``.

    Returns:
        ``score``, the mean structural similarity (-1 to 1, of the same pictures 1), and ``psnr_db``, at most
        100.

    Raises:
        RewardInputError: no reference, or it cannot be read.
        ValueError: a sample is no video.
    """
    curves: dict[str, list[float]] = {"score": [], "psnr_db": []}
    for video, prompt, record in zip(images, prompts, metadata, strict=True):
        require_frames("first-frame", video, 1)
        original = original_of("first-frame", prompt, record)
        wanted = luma(_scaled(original, video.shape[2], video.shape[1]))
        found = luma(video[0])
        curves["score"].append(ssim(found, wanted))
        curves["psnr_db"].append(_psnr_db(found, wanted))
    return curves


def check(prompts: Sequence[str], metadata: Sequence[Mapping[str, Any]]) -> None:
    """Raise RewardInputError for the first prompt without a reference that can be read."""
    for prompt, record in zip(prompts, metadata, strict=True):
        original_of("first-frame", prompt, record)


def ssim(one: NDArray[np.float32], other: NDArray[np.float32]) -> float:
    """Mean structural similarity of two pictures' luma, [height, width]."""
    x, y = one.astype(np.float64), other.astype(np.float64)
    mean_x, mean_y = _blurred(x), _blurred(y)
    of_x, of_y = _blurred(x * x) - mean_x**2, _blurred(y * y) - mean_y**2
    of_both = _blurred(x * y) - mean_x * mean_y
    light = (2 * mean_x * mean_y + _C1) / (mean_x**2 + mean_y**2 + _C1)
    return float((light * (2 * of_both + _C2) / (of_x + of_y + _C2)).mean())


def _blurred(picture: NDArray[np.float64]) -> NDArray[np.float64]:
    at = np.arange(-_RADIUS, _RADIUS + 1)
    weights = np.exp(-(at**2) / (2 * _SIGMA**2))
    weights /= weights.sum()
    for axis in (0, 1):
        picture = correlate1d(picture, weights, axis, mode="reflect")
    return picture


def _psnr_db(one: NDArray[np.float32], other: NDArray[np.float32]) -> float:
    error = float(((one - other) ** 2).mean())
    return _PSNR_MAX_DB if error == 0 else min(_PSNR_MAX_DB, 10 * math.log10(_LEVELS**2 / error))


def _scaled(picture: Image, width: int, height: int) -> Image:
    if picture.shape[:2] == (height, width):
        return picture
    scaled = PILImage.fromarray(picture).resize((width, height), PILImage.Resampling.LANCZOS)
    return np.asarray(scaled)
