"""How many images are decoded together. Free of torch, for use in plans."""

from __future__ import annotations

from spotlight.models.media import MediaSize

_DECODED_PIXELS = 1 << 18
"""Decoding needs far more memory per pixel than denoising (about 8 GB per megapixel at Qwen-Image's width)
and gains nothing beyond this: one image of 512x512, or 256 of 32x32.
"""


def decode_batch(size: MediaSize, max_batch: int) -> int:
    """Samples per decoder call, 1 to ``max_batch``, within the pixel limit."""
    return max(1, min(max_batch, _DECODED_PIXELS // size.pixels))
