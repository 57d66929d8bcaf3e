"""Clips of one coloured shape that moves at a constant speed over white, rendered.

Invariant: the shape stays whole and inside every frame, so that the reward ``spotlight_rewards/motion.py``
reads every render back without error.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from spotlight_rewards.motion import DIRECTIONS
from spotlight_rewards.reward import Image
from spotlight_rewards.shapes import PALETTE, coverage

SIDE_PX = 32
FRAMES = 5
SPEED_PX = 4
_SHAPE_PX = 8
_GRID_PX = 4
"""Shapes start at multiples of it, so that latents hold a shape in few ways."""


@dataclass(frozen=True, slots=True)
class Clip:
    """One clip: what moves where; left, top and side of its square box in the first frame, in pixels."""

    shape: str
    color: str
    direction: str
    left: int
    top: int
    side: int


def sample_clip(
    record: Mapping[str, Any], rng: np.random.Generator, side_px: int = SIDE_PX, *, anywhere: bool = False
) -> Clip:
    """A clip of one prompt's record in frames of ``side_px``.

    Its way leads through the middle of the frame or past it at a small distance, so that a direction looks
    alike in every clip and a tiny DiT learns it; with ``anywhere``, through any part of the frame.
    """
    (thing,) = record["include"]
    step = np.array(DIRECTIONS[record["motion"]])
    travel = SPEED_PX * (FRAMES - 1) // _GRID_PX
    along = int(step.nonzero()[0][0])
    cells = (side_px - _SHAPE_PX) // _GRID_PX + 1
    if anywhere:
        start = rng.integers(cells, size=2)
        start[along] = rng.integers(cells - travel) + (travel if step[along] < 0 else 0)
    else:
        start = np.full(2, (cells - 1) // 2) - step * (travel // 2)
        start[1 - along] += rng.integers(-1, 2)
    left, top = (int(cell) * _GRID_PX for cell in start)
    return Clip(thing["class"], thing["color"], record["motion"], left, top, _SHAPE_PX)


def render(clip: Clip, side_px: int = SIDE_PX) -> Image:
    """Draw a clip, anti-aliased: uint8 [frames, side, side, 3]."""
    canvas = np.full((FRAMES, side_px, side_px, 3), 255.0)
    alpha = coverage(clip.shape, clip.side, clip.side)[..., None]
    right, down = DIRECTIONS[clip.direction]
    for time, frame in enumerate(canvas):
        left, top = clip.left + time * SPEED_PX * right, clip.top + time * SPEED_PX * down
        box = frame[top : top + clip.side, left : left + clip.side]
        box[:] = (1 - alpha) * box + alpha * np.array(PALETTE[clip.color], dtype=np.float64)
    video: Image = np.rint(canvas).astype(np.uint8)
    return video


def render_all(
    records: Sequence[Mapping[str, Any]], seed: int, side_px: int = SIDE_PX, *, anywhere: bool = False
) -> Image:
    """One new clip per record, deterministic given the seed: uint8 [records, frames, side, side, 3]."""
    rng = np.random.default_rng(seed)
    return np.stack(
        [render(sample_clip(record, rng, side_px, anywhere=anywhere), side_px) for record in records]
    )
