"""The size of pictures and videos: a picture is a video of one frame."""

from __future__ import annotations

from dataclasses import dataclass

_DECODED_PIXELS = 1 << 18
"""Decoding needs far more memory per pixel than denoising (about 8 GB per megapixel at Qwen-Image's width)
and gains nothing beyond this: one image of 512x512, or 256 of 32x32.
"""


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

    def decoded_together(self, most: int) -> int:
        """Samples per decoder call, 1 to ``most``, within the pixel limit."""
        return max(1, min(most, _DECODED_PIXELS // self.pixels))
