"""The pictures of an evaluation as trackers take them, read from the run's ``images/tiles``.

Reduced: trackers keep a copy of every evaluation's. The originals stay in the run directory.
"""

from __future__ import annotations

import io
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from PIL import Image, ImageSequence

from spotlight.store.images import TileNote, read_tile_note
from spotlight.store.picture_names import tiles_of
from spotlight.store.run_directory import RunPaths
from spotlight_rewards.base.media_files import open_picture

_AS_IT_IS_BYTES = 48_000
_PICTURE_PX, _VIDEO_PX, _FRAMES_MAX = 512, 256, 24


@dataclass(frozen=True, slots=True)
class ShownMedia:
    """A picture, or a video, of an evaluation.

    Attributes:
        name: the same at every evaluation for the same prompt and seed; a part of a file's name.
        caption: prompt and score.
        content: a PNG file as it is stored if it is small, else a JPEG; of a video an animated GIF.
    """

    name: str
    caption: str
    content: bytes
    kind: Literal["png", "jpeg", "gif"]
    size: tuple[int, int]

    def write_to(self, folder: Path) -> str:
        """Write the file; returns its path."""
        path = folder / f"{self.name}.{self.kind}"
        path.write_bytes(self.content)
        return str(path)


def shown_media(paths: RunPaths, iteration: int) -> tuple[ShownMedia, ...]:
    """What was kept of an evaluation, in the order of its grid."""
    notes = map(read_tile_note, tiles_of(paths, iteration))
    return tuple(_shown(note) for note in notes if note is not None)


def _shown(note: TileNote) -> ShownMedia:
    name, caption = note.path.stem.rpartition("-")[2], f"{note.score:.3f}  {note.caption}"
    with open_picture(note.path) as image:
        frames = getattr(image, "n_frames", 1)
        if frames == 1 and note.path.stat().st_size <= _AS_IT_IS_BYTES:
            return ShownMedia(name, caption, note.path.read_bytes(), "png", image.size)
        buffer = io.BytesIO()
        if frames == 1:
            first = _reduced(image, _PICTURE_PX)
            first.save(buffer, "JPEG", quality=85)
            return ShownMedia(name, caption, buffer.getvalue(), "jpeg", first.size)
        every = math.ceil(frames / _FRAMES_MAX)
        read = enumerate(ImageSequence.Iterator(image))
        first, *others = [_reduced(each, _VIDEO_PX) for at, each in read if at % every == 0]
        duration_ms = image.info.get("duration", 100) * every
        first.save(buffer, "GIF", save_all=True, append_images=others, duration=duration_ms, loop=0)
    return ShownMedia(name, caption, buffer.getvalue(), "gif", first.size)


def _reduced(image: Image.Image, side_px: int) -> Image.Image:
    copy = image.convert("RGB")
    copy.thumbnail((side_px, side_px))
    return copy
