"""The size of pictures and videos: a picture is a video of one frame."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class MediaSize:
    """Of a picture (one frame) or a video; must fit the family's patches (``ModelFamily.check_size``).

    Attributes:
        height, width: in pixels.
        fps: frames per second of a video; only some families' models depend on it.
    """

    height: int
    width: int
    frames: int = 1
    fps: float = 16.0

    @property
    def pixels(self) -> int:
        """Of all frames together."""
        return self.frames * self.height * self.width
