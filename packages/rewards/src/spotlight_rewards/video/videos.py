"""What rewards for videos share: frames as luma, and refusals."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from spotlight_rewards.reward import Image

_LUMA = np.array([0.299, 0.587, 0.114], np.float32)
"""Rec. ITU-R BT.601, as JPEG and OpenCV weigh colours."""


def require_frames(name: str, video: Image, least: int) -> None:
    """Raise ValueError unless it is a video of so many frames."""
    if video.ndim != 4 or len(video) < least:
        raise ValueError(
            f"{name} reward: a sample is {video.dtype} {list(video.shape)}; expected a video, uint8 [frames, "
            f"height, width, 3] of at least {least} frames. Set rollout.frames"
        )


def luma(pictures: Image) -> NDArray[np.float32]:
    """[..., 3] uint8 to [...] in levels, 0 to 255."""
    found: NDArray[np.float32] = pictures.astype(np.float32) @ _LUMA
    return found
