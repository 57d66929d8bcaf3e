"""Pictures for a page in one file: small enough that those of whole evaluations fit."""

from __future__ import annotations

import base64
import io
from collections.abc import Mapping
from contextlib import suppress

from PIL import Image, ImageSequence

from spotlight_dashboard.figures import Json
from spotlight_dashboard.run_folders import RunFolder
from spotlight_dashboard.views.gallery import FOLDERS, reference
from spotlight_dashboard.views.gallery import picture as picture_of
from spotlight_rewards.base.media_files import open_picture

PICTURE_BYTES_MAX = 24 << 20
"""Of all pictures in a file, as text."""
_AS_IT_IS_BYTES = 48 << 10
_SIDE_PX, _VIDEO_SIDE_PX, _FRAMES_MAX = 512, 256, 24
_QUALITY = 80


def embedded(content: bytes) -> str:
    """A picture as a data URI: a small file as it is, a larger one as WebP of at most 512 pixels a side.

    Videos have at most 24 frames of 256 pixels, which last as long as all of theirs.

    Raises:
        OSError: not a picture, or not a whole one.
    """
    if len(content) <= _AS_IT_IS_BYTES:
        return _uri("png", content)
    try:
        with open_picture(io.BytesIO(content), formats=("PNG",)) as image:
            return _uri("webp", _reduced(image))
    except (ValueError, SyntaxError) as error:  # what Pillow raises of damaged files
        raise OSError(f"not a picture ({error})") from error


def _reduced(image: Image.Image) -> bytes:
    total = getattr(image, "n_frames", 1)
    kept = {round(at * (total - 1) / max(1, _FRAMES_MAX - 1)) for at in range(_FRAMES_MAX)}
    side = _SIDE_PX if total == 1 else _VIDEO_SIDE_PX
    frames: list[Image.Image] = []
    lasts_ms = 0.0
    for number, frame in enumerate(ImageSequence.Iterator(image)):
        lasts_ms += frame.info.get("duration", 0)
        if number in kept:
            shown = frame.convert("RGB")
            shown.thumbnail((side, side))
            frames.append(shown)
    buffer = io.BytesIO()
    first, *others = frames
    if others:
        duration = max(1, round(lasts_ms / len(frames)))
        first.save(
            buffer, "WEBP", quality=_QUALITY, save_all=True, append_images=others, duration=duration, loop=0
        )
    else:
        first.save(buffer, "WEBP", quality=_QUALITY)
    return buffer.getvalue()


def _uri(kind: str, content: bytes) -> str:
    return f"data:image/{kind};base64,{base64.b64encode(content).decode()}"


class PictureBudget:
    """Takes pictures of evaluations and training groups for as long as they fit.

    Attributes:
        taken: data URIs by ``KIND/ITERATION/INDEX``, and ``reference/NAME``.
    """

    def __init__(self, bytes_max: int = PICTURE_BYTES_MAX) -> None:
        self._left = bytes_max
        self.taken: dict[str, str] = {}

    def take(
        self, run: RunFolder, evaluation: Json, *, share: float, whole: bool, kind: str = "picture"
    ) -> Json | None:
        """The evaluation with the pictures that fit into ``share`` of what is left, and how many do not.

        None if there is none, or, where it must be ``whole``, if some do not fit.
        """
        iteration, pictures = evaluation["iteration"], evaluation["pictures"]
        assert isinstance(iteration, int)
        assert isinstance(pictures, list)
        space = self._left * share
        found: dict[str, str] = {}
        shown = []
        for picture in pictures:
            try:
                content = picture_of(run, iteration, picture["index"], FOLDERS[kind])
                uri = None if content is None else embedded(content)
            except OSError:
                continue  # being written, or not a picture
            if uri is None:
                continue
            added = {f"{kind}/{iteration}/{picture['index']}": uri, **self._references(run, picture, found)}
            needed = sum(map(len, added.values()))
            if needed > space:
                break
            space -= needed
            found |= added
            shown.append(picture)
        left_out = len(pictures) - len(shown)
        if not shown or (whole and left_out):
            return None
        self._left -= sum(map(len, found.values()))
        self.taken |= found
        return {**evaluation, "pictures": shown, "left_out": left_out}

    def _references(self, run: RunFolder, picture: Json, met: Mapping[str, str]) -> dict[str, str]:
        """Those of a picture that are not taken yet; one that cannot be read is left out."""
        names = picture["references"]
        assert isinstance(names, list)
        found: dict[str, str] = {}
        for name in names:
            key = f"reference/{name}"
            if key not in self.taken and key not in met:
                with suppress(OSError):
                    if (content := reference(run, name)) is not None:
                        found[key] = embedded(content)
        return found
