"""Image grids of a run: the same held-out prompts at every evaluation, and a before-after comparison.

    images/iteration-000040.png       each prompt with its images and their scores
    images/tiles/000040-003.png       one unscaled image, with caption and score as PNG text
    images/training/000040-003.png    one image of a training group, with all rewards: best, worst, best, ...
    images/references/*.png           pictures that prompts are about, shown beside their results
    images/before-after.png           drawn from two iterations' tiles
    images/progress.png               the same images at several iterations

Of videos, the pages show some frames side by side, and a page of the same name that ends in .webp plays at
the videos' speed; a tile is an animated PNG.

A resumed run removes the images of the iterations that it repeats (:func:`drop_pictures`).
"""

from __future__ import annotations

import hashlib
import io
import json
import logging
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain, groupby, islice, repeat
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageSequence, PngImagePlugin

from spotlight.store.picture_names import (
    TILES,
    TRAINING,
    grid_path,
    stored_grids,
    stored_tiles,
    tile_path,
    tiles_folder,
    tiles_of,
)
from spotlight.store.run_directory import RunPaths
from spotlight.store.store_errors import NothingToCompareError
from spotlight_rewards.base.file_errors import StoreError, storage_errors
from spotlight_rewards.base.files import open_regular, write_atomically
from spotlight_rewards.base.media_files import FILE_PIXELS, open_picture
from spotlight_rewards.base.picture_page import (
    BEFORE_AFTER,
    BETTER,
    FAINT,
    FPS,
    WORSE,
    Block,
    Cell,
    Strip,
    as_png,
    cells_of,
    frames_of,
    picture_of,
    reduced,
    reference_cells,
    write_page,
    write_strips,
)

log = logging.getLogger("spotlight")

_FPS_MIN = 0.001
_CELLS_MAX = 256
"""Of one page: if each is as large as a page shows it, 50 million pixels, and more are not shown again."""
DAMAGED = (OSError, LookupError, ValueError, ArithmeticError, SyntaxError)
"""What Pillow raises of damaged files, and what others may have written about a picture."""


@dataclass(frozen=True, slots=True)
class Tile:
    """One image: [height, width, 3], sRGB, or a video [frames, ...]; ``caption`` is its prompt, and
    ``references`` the pictures that the prompt is about.

    Attributes:
        member: which of its prompt's seeds it has; None: unknown.
        rollout: that made it; empty: not told.
        scores: all of them by curve, where they are told.
    """

    picture: NDArray[np.uint8]
    caption: str
    score: float
    fps: float = FPS
    references: tuple[NDArray[np.uint8], ...] = ()
    member: int | None = None
    rollout: str = ""
    scores: Mapping[str, float] = field(default_factory=dict)

    @property
    def prompt(self) -> tuple[str, ...]:
        """Equal for tiles of one prompt."""
        return (self.caption, *map(_reference_name, self.references))


def write_grid(
    paths: RunPaths, iteration: int, tiles: Sequence[Tile | None], *, columns: int, title: str
) -> Path:
    """Draw one evaluation's grid, and save each image unscaled as a tile; returns the grid's path.

    Args:
        tiles: grouped by prompt; ``columns`` per prompt. None: one that is missing, whose place in the names
            of files stays free, so that a place has the same prompt and seed at every evaluation.

    Raises:
        ValueError: no images, or one is not uint8 [height, width, 3] or [frames, height, width, 3].
        StoreError: the disk is full or not writable.
    """
    present = [tile for tile in tiles if tile is not None]
    _require_pictures(present)
    blocks = []
    for _, members in groupby(present, key=lambda tile: tile.prompt):
        each = list(members)
        shown = reference_cells(each[0].references)
        cells = [Cell(tile.picture, f"{tile.score:.2f}", FAINT) for tile in each]
        blocks += [
            Block(each[0].caption, (*shown, *cells[i : i + columns])) for i in range(0, len(cells), columns)
        ]
    path = grid_path(paths, iteration)
    with storage_errors("cannot write the pictures", paths.images):
        keep_tiles(paths, iteration, tiles)
        write_page(path, title, blocks, present[0].fps)
    return path


def drop_pictures(paths: RunPaths, *, resume_at: int) -> None:
    """Remove the images of iterations from ``resume_at`` on. Raises StoreError."""
    with storage_errors("cannot remove undone pictures", paths.images):
        for iteration, path in (*stored_tiles(paths), *stored_tiles(paths, TRAINING), *stored_grids(paths)):
            if iteration >= resume_at:
                path.unlink()


def drawn_iterations(paths: RunPaths, folder: str = TILES) -> list[int]:
    return sorted({iteration for iteration, _ in stored_tiles(paths, folder)})


