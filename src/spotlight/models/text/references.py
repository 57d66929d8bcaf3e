"""Reference pictures of prompts: their files, read and opened."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

from spotlight_files.model_errors import ModelError
from spotlight_rewards.base.media_files import open_picture

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

    try:
        picture = load_image(open_picture(io.BytesIO(read_reference(path))))
    except (OSError, ValueError, SyntaxError) as error:
        raise ModelError(f"reference picture {path} cannot be read as a picture ({error})") from error
    if not 1 / _RATIO_MAX <= picture.width / picture.height <= _RATIO_MAX:
        raise ModelError(
            f"reference picture {path} has {picture.width} x {picture.height} pixels; expected sides that "
            f"differ by a factor of at most {_RATIO_MAX}: cut it"
        )
    return picture
