"""The pictures of an evaluation as trackers take them, read from the run's ``images/tiles``."""

from __future__ import annotations

import io
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from PIL import Image, ImageSequence

from spotlight.store.images import TileNote, read_tile_notes
from spotlight.store.run_directory import RunPaths


@dataclass(frozen=True, slots=True)
class ShownMedia:
    """A picture, or a video, of an evaluation.

    Attributes:
        name: the same at every evaluation for the same prompt and seed; a part of a file's name.
        caption: prompt and score.
        content: a PNG file, or of a video an animated GIF.
    """

    name: str
    caption: str
    content: bytes
    kind: Literal["png", "gif"]
    size: tuple[int, int]

    def write_to(self, folder: Path) -> str:
        """Write the file; returns its path."""
        path = folder / f"{self.name}.{self.kind}"
        path.write_bytes(self.content)
        return str(path)


def shown_media(paths: RunPaths, iteration: int) -> tuple[ShownMedia, ...]:
    """What was kept of an evaluation, in the order of its grid."""
    return tuple(_shown(note) for note in read_tile_notes(paths, iteration))


def _shown(note: TileNote) -> ShownMedia:
    name, caption = note.path.stem.rpartition("-")[2], f"{note.score:.3f}  {note.caption}"
    with Image.open(note.path) as image:
        if getattr(image, "n_frames", 1) == 1:
            return ShownMedia(name, caption, note.path.read_bytes(), "png", image.size)
        first, *others = [each.convert("RGB") for each in ImageSequence.Iterator(image)]
        buffer = io.BytesIO()
        duration_ms = image.info.get("duration", 100)
        first.save(buffer, "GIF", save_all=True, append_images=others, duration=duration_ms, loop=0)
    return ShownMedia(name, caption, buffer.getvalue(), "gif", first.size)
