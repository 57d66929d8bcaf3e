"""The built-in pictures that ``spotlight rewards check`` scores, drawn when they are needed."""

from __future__ import annotations

import numpy as np
from PIL import Image as PILImage
from PIL import ImageDraw, ImageFont

from spotlight_rewards.reward import Image
from spotlight_rewards.shapes import PALETTE, coverage

_SIDE_PX = 256
_SHAPE_PX = 64
_FRAMES = 8


def example_picture(name: str) -> Image:
    """The picture of an :class:`~spotlight_rewards.reward_facts.Example`: [256, 256, 3], or a video."""
    return {"sign": _sign, "shapes": _shapes, "moving": _moving}[name]()


def _sign() -> Image:
    """A white sign with the word OPEN on a plain wall."""
    picture = PILImage.new("RGB", (_SIDE_PX, _SIDE_PX), (176, 190, 197))
    draw = ImageDraw.Draw(picture)
    draw.rectangle((24, 80, 232, 176), fill="white", outline="black", width=4)
    draw.text((128, 128), "OPEN", fill="black", font=ImageFont.load_default(64), anchor="mm")
    return np.asarray(picture)


def _shapes() -> Image:
    """A red circle left of a blue square, on white."""
    return _drawn(("circle", "red", 32), ("square", "blue", 160))


def _moving() -> Image:
    """A red circle that moves to the right, on white: [8, 256, 256, 3]."""
    return np.stack([_drawn(("circle", "red", 16 + 20 * frame)) for frame in range(_FRAMES)])


def _drawn(*shapes: tuple[str, str, int]) -> Image:
    """Shapes (shape, colour, left edge) at half height, on white."""
    picture = np.full((_SIDE_PX, _SIDE_PX, 3), 255.0)
    top = (_SIDE_PX - _SHAPE_PX) // 2
    for shape, color, left in shapes:
        covered = coverage(shape, _SHAPE_PX, _SHAPE_PX)[..., None]
        place = picture[top : top + _SHAPE_PX, left : left + _SHAPE_PX]
        place += covered * (np.array(PALETTE[color]) - place)
    return picture.round().astype(np.uint8)
