"""The reward ``flicker``: a video whose brightness does not jump back and forth.

Per cell of a grid, mean luma L of each frame; the flicker is the mean over cells and frames of
|L[t-1] - 2 L[t] + L[t+1]| / 4. Brightness that is a level above and a level below its mean in turn has a
flicker of 1; a fade at a constant pace has none. Things that move through cells add a little.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from spotlight_rewards.reward import Image, RewardInputError, best_with, takes_videos
from spotlight_rewards.reward_facts import Example, Reads, RewardFacts
from spotlight_rewards.video.videos import luma, require_frames

FACTS = RewardFacts(
    runs_on="CPU",
    typical=(-3, 0),
    reads=Reads.NOTHING,
    example=Example("moving", score=(-8, 0)),
)


@best_with(batch_size=16)
@takes_videos
def flicker(
    images: Sequence[Image],
    prompts: Sequence[str],
    metadata: Sequence[Mapping[str, Any]],
    *,
    cells: int = 8,
) -> list[float]:
    """Score every video with minus its flicker, in levels of 255; a still video has 0.

    Args:
        images: videos, uint8 [frames, height, width, 3], three frames or more.
        prompts: ignored.
        metadata: ignored.
        cells: of the grid's side.

    Raises:
        ValueError: a video is too short or smaller than the grid.
        RewardInputError: ``cells`` is no number of cells.
    """
    check([], [], cells=cells)
    return [0.0 - _flicker(video, cells) for video in images]


def check(prompts: Sequence[str], metadata: Sequence[Mapping[str, Any]], *, cells: int = 8) -> None:
    """Raise RewardInputError for an invalid ``cells``."""
    if isinstance(cells, bool) or not isinstance(cells, int) or cells < 1:
        raise RewardInputError(f"flicker reward: params.cells is {cells!r}; expected 1 or more")


def _flicker(video: Image, cells: int) -> float:
    require_frames("flicker", video, 3)
    if cells > min(video.shape[1:3]):
        raise ValueError(
            f"flicker reward: a video has {video.shape[1]} x {video.shape[2]} pixels; expected at least "
            f"params.cells={cells} on each side"
        )
    total = luma(video).astype(np.float64)
    for axis in (1, 2):
        total = np.add.reduceat(total, np.arange(cells) * video.shape[axis] // cells, axis)
    # Sums over cells, not means: each counts by its size.
    there_and_back = np.abs(np.diff(total, 2, axis=0)).sum((1, 2)).mean()
    return float(there_and_back / (4 * video.shape[1] * video.shape[2]))