def read_tile(paths: RunPaths, path: Path) -> Tile:
    """Raises StoreError for a file that is not a tile."""
    try:
        with open_picture(path) as image:
            caption, score = image.info["caption"], float(image.info["score"])
            fps = float(image.info.get("fps", FPS))
            if not fps >= _FPS_MIN:
                raise ValueError(f"it is to play {fps:g} frames a second")
            frames = _played(image, fps)
            media = frames[0] if len(frames) == 1 else np.stack(frames)
            names = image.info.get("references", "").split()
            shown = tuple(picture_of(reference_path(paths, name)) for name in names)
            return Tile(media, caption, score, fps, shown, _member(image))
    except DAMAGED as error:
        raise StoreError(f"{path}: not a picture of this run ({error!r}). Delete it.") from error


def _member(image: Image.Image) -> int | None:
    return int(image.info["member"]) if "member" in image.info else None


def _played(image: Image.Image, fps: float) -> list[NDArray[np.uint8]]:
    """A picture, or a video's frames: equal ones in succession are stored as one that lasts longer."""
    seen = (
        repeat(np.asarray(frame.convert("RGB")), max(1, round(frame.info.get("duration", 0) * fps / 1000)))
        for frame in ImageSequence.Iterator(image)
    )
    most = FILE_PIXELS // (image.width * image.height)
    frames = list(islice(chain.from_iterable(seen), most + 1))
    if len(frames) > most:
        raise ValueError(f"it lasts for more than {most} frames")
    return frames


@dataclass(frozen=True, slots=True)
class TileNote:
    """A stored image without its pixels; ``rollout`` and ``scores`` of training groups only, ``references``
    the names of :func:`reference_path`, ``member`` as of :class:`Tile`.
    """

    path: Path
    caption: str
    score: float
    rollout: str = ""
    scores: Mapping[str, float] = field(default_factory=dict)
    references: tuple[str, ...] = ()
    member: int | None = None

    @property
    def prompt(self) -> tuple[str, ...]:
        """Equal for tiles of one prompt."""
        return (self.caption, *self.references)


def read_tile_note(path: Path) -> TileNote | None:
    """A tile without decoding it; None for a file that is no tile: it is being written, or not ours."""
    try:
        with open_regular(path) as file, open_picture(file, formats=("PNG",)) as image:
            known = {name: float(value) for name, value in json.loads(image.info.get("scores", "{}")).items()}
            rollout = image.info.get("rollout", "")
            about = tuple(image.info.get("references", "").split())
            caption, score = image.info["caption"], float(image.info["score"])
            return TileNote(path, caption, score, rollout, known, about, _member(image))
    except (*DAMAGED, TypeError, AttributeError, RecursionError):
        return None


def write_comparison(paths: RunPaths, *, before: int, after: int, title: str) -> Path:
    """Draw two evaluations side by side: as many pairs as :data:`_CELLS_MAX` lets.

    Raises:
        NothingToCompareError: no common prompt.
        StoreError: the disk is full or not writable.
    """
    pairs = _common_tiles(paths, (before, after))
    path = paths.images / BEFORE_AFTER
    with storage_errors("cannot write the pictures", paths.images):
        write_page(path, title, [_pair(old, new) for old, new in pairs], pairs[0][1].fps)
    return path


def write_progress(paths: RunPaths, iterations: Sequence[int], *, rows: int, title: str) -> Path:
    """Draw an image of up to ``rows`` prompts at several iterations, the first that all of them have.

    Raises:
        NothingToCompareError: no common prompt.
        StoreError: the disk is full or not writable.
    """
    shown = _common_tiles(paths, iterations, rows)
    strips = [
        Strip(
            tiles[0].caption,
            tuple(
                (tile.picture, f"{iteration}:  {tile.score:.2f}")
                for iteration, tile in zip(iterations, tiles, strict=True)
            ),
            tiles[0].references,
        )
        for tiles in shown
    ]
    path = paths.images / "progress.png"
    with storage_errors("cannot write the pictures", paths.images):
        write_strips(path, title, strips, fps=shown[0][0].fps)
    return path


