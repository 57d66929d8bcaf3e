"""The JPEG reward: busy pictures cost more than plain ones, in kB."""

from __future__ import annotations

import io

import numpy as np
import pytest
from PIL import Image as PILImage

from spotlight_rewards.jpeg import jpeg_size

PLAIN = np.full((64, 64, 3), 128, np.uint8)
BUSY = np.random.default_rng(0).integers(0, 256, (64, 64, 3), dtype=np.uint8)


def test_it_is_minus_the_size_of_the_file_in_kb() -> None:
    buffer = io.BytesIO()
    PILImage.fromarray(BUSY).save(buffer, format="JPEG", quality=80)
    assert jpeg_size([BUSY], ["a"], [{}], quality=80) == [-len(buffer.getvalue()) / 1000]


def test_plain_pictures_score_higher() -> None:
    plain, busy, again = jpeg_size([PLAIN, BUSY, PLAIN], ["a"] * 3, [{}] * 3)
    assert busy < plain < 0
    assert plain == again


@pytest.mark.parametrize("quality", [0, 96])
def test_a_quality_that_jpeg_does_not_have(quality: int) -> None:
    with pytest.raises(ValueError, match=f"quality is {quality}"):
        jpeg_size([PLAIN], ["a"], [{}], quality=quality)
