"""The pictures of an evaluation or of training groups as trackers take them, read from the run's ``images``.

Reduced: trackers keep a copy of all. The originals stay in the run directory.
"""

from __future__ import annotations

import io
import logging
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from PIL import Image, ImageSequence

from spotlight.store.images import DAMAGED, TileNote, read_tile_note
from spotlight.store.picture_names import TILES, TRAINING, tiles_of
from spotlight.store.run_directory import RunPaths
from spotlight_rewards.base.media_files import open_picture

log = logging.getLogger("spotlight")
_AS_IT_IS_BYTES = 48_000
PICTURE_PX, VIDEO_PX, FRAMES_MAX = 512, 256, 24


@dataclass(frozen=True, slots=True)
class ShownMedia:
    """A picture, or a video.

    Attributes:
        name: of an evaluation's the same at every one for the same prompt and seed, of a training group's
            ``0-best`` or ``0-worst``; a part of a file's name.
        caption: prompt and score; of a training group's all rewards.
        content: a PNG file as it is stored if it is small, else a JPEG; of a video an animated GIF.
    """

    name: str
    caption: str
    content: bytes
    kind: Literal["png", "jpeg", "gif"]
    size: tuple[int, int]
    folder: str = TILES

    @property
    def tag(self) -> str:
        """Where trackers show it."""
        return f"{'training_' if self.folder == TRAINING else ''}pictures/{self.name}"

    def write_to(self, folder: Path) -> str:
        """Write the file; returns its path."""
        path = folder / f"{self.name}.{self.kind}"
        path.write_bytes(self.content)
        return str(path)


def shown_media(paths: RunPaths, iteration: int, folder: str = TILES) -> tuple[ShownMedia, ...]:
    """What was kept of an iteration, in the order of its grid, without files that are damaged."""
    notes = map(read_tile_note, tiles_of(paths, iteration, folder))
    found = (_shown(note, folder) for note in notes if note is not None)
    return tuple(shown for shown in found if shown is not None)


def place_of(path: Path) -> tuple[int, str]:
    """Group of a training picture, and which of its pictures it is."""
    group, worst = divmod(int(path.stem.rpartition("-")[2]), 2)
    return group, "worst" if worst else "best"


def _shown(note: TileNote, folder: str) -> ShownMedia | None:
    """None of a damaged file: after a resume, one must not end a run that trains."""
    name, caption = note.path.stem.rpartition("-")[2], f"{note.score:.3f}  {note.caption}"
    if folder == TRAINING:
        name = "{}-{}".format(*place_of(note.path))
        told = ", ".join(f"{curve} {value:.3f}" for curve, value in note.scores.items())
        caption = f"{told}  {note.caption}"
    try:
        content, kind, size = _reduced_file(note)
    except DAMAGED as error:
        log.warning("%s: not shown to trackers, the file is damaged (%s). Delete it.", note.path, error)
        return None
    return ShownMedia(name, caption, content, kind, size, folder)


def _reduced_file(note: TileNote) -> tuple[bytes, Literal["png", "jpeg", "gif"], tuple[int, int]]:
    with open_picture(note.path) as image:
        frames = getattr(image, "n_frames", 1)
        if frames == 1 and note.path.stat().st_size <= _AS_IT_IS_BYTES:
            return note.path.read_bytes(), "png", image.size
        buffer = io.BytesIO()
        if frames == 1:
            first = reduced(image, PICTURE_PX)
            first.save(buffer, "JPEG", quality=85)
            return buffer.getvalue(), "jpeg", first.size
        every = math.ceil(frames / FRAMES_MAX)
        read = enumerate(ImageSequence.Iterator(image))
        first, *others = [reduced(each, VIDEO_PX) for at, each in read if at % every == 0]
        duration_ms = image.info.get("duration", 100) * every
        first.save(buffer, "GIF", save_all=True, append_images=others, duration=duration_ms, loop=0)
    return buffer.getvalue(), "gif", first.size


def reduced(image: Image.Image, side_px: int) -> Image.Image:
    """A copy with at most ``side_px`` a side."""
    copy = image.convert("RGB")
    copy.thumbnail((side_px, side_px))
    return copy
