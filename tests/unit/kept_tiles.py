"""The pictures of an evaluation that a run keeps."""

from __future__ import annotations

from spotlight.store.images import Tile, read_tile
from spotlight.store.picture_names import tiles_of
from spotlight.store.run_directory import RunPaths


def read_tiles(paths: RunPaths, iteration: int) -> list[Tile]:
    """In grid order."""
    return [read_tile(paths, path) for path in tiles_of(paths, iteration)]