def _common_tiles(
    paths: RunPaths, iterations: Sequence[int], rows: int | None = None
) -> list[tuple[Tile, ...]]:
    """Of prompts and seeds that every iteration has, its tile of each, no larger than a page shows it.

    Args:
        rows: at most so many prompts, each with one seed; None: what :data:`_CELLS_MAX` lets of all.

    Raises:
        NothingToCompareError: no common prompt.
    """
    notes = ([read_tile_note(path) for path in tiles_of(paths, iteration)] for iteration in iterations)
    drawn = [_by_prompt(filter(None, each)) for each in notes]
    common = [
        [
            tuple(tiles[prompt][seed] for tiles in drawn)
            for seed in first
            if all(seed in tiles.get(prompt, ()) for tiles in drawn)
        ]
        for prompt, first in drawn[0].items()
    ]
    each = None if rows is None else 1
    found = chain.from_iterable(islice(_read(paths, seeds), each) for seeds in common)
    if (first := next(found, None)) is None:
        raise NothingToCompareError(
            f"{tiles_folder(paths)}: iterations {', '.join(map(str, iterations))} have no prompt in common; "
            f"there are pictures of iterations {drawn_iterations(paths)}."
        )
    if rows is None:
        cells = sum(cells_of(tile.picture) for tile in first) + len(first[-1].references)
        rows = max(1, _CELLS_MAX // cells)
        if (number := sum(map(len, common))) > rows:
            log.warning("%s shows %d of %d pairs", BEFORE_AFTER, rows, number)
    return [first, *islice(found, rows - 1)]


def _read(paths: RunPaths, seeds: Iterable[tuple[TileNote, ...]]) -> Iterator[tuple[Tile, ...]]:
    """Those that can be read: a picture that was lost must not end a run that is trained."""
    for notes in seeds:
        try:
            yield tuple(_reduced(read_tile(paths, note.path)) for note in notes)
        except StoreError as error:
            log.warning("left out of the comparison: %s", error)


def _reduced(tile: Tile) -> Tile:
    picture = reduced(tile.picture)
    fps = tile.fps * len(frames_of(picture)) / len(frames_of(tile.picture))
    return replace(tile, picture=picture, fps=fps)


def _reference_name(picture: NDArray[np.uint8]) -> str:
    content = hashlib.sha256(repr(picture.shape).encode() + picture.tobytes())
    return f"{content.hexdigest()[:16]}.png"


def reference_path(paths: RunPaths, name: str) -> Path:
    """Where a tile's reference is; ValueError if a name or a link leads elsewhere: others may write tiles."""
    folder = _references_folder(paths)
    found = Path(os.path.realpath(folder / name))
    if found.parent != Path(os.path.realpath(folder)):
        raise ValueError(f"the reference {name[:100]!r} is none of this run's")
    return found


def _references_folder(paths: RunPaths) -> Path:
    return paths.images / "references"


def _by_prompt(tiles: Iterable[TileNote]) -> dict[tuple[str, ...], dict[int, TileNote]]:
    """By prompt and seed; where the seed is unknown, in turn."""
    found: dict[tuple[str, ...], dict[int, TileNote]] = {}
    for tile in tiles:
        of_prompt = found.setdefault(tile.prompt, {})
        of_prompt[len(of_prompt) if tile.member is None else tile.member] = tile
    return found


def _pair(old: Tile, new: Tile) -> Block:
    change = new.score - old.score
    colour = FAINT if abs(change) < 0.005 else BETTER if change > 0 else WORSE
    cells = (
        *reference_cells(new.references),
        Cell(old.picture, f"before  {old.score:.2f}", FAINT),
        Cell(new.picture, f"after  {new.score:.2f}", colour),
    )
    return Block(new.caption, cells)


def _require_pictures(tiles: Sequence[Tile]) -> None:
    if not tiles:
        raise ValueError("no pictures to draw")
    for tile in tiles:
        picture = tile.picture
        if picture.dtype != np.uint8 or picture.ndim not in (3, 4) or picture.shape[-1] != 3:
            found = f"{picture.dtype} {list(picture.shape)}"
            raise ValueError(
                f"picture of {tile.caption!r} is {found}, expected uint8 [height, width, 3] or "
                "[frames, height, width, 3]"
            )


def keep_tiles(paths: RunPaths, iteration: int, tiles: Sequence[Tile | None], folder: str = TILES) -> None:
    """Save each image unscaled in place of an iteration's earlier ones. Raises OSError."""
    tiles_folder(paths, folder).mkdir(exist_ok=True)
    for stale in tiles_of(paths, iteration, folder):
        stale.unlink()
    for index, tile in enumerate(tiles):
        if tile is None:
            continue
        notes = PngImagePlugin.PngInfo()
        notes.add_itxt("caption", tile.caption)
        notes.add_itxt("score", repr(float(tile.score)))
        if tile.member is not None:
            notes.add_itxt("member", str(tile.member))
        if tile.rollout:
            notes.add_itxt("rollout", tile.rollout)
            notes.add_itxt("scores", json.dumps(dict(tile.scores)))
        if tile.references:
            notes.add_itxt("references", " ".join(_keep_references(paths, tile.references)))
        first, *others = [Image.fromarray(frame) for frame in frames_of(tile.picture)]
        if others:
            notes.add_itxt("fps", repr(float(tile.fps)))
        path = tile_path(paths, iteration, index, folder)
        duration_ms = 1000 / tile.fps
        content = io.BytesIO()
        first.save(
            content, "PNG", pnginfo=notes, save_all=bool(others), append_images=others, duration=duration_ms
        )
        write_atomically(path, content.getvalue())


def _keep_references(paths: RunPaths, references: Sequence[NDArray[np.uint8]]) -> list[str]:
    """Store those that are new; returns the names of all."""
    folder = _references_folder(paths)
    folder.mkdir(exist_ok=True)
    for picture in references:
        if not (path := folder / _reference_name(picture)).exists():
            write_atomically(path, as_png(Image.fromarray(picture)))
    return [_reference_name(picture) for picture in references]
