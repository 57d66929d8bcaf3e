"""How many pictures are decoded together. Imports no torch: plans ask too."""

from __future__ import annotations

_DECODED_PIXELS = 1 << 20
"""Decoding holds far more a pixel than denoising (at Qwen-Image's width some 8 GB a megapixel), and gains
nothing from more pictures than this: one of 1024x1024, or 1024 of 32x32."""


def decode_batch(height: int, width: int, max_batch: int) -> int:
    """Pictures decoded in one call: as many as the bound on pixels allows, 1 to ``max_batch``."""
    return max(1, min(max_batch, _DECODED_PIXELS // (height * width)))
