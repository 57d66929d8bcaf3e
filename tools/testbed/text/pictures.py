"""Pictures of a word in one ink over white, rendered.

Letters stand in cells of 8 pixels, one column of tokens each, from the second column on. The face is
Pillow's own, bold and upright or slanted: no font need be installed.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import numpy as np
from numpy.typing import NDArray
from PIL import Image as PILImage
from PIL import ImageDraw, ImageFont

from spotlight_rewards.reward import Image
from tools.testbed.text.prompts import INKS

HEIGHT_PX, WIDTH_PX = 16, 56
CELL_PX = 8
STYLES = ("bold", "italic")
_EM_PX = 12
_FINE = 8
"""Letters are drawn this much larger, then reduced."""
_STROKE = {"bold": 4, "italic": 3}
_SLANT = {"bold": 0.0, "italic": 0.2}


def render(word: str, ink: str, style: str, down_px: int = 0) -> Image:
    """Draw a word, anti-aliased: uint8 [height, width, 3].

    Args:
        down_px: how far below the middle, which may be negative.
    """
    coverage = np.zeros((HEIGHT_PX, WIDTH_PX))
    for index, letter in enumerate(word, start=1):
        coverage[:, index * CELL_PX : (index + 1) * CELL_PX] = _glyph(letter, style)
    alpha = np.roll(coverage, down_px, axis=0)[..., None]
    picture: Image = np.rint(255 * (1 - alpha) + alpha * np.array(INKS[ink])).astype(np.uint8)
    return picture


def render_all(words: Sequence[str], inks: Sequence[str], seed: int) -> Image:
    """One picture per word, in random styles: uint8 [words, height, width, 3]."""
    rng = np.random.default_rng(seed)
    return np.stack(
        [
            render(word, ink, str(rng.choice(STYLES)), int(rng.integers(-1, 2)))
            for word, ink in zip(words, inks, strict=True)
        ]
    )


@cache
def _glyph(letter: str, style: str) -> NDArray[np.float64]:
    """Coverage of a cell: [height, CELL_PX] in [0, 1]."""
    font = ImageFont.load_default(_EM_PX * _FINE)
    wide, tall = CELL_PX * _FINE, HEIGHT_PX * _FINE
    canvas = PILImage.new("L", (wide, tall))
    left, _, right, _ = font.getbbox(letter)
    _, top, _, bottom = font.getbbox("H")
    corner = ((wide - right + left) / 2 - left, (tall - bottom + top) / 2 - top)
    ImageDraw.Draw(canvas).text(corner, letter, fill=255, font=font, stroke_width=_STROKE[style])
    shear = (1, _SLANT[style], -_SLANT[style] * tall / 2, 0, 1, 0)
    slanted = canvas.transform(
        canvas.size, PILImage.Transform.AFFINE, shear, resample=PILImage.Resampling.BICUBIC
    )
    small = slanted.resize((CELL_PX, HEIGHT_PX), PILImage.Resampling.BOX)
    return np.asarray(small, dtype=np.float64) / 255
