"""Reward for compressible images, a common smoke test.

Source: Black et al., "Training Diffusion Models with Reinforcement Learning" (DDPO), arXiv 2305.13301.
"""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from typing import Any

from PIL import Image as PILImage

from spotlight_rewards.reward import Image
from spotlight_rewards.reward_facts import Example, Reads, RewardFacts

FACTS = RewardFacts(
    runs_on="CPU",
    typical=(-400, -20),
    reads=Reads.NOTHING,
    # How many bytes libjpeg writes differs a little between its versions.
    example=Example("shapes", score=(-8, -2)),
)


def jpeg_size(
    images: Sequence[Image],
    prompts: Sequence[str],
    metadata: Sequence[Mapping[str, Any]],
    *,
    quality: int = 95,
) -> list[float]:
    """Score every image with minus its size as a JPEG file, in kB (1,000 bytes).

    Args:
        images: uint8 [height, width, 3].
        prompts: ignored.
        metadata: ignored.
        quality: 1 to 95.

    Raises:
        ValueError: ``quality`` out of range.
    """
    if not 1 <= quality <= 95:
        raise ValueError(f"jpeg_size reward: quality is {quality!r}; expected a whole number from 1 to 95")
    return [-_encoded_bytes(image, quality) / 1000 for image in images]


def _encoded_bytes(image: Image, quality: int) -> int:
    buffer = io.BytesIO()
    PILImage.fromarray(image).save(buffer, format="JPEG", quality=quality)
    return buffer.tell()
