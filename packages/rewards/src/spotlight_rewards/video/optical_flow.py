"""The reward ``optical-flow``: a video in which something moves, as real things do; a still one scores least.

Flow between neighbouring frames by OpenCV's DIS (Kroeger et al., arXiv 1603.03590), forwards and backwards.

* ``magnitude_percent_per_frame``: mean length of the flow from a frame to the next, in percent of the
  picture's diagonal. The frame rate is not known here: the same motion at twice the fps is half of it.
* ``consistency``: share of pixels whose way there and back ends where it began (Sundaram et al., ECCV 2010,
  equation 5): noise and pictures that change from frame to frame have little.
* ``score``: min(magnitude / ``enough_percent_per_frame``, 1) x consistency, in [0, 1].

A guard against videos that stand still, beside a reward for what is shown: a camera that pans scores 1, too.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from spotlight_rewards.reward import Curves, Image, Reward, RewardSetupError, best_with, takes_videos
from spotlight_rewards.reward_facts import Example, Reads, RewardFacts
from spotlight_rewards.reward_registry import require_package
from spotlight_rewards.video.videos import luma, require_frames

FACTS = RewardFacts(
    runs_on="CPU",
    typical=(0, 1),
    reads=Reads.NOTHING,
    example=Example("moving", score=(0.05, 1)),
)
Flow = NDArray[np.float32]
"""[height, width, 2]: pixels to the right and down."""

_SIDE_MAX, _SIDE_MIN = 256, 16
_RELATIVE, _ABSOLUTE_PX = 0.01, 0.5
"""Of equation 5."""


@best_with(batch_size=8, cores_per_process=2)
@takes_videos
@dataclass(frozen=True, kw_only=True)
class OpticalFlow(Reward):
    """Score videos by how much moves in them, and how consistently; still videos and noise score least.

    ``score`` in [0, 1], ``magnitude_percent_per_frame`` and ``consistency``.

    Attributes:
        enough_percent_per_frame: magnitude from which more motion is worth no more.
    """

    enough_percent_per_frame: float = 1.0

    def __call__(
        self, images: Sequence[Image], prompts: Sequence[str], metadata: Sequence[Mapping[str, Any]]
    ) -> Curves:
        """Raises ValueError: no video, or one of less than two frames or 16 pixels a side."""
        measured = [motion_of(video) for video in images]
        return {
            "score": [min(size / self.enough_percent_per_frame, 1.0) * agreed for size, agreed in measured],
            "magnitude_percent_per_frame": [size for size, _ in measured],
            "consistency": [agreed for _, agreed in measured],
        }

    def check(self, prompts: Sequence[str], metadata: Sequence[Mapping[str, Any]]) -> None:
        """Raise RewardSetupError: an invalid parameter, or OpenCV is not installed."""
        enough = self.enough_percent_per_frame
        if isinstance(enough, bool) or not isinstance(enough, int | float) or not 0 < enough < math.inf:
            raise RewardSetupError(
                f"optical-flow reward: params.enough_percent_per_frame is {enough!r}; expected above 0"
            )
        require_package("optical-flow", "cv2", "video")

    def scored_by(self) -> str:
        """The version of OpenCV, whose flow may differ a little from another's."""
        require_package("optical-flow", "cv2", "video")
        import cv2

        return f"OpenCV {cv2.__version__}"


def motion_of(video: Image) -> tuple[float, float]:
    """Mean magnitude and consistency over all pairs of neighbouring frames."""
    require_frames("optical-flow", video, 2)
    frames = _small(video)
    pairs = [_of_pair(one, other) for one, other in pairwise(frames)]
    magnitude, consistency = np.mean(pairs, axis=0)
    return float(magnitude), float(consistency)


def _small(video: Image) -> list[NDArray[np.uint8]]:
    import cv2

    height, width = video.shape[1:3]
    scale = min(1.0, _SIDE_MAX / max(height, width))
    size = round(width * scale), round(height * scale)
    if min(size) < _SIDE_MIN:
        raise ValueError(
            f"optical-flow reward: a video has {height} x {width} pixels; expected at least {_SIDE_MIN} on "
            f"each side, once the longer one is at most {_SIDE_MAX}"
        )
    frames = luma(video).round().astype(np.uint8)
    if scale == 1:
        return list(frames)
    return [np.asarray(cv2.resize(each, size, interpolation=cv2.INTER_AREA), np.uint8) for each in frames]


def _of_pair(one: NDArray[np.uint8], other: NDArray[np.uint8]) -> tuple[float, float]:
    there, back = flow_between(one, other), flow_between(other, one)
    height, width = one.shape
    size = np.linalg.norm(there, axis=-1)
    magnitude = 100 * float(size.mean()) / math.hypot(height, width)
    rows, columns = np.mgrid[:height, :width].astype(np.float32)
    to_right, to_below = columns + there[..., 0], rows + there[..., 1]
    inside = (to_right >= 0) & (to_right <= width - 1) & (to_below >= 0) & (to_below <= height - 1)
    if not inside.any():
        return magnitude, 0.0
    import cv2

    returned = np.asarray(cv2.remap(back, to_right, to_below, cv2.INTER_LINEAR), np.float32)
    left = np.sum((there + returned) ** 2, axis=-1)
    allowed = _RELATIVE * (np.sum(there**2, axis=-1) + np.sum(returned**2, axis=-1)) + _ABSOLUTE_PX
    return magnitude, float((left < allowed)[inside].mean())


def flow_between(one: NDArray[np.uint8], other: NDArray[np.uint8]) -> Flow:
    """From each pixel of the first frame to where it is in the second; both [height, width]."""
    import cv2

    dis = cv2.DISOpticalFlow.create(cv2.DISOPTICAL_FLOW_PRESET_MEDIUM)
    return np.asarray(dis.calc(one, other, None), np.float32)  # type: ignore[call-overload]
