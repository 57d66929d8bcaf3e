"""Reward for videos of one coloured shape on white that moves in the direction that was asked for.

Every frame goes through the detector of ``shapes.py``. A frame shows where the shape is only if it
holds a single object, so blinking, filling the canvas or a second shape never counts as movement.

* ``strict``: 1 if every frame holds one object of the colour that was asked for, most of them the right
  shape, every step between two frames goes the right way, and the path is long and straight enough; else 0.
* ``graded``: in [0, 1], for training: ``appearance`` x ``movement``. Blank and still videos score 0.

Deterministic; no torch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, get_args

import numpy as np
from numpy.typing import NDArray

from spotlight_rewards.geneval.requirements import MetadataFormat, Requirement, Requirements
from spotlight_rewards.reward import Image, RewardInputError, takes_videos
from spotlight_rewards.reward_facts import Example, Reads, RewardFacts
from spotlight_rewards.shapes import (
    PALETTE,
    SHAPES,
    DetectedObject,
    TrainOn,
    detect,
    graded_score,
    require_one_each,
)

DIRECTIONS: Mapping[str, tuple[int, int]] = {"left": (-1, 0), "right": (1, 0), "up": (0, -1), "down": (0, 1)}
"""(right, down) per step."""

FACTS = RewardFacts(
    runs_on="CPU",
    typical=(0, 1),
    reads=Reads.METADATA,
    example=Example(
        "moving",
        score=(1, 1),
        prompt="a red circle moving to the right",
        metadata={"include": [{"class": "circle", "color": "red", "count": 1}], "motion": "right"},
    ),
)

_FORMAT = MetadataFormat("motion", SHAPES, PALETTE, count_max=1)
_TRAVEL_MIN = 1 / 4  # of the frame's side along the direction, over the whole video
_STEP_MIN = 1 / 3  # strict: of the steady step that covers it
_ACROSS_MAX = 1 / 2  # strict: displacement across the direction, per displacement along it
_ACROSS_FULL, _ACROSS_ZERO = 1 / 4, 1.0  # graded: full and no score by the same quotient


@dataclass(frozen=True, slots=True)
class Movement:
    """How a shape moved, by the direction that was asked for.

    Attributes:
        steps: between neighbouring frames, along the direction; 1 is the steady step that goes far enough. 0
            where one of the two frames does not hold a single object.
        across: displacement across the direction from the first frame to the last, divided by that along it;
            infinite if it did not advance.
    """

    steps: NDArray[np.float64]
    across: float

    @property
    def strict(self) -> bool:
        """Far enough, straight enough, and never back."""
        far = float(self.steps.mean()) >= 1 and bool((self.steps >= _STEP_MIN).all())
        return far and self.across <= _ACROSS_MAX

    @property
    def graded(self) -> float:
        """In [0, 1]; a jump counts as one step."""
        progress = float(np.clip(self.steps, -1, 1).mean())
        straight = (_ACROSS_ZERO - self.across) / (_ACROSS_ZERO - _ACROSS_FULL)
        return max(progress, 0.0) * min(max(straight, 0.0), 1.0)


@takes_videos
def motion(
    images: Sequence[Image],
    prompts: Sequence[str],
    metadata: Sequence[Mapping[str, Any]],
    *,
    train_on: TrainOn = "graded",
) -> dict[str, list[float]]:
    """Score videos of one moving shape.

    Args:
        images: videos, uint8 [frames, height, width, 3], at least two frames and 24 pixels per side.
        prompts: used in error messages only.
        metadata: per video GenEval's ``include`` with a single object, and ``motion``, one of
            :data:`DIRECTIONS`.
        train_on: which of the two scores becomes ``score``.

    Returns:
        ``score``, ``strict`` (0 or 1), ``graded``, and its factors ``appearance`` and ``movement`` (0 to 1).

    Raises:
        RewardInputError: unknown ``train_on``, or an invalid record (names prompt and field).
        ValueError: lengths differ, or a video has the wrong type or size.
    """
    require_one_each(images, prompts, metadata, "videos")
    check(prompts, metadata, train_on=train_on)
    curves: dict[str, list[float]] = {"strict": [], "graded": [], "appearance": [], "movement": []}
    for video, prompt, record in zip(images, prompts, metadata, strict=True):
        wanted, direction = _parse(prompt, record)
        frames = _detect(video)
        moved = movement(frames, direction, video.shape[1:3])
        appearance = float(np.mean([graded_score(found, wanted) for found in frames]))
        curves["strict"].append(float(_shows(frames, wanted.include[0]) and moved.strict))
        curves["appearance"].append(appearance)
        curves["movement"].append(moved.graded)
        curves["graded"].append(appearance * moved.graded)
    return {"score": list(curves[train_on]), **curves}


def check(
    prompts: Sequence[str], metadata: Sequence[Mapping[str, Any]], *, train_on: TrainOn = "graded"
) -> None:
    """Raise :class:`RewardInputError` for invalid settings or the first prompt that cannot be scored."""
    if train_on not in get_args(TrainOn):
        raise RewardInputError(
            f"motion reward: train_on is {train_on!r}; expected one of {', '.join(get_args(TrainOn))}"
        )
    for prompt, record in zip(prompts, metadata, strict=True):
        _parse(prompt, record)


def movement(frames: Sequence[Sequence[DetectedObject]], direction: str, size: tuple[int, int]) -> Movement:
    """How the single object of these frames moved.

    Args:
        frames: what was detected in each, two or more.
        size: (height, width) of a frame.
    """
    right, down = DIRECTIONS[direction]
    places = np.array([_centre(found) for found in frames])
    steps = np.diff(places, axis=0)
    side = size[1] if right else size[0]
    steady = _TRAVEL_MIN * side / len(steps)
    seen = places[~np.isnan(places[:, 0])]
    moved = seen[-1] - seen[0] if len(seen) else np.zeros(2)
    along, across = float(moved @ (right, down)), abs(float(moved @ (down, right)))
    return Movement(
        np.nan_to_num(steps @ np.array((right, down)) / steady), across / along if along > 0 else np.inf
    )


def _shows(frames: Sequence[Sequence[DetectedObject]], need: Requirement) -> bool:
    """A single object of the right colour in every frame, of the right shape in most of them.

    What moves is often drawn blurred.
    """
    alike = all(len(found) == 1 and need.color in (None, found[0].color) for found in frames)
    return alike and 2 * sum(found[0].shape == need.name for found in frames) > len(frames)


def _centre(found: Sequence[DetectedObject]) -> tuple[float, float]:
    if len(found) != 1:
        return np.nan, np.nan
    left, top, right, bottom = found[0].box
    return (left + right) / 2, (top + bottom) / 2


def _detect(video: Image) -> list[list[DetectedObject]]:
    if video.ndim != 4 or len(video) < 2:
        raise ValueError(
            f"motion reward: a sample is {video.dtype} {list(video.shape)}; expected a video, uint8 [frames, "
            "height, width, 3] with two frames or more. Set rollout.frames"
        )
    return [detect(frame) for frame in video]


def _parse(prompt: str, record: Mapping[str, Any]) -> tuple[Requirements, str]:
    wanted = _FORMAT.parse(prompt, record)
    if len(wanted.include) != 1 or wanted.exclude:
        raise _FORMAT.error(prompt, "include", record.get("include"), "one object, and no 'exclude'")
    direction = record.get("motion")
    if not isinstance(direction, str) or direction not in DIRECTIONS:
        raise _FORMAT.error(prompt, "motion", direction, f"one of {', '.join(DIRECTIONS)}")
    return wanted, direction
