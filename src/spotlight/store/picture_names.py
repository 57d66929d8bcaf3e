"""Names of a run's pictures. Files of any other name may lie beside them; they are left alone."""

from __future__ import annotations

import re
from pathlib import Path

from spotlight.store.run_directory import RunPaths

_TILE = re.compile(r"(\d{6,})-\d{3,}\.png")
_GRID = re.compile(r"iteration-(\d{6,})\.(?:png|webp)")


def tiles_folder(paths: RunPaths) -> Path:
    return paths.images / "tiles"


def tile_path(paths: RunPaths, iteration: int, index: int) -> Path:
    return tiles_folder(paths) / f"{iteration:06d}-{index:03d}.png"


def grid_path(paths: RunPaths, iteration: int) -> Path:
    """File of an evaluation's grid; of videos, one with the suffix ``.webp`` lies beside it."""
    return paths.images / f"iteration-{iteration:06d}.png"


def stored_tiles(paths: RunPaths) -> list[tuple[int, Path]]:
    """Iteration and file of every tile, in the order of iterations and grids."""
    return _named(tiles_folder(paths), _TILE)


def stored_grids(paths: RunPaths) -> list[tuple[int, Path]]:
    return _named(paths.images, _GRID)


def tiles_of(paths: RunPaths, iteration: int) -> list[Path]:
    """Files of one evaluation's tiles, in grid order."""
    return [path for drawn_at, path in stored_tiles(paths) if drawn_at == iteration]


def _named(folder: Path, name: re.Pattern[str]) -> list[tuple[int, Path]]:
    found = ((name.fullmatch(path.name), path) for path in folder.glob("*"))
    return sorted((int(match[1]), path) for match, path in found if match)
