"""Names of a run's pictures. Files of any other name may lie beside them; they are left alone."""

from __future__ import annotations

import re
from pathlib import Path

from spotlight.store.run_directory import RunPaths

TILES, TRAINING = "tiles", "training"
"""Folders of single pictures: of evaluations, and of training groups (best, worst, best, ...)."""
_TILE = re.compile(r"(\d{6,})-\d{3,}\.png")
_GRID = re.compile(r"iteration-(\d{6,})\.(?:png|webp)")


def tiles_folder(paths: RunPaths, folder: str = TILES) -> Path:
    return paths.images / folder


def tile_path(paths: RunPaths, iteration: int, index: int, folder: str = TILES) -> Path:
    return tiles_folder(paths, folder) / f"{iteration:06d}-{index:03d}.png"


def grid_path(paths: RunPaths, iteration: int) -> Path:
    """File of an evaluation's grid; of videos, one with the suffix ``.webp`` lies beside it."""
    return paths.images / f"iteration-{iteration:06d}.png"


def stored_tiles(paths: RunPaths, folder: str = TILES) -> list[tuple[int, Path]]:
    """Iteration and file of every tile, in the order of iterations and grids."""
    return _named(tiles_folder(paths, folder), _TILE)


def stored_grids(paths: RunPaths) -> list[tuple[int, Path]]:
    return _named(paths.images, _GRID)


def tiles_of(paths: RunPaths, iteration: int, folder: str = TILES) -> list[Path]:
    """Files of one iteration's tiles, in grid order."""
    return [path for drawn_at, path in stored_tiles(paths, folder) if drawn_at == iteration]


def _named(folder: Path, name: re.Pattern[str]) -> list[tuple[int, Path]]:
    found = ((name.fullmatch(path.name), path) for path in folder.glob("*"))
    return sorted((int(match[1]), path) for match, path in found if match)
