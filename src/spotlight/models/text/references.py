"""Reference pictures of prompts: their files, read and opened."""

from __future__ import annotations

import io
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from spotlight_files.model_errors import ModelError
from spotlight_rewards.base.media_files import decoding, open_picture

_TURNED = (5, 6, 7, 8)
"""Orientations of Exif whose sides are exchanged."""
_RATIO_MAX = 200
"""Of a reference's sides: the processor of Qwen's text encoder takes no more."""


def read_reference(path: str) -> bytes:
    """A reference picture's file. Raises ModelError, naming it."""
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise ModelError(
            f"reference picture {path} cannot be read ({error}); expected it at this path on every machine "
            "that embeds prompts: put it on a file system that they share"
        ) from error


def open_reference(path: str) -> Any:
    """A reference as RGB, upright, as diffusers' ``load_image`` gives it. Raises ModelError, naming it."""
    from diffusers.utils import load_image

    with _opened(path) as opened:
        picture = load_image(opened)
    if not 1 / _RATIO_MAX <= picture.width / picture.height <= _RATIO_MAX:
        raise ModelError(
            f"reference picture {path} has {picture.width} x {picture.height} pixels; expected sides that "
            f"differ by a factor of at most {_RATIO_MAX}: cut it"
        )
    return picture


def reference_sides(path: str) -> tuple[int, int]:
    """(height, width) of a reference, upright, by its first bytes. Raises ModelError, naming it."""
    from PIL import ExifTags

    with _opened(path) as picture:
        width, height = picture.size
        turned = picture.getexif().get(ExifTags.Base.Orientation) in _TURNED
    return (width, height) if turned else (height, width)


@contextmanager
def _opened(path: str) -> Iterator[Any]:
    file = io.BytesIO(read_reference(path))
    try:
        with open_picture(file) as picture, decoding():
            yield picture
    except OSError as error:
        raise ModelError(f"reference picture {path} cannot be read as a picture ({error})") from error
