"""Image grids of a run: the same held-out prompts at every evaluation, and a before-after comparison.

    images/iteration-000040.png       each prompt with its images and their scores
    images/tiles/000040-003.png       one unscaled image, with caption and score as PNG text
    images/references/*.png           pictures that prompts are about, shown beside their results
    images/before-after.png           drawn from two iterations' tiles
    images/progress.png               the same images at several iterations

Of videos, the pages show some frames side by side, and a page of the same name that ends in .webp plays at
the videos' speed; a tile is an animated PNG.

A resumed run removes the images of the evaluations that it repeats (:func:`drop_pictures`).
"""

from __future__ import annotations

import hashlib
import io
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageDraw, ImageFont, ImageOps, ImageSequence, PngImagePlugin

from spotlight.store.files import write_atomically
from spotlight.store.picture_names import (
    grid_path,
    stored_grids,
    stored_tiles,
    tile_path,
    tiles_folder,
    tiles_of,
)
from spotlight.store.run_directory import RunPaths
from spotlight.store.store_errors import StoreError, storage_error

BEFORE_AFTER = "before-after.png"
_SIDE_PX = (128, 384)
"""Range of a displayed image's longer side: enlarged by integer factors, reduced by averaging."""
_PAPER, _INK, _FAINT, _FRAME = "#fbfaf7", "#22252a", "#7b8088", "#d9d6ce"
_BETTER, _WORSE = "#1a7f4b", "#b3382c"
_MARGIN, _GAP, _BLOCK_GAP = 28, 6, 22
_TITLE_PX, _TEXT_PX = 22, 14
_LINE_PX, _CAPTION_LINES = 18, 3
_PAGE_ASPECT = 1.5
_CONTACT_FRAMES, _PLAYED_MAX = 4, 24
_FPS = 16.0
"""Of tiles that do not say."""


@dataclass(frozen=True, slots=True)
class Tile:
    """One image: [height, width, 3], sRGB, or a video [frames, ...]; ``caption`` is its prompt, and
    ``references`` the pictures that the prompt is about.

    Attributes:
        member: which of its prompt's seeds it has; None: unknown.
    """

    picture: NDArray[np.uint8]
    caption: str
    score: float
    fps: float = _FPS
    references: tuple[NDArray[np.uint8], ...] = ()
    member: int | None = None

    @property
    def prompt(self) -> tuple[str, ...]:
        """Equal for tiles of one prompt."""
        return (self.caption, *map(_reference_name, self.references))


@dataclass(frozen=True, slots=True)
class _Cell:
    media: NDArray[np.uint8]
    label: str
    colour: str


@dataclass(frozen=True, slots=True)
class _Block:
    caption: str
    cells: tuple[_Cell, ...]


@dataclass(frozen=True, slots=True)
class _DrawnCell:
    picture: Image.Image
    label: str
    colour: str


@dataclass(frozen=True, slots=True)
class _DrawnBlock:
    caption: str
    cells: tuple[_DrawnCell, ...]


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
        shown = _reference_cells(each[0].references)
        cells = [_Cell(tile.picture, f"{tile.score:.2f}", _FAINT) for tile in each]
        blocks += [
            _Block(each[0].caption, (*shown, *cells[i : i + columns])) for i in range(0, len(cells), columns)
        ]
    path = grid_path(paths, iteration)
    try:
        _keep(paths, iteration, tiles)
        _write_page(path, title, blocks, present[0].fps)
    except OSError as error:
        raise storage_error("cannot write the pictures", paths.images, error) from error
    return path


def drop_pictures(paths: RunPaths, *, resume_at: int) -> None:
    """Remove the images of evaluations from ``resume_at`` on. Raises StoreError."""
    try:
        for iteration, path in (*stored_tiles(paths), *stored_grids(paths)):
            if iteration >= resume_at:
                path.unlink()
    except OSError as error:
        raise storage_error("cannot remove undone pictures", paths.images, error) from error


def drawn_iterations(paths: RunPaths) -> list[int]:
    """Iterations with stored images, ascending."""
    return sorted({iteration for iteration, _ in stored_tiles(paths)})


def read_tiles(paths: RunPaths, iteration: int) -> tuple[Tile, ...]:
    """One evaluation's tiles, in grid order. Raises StoreError for a file that is not a tile."""
    tiles = []
    for path in tiles_of(paths, iteration):
        try:
            with Image.open(path) as image:
                caption, score = image.info["caption"], float(image.info["score"])
                fps = float(image.info.get("fps", _FPS))
                frames = [
                    np.asarray(frame.convert("RGB"))
                    for frame in ImageSequence.Iterator(image)
                    # Equal frames in succession are stored as one that lasts longer.
                    for _ in range(max(1, round(frame.info.get("duration", 0) * fps / 1000)))
                ]
                media = frames[0] if len(frames) == 1 else np.stack(frames)
                names = image.info.get("references", "").split()
                shown = tuple(picture_of(_references_folder(paths) / name) for name in names)
                member = int(image.info["member"]) if "member" in image.info else None
                tiles.append(Tile(media, caption, score, fps, shown, member))
        except (OSError, KeyError, ValueError) as error:
            raise StoreError(f"{path}: not a picture of this run ({error!r}). Delete it.") from error
    return tuple(tiles)


@dataclass(frozen=True, slots=True)
class TileNote:
    """A stored image without its pixels."""

    path: Path
    caption: str
    score: float


def read_tile_notes(paths: RunPaths, iteration: int) -> tuple[TileNote, ...]:
    """One evaluation's tiles, in grid order, without decoding them; a file that is no tile is left out."""
    notes = []
    for path in tiles_of(paths, iteration):
        try:
            with Image.open(path, formats=("PNG",)) as image:
                notes.append(TileNote(path, image.info["caption"], float(image.info["score"])))
        except (OSError, KeyError, ValueError, SyntaxError):
            continue  # being written, or not ours
    return tuple(notes)


def write_comparison(paths: RunPaths, *, before: int, after: int, title: str) -> Path:
    """Draw two evaluations side by side.

    Raises:
        StoreError: no common prompt, or the disk is full or not writable.
    """
    old_tiles, new_tiles = _by_prompt(read_tiles(paths, before)), _by_prompt(read_tiles(paths, after))
    pairs = [
        (old[seed], new_tiles[prompt][seed])
        for prompt, old in old_tiles.items()
        for seed in old
        if seed in new_tiles.get(prompt, ())
    ]
    if not pairs:
        raise StoreError(
            f"{tiles_folder(paths)}: iterations {before} and {after} have no prompt in common; "
            f"there are pictures of iterations {drawn_iterations(paths)}."
        )
    path = paths.images / BEFORE_AFTER
    try:
        _write_page(path, title, [_pair(old, new) for old, new in pairs], pairs[0][1].fps)
    except OSError as error:
        raise storage_error("cannot write the pictures", paths.images, error) from error
    return path


def write_progress(paths: RunPaths, iterations: Sequence[int], *, rows: int, title: str) -> Path:
    """Draw an image of up to ``rows`` prompts at several iterations, the first that all of them have.

    Raises:
        StoreError: no common prompt, or the disk is full or not writable.
    """
    drawn = [_by_prompt(read_tiles(paths, iteration)) for iteration in iterations]
    common = [
        (prompt, shared[0])
        for prompt, first in drawn[0].items()
        if (shared := [seed for seed in first if all(seed in tiles.get(prompt, ()) for tiles in drawn)])
    ][:rows]
    if not common:
        raise StoreError(
            f"{tiles_folder(paths)}: iterations {list(iterations)} have no prompt in common; "
            f"there are pictures of iterations {drawn_iterations(paths)}."
        )
    strips = [
        Strip(
            prompt[0],
            tuple(
                (tiles[prompt][seed].picture, f"{iteration}:  {tiles[prompt][seed].score:.2f}")
                for iteration, tiles in zip(iterations, drawn, strict=True)
            ),
            drawn[0][prompt][seed].references,
        )
        for prompt, seed in common
    ]
    path = paths.images / "progress.png"
    try:
        prompt, seed = common[0]
        write_strips(path, title, strips, fps=drawn[0][prompt][seed].fps)
    except OSError as error:
        raise storage_error("cannot write the pictures", paths.images, error) from error
    return path


@dataclass(frozen=True, slots=True)
class Strip:
    """Images side by side under one caption, each with its own label, after the prompt's references."""

    caption: str
    pictures: tuple[tuple[NDArray[np.uint8], str], ...]
    references: tuple[NDArray[np.uint8], ...] = ()


def write_strips(path: Path, title: str, strips: Sequence[Strip], *, fps: float = _FPS) -> None:
    """Write a page of strips as PNG; of videos a page that plays at ``fps``, too."""
    blocks = [
        _Block(
            strip.caption,
            (
                *_reference_cells(strip.references),
                *(_Cell(picture, label, _FAINT) for picture, label in strip.pictures),
            ),
        )
        for strip in strips
    ]
    _write_page(path, title, blocks, fps)


def picture_of(path: str | Path) -> NDArray[np.uint8]:
    """A reference picture as shown: upright, [height, width, 3], sides of at most 384 pixels."""
    with Image.open(path) as image:
        upright = ImageOps.exif_transpose(image).convert("RGB")
    upright.thumbnail((_SIDE_PX[1], _SIDE_PX[1]))
    return np.asarray(upright)


def _reference_cells(references: Sequence[NDArray[np.uint8]]) -> tuple[_Cell, ...]:
    return tuple(_Cell(picture, "reference", _FAINT) for picture in references)


def _reference_name(picture: NDArray[np.uint8]) -> str:
    content = hashlib.sha256(repr(picture.shape).encode() + picture.tobytes())
    return f"{content.hexdigest()[:16]}.png"


def _references_folder(paths: RunPaths) -> Path:
    return paths.images / "references"


def _by_prompt(tiles: Sequence[Tile]) -> dict[tuple[str, ...], dict[int, Tile]]:
    """By prompt and seed; where the seed is unknown, in turn."""
    found: dict[tuple[str, ...], dict[int, Tile]] = {}
    for tile in tiles:
        of_prompt = found.setdefault(tile.prompt, {})
        of_prompt[len(of_prompt) if tile.member is None else tile.member] = tile
    return found


def _pair(old: Tile, new: Tile) -> _Block:
    change = new.score - old.score
    colour = _FAINT if abs(change) < 0.005 else _BETTER if change > 0 else _WORSE
    cells = (
        *_reference_cells(new.references),
        _Cell(old.picture, f"before  {old.score:.2f}", _FAINT),
        _Cell(new.picture, f"after  {new.score:.2f}", colour),
    )
    return _Block(new.caption, cells)


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


def _keep(paths: RunPaths, iteration: int, tiles: Sequence[Tile | None]) -> None:
    tiles_folder(paths).mkdir(exist_ok=True)
    for stale in tiles_of(paths, iteration):
        stale.unlink()
    for index, tile in enumerate(tiles):
        if tile is None:
            continue
        notes = PngImagePlugin.PngInfo()
        notes.add_itxt("caption", tile.caption)
        notes.add_itxt("score", repr(float(tile.score)))
        if tile.member is not None:
            notes.add_itxt("member", str(tile.member))
        if tile.references:
            notes.add_itxt("references", " ".join(_keep_references(paths, tile.references)))
        first, *others = [Image.fromarray(frame) for frame in _frames(tile.picture)]
        if others:
            notes.add_itxt("fps", repr(float(tile.fps)))
        path = tile_path(paths, iteration, index)
        duration_ms = 1000 / tile.fps
        first.save(path, pnginfo=notes, save_all=bool(others), append_images=others, duration=duration_ms)


def _keep_references(paths: RunPaths, references: Sequence[NDArray[np.uint8]]) -> list[str]:
    """Store those that are new; returns the names of all."""
    folder = _references_folder(paths)
    folder.mkdir(exist_ok=True)
    for picture in references:
        if not (path := folder / _reference_name(picture)).exists():
            write_atomically(path, _png(Image.fromarray(picture)))
    return [_reference_name(picture) for picture in references]


def _frames(media: NDArray[np.uint8]) -> NDArray[np.uint8]:
    return media[None] if media.ndim == 3 else media


def _write_page(path: Path, title: str, blocks: Sequence[_Block], fps: float) -> None:
    frames = max(len(_frames(cell.media)) for block in blocks for cell in block.cells)
    write_atomically(path, _png(_page(title, _drawn(blocks, _side_by_side))))
    if frames == 1:
        return
    first, *others = [
        _page(title, _drawn(blocks, partial(_at, share=at / (frames - 1))))
        for at in _spread(frames, _PLAYED_MAX)
    ]
    buffer = io.BytesIO()
    duration_ms = round(1000 / fps * frames / (1 + len(others)))
    first.save(buffer, "WEBP", save_all=True, append_images=others, duration=duration_ms, loop=0, quality=80)
    write_atomically(path.with_suffix(".webp"), buffer.getvalue())


def _drawn(blocks: Sequence[_Block], draw: Callable[[NDArray[np.uint8]], Image.Image]) -> list[_DrawnBlock]:
    return [
        _DrawnBlock(
            block.caption,
            tuple(_DrawnCell(draw(cell.media), cell.label, cell.colour) for cell in block.cells),
        )
        for block in blocks
    ]


def _side_by_side(media: NDArray[np.uint8]) -> Image.Image:
    frames = _frames(media)
    shown = [_shown(frames[at]) for at in _spread(len(frames), _CONTACT_FRAMES)]
    sheet = Image.new("RGB", (sum(each.width + 2 for each in shown) - 2, shown[0].height), _FRAME)
    for index, each in enumerate(shown):
        sheet.paste(each, (index * (each.width + 2), 0))
    return sheet


def _at(media: NDArray[np.uint8], share: float) -> Image.Image:
    frames = _frames(media)
    return _shown(frames[round(share * (len(frames) - 1))])


def _spread(frames: int, most: int) -> list[int]:
    return [round(at) for at in np.linspace(0, frames - 1, min(frames, most))]


def _shown(picture: NDArray[np.uint8]) -> Image.Image:
    image = Image.fromarray(picture)
    longest = max(image.size)
    if longest > _SIDE_PX[1]:
        return image.resize(
            [max(1, round(side * _SIDE_PX[1] / longest)) for side in image.size], Image.Resampling.LANCZOS
        )
    factor = math.ceil(_SIDE_PX[0] / longest)
    return image.resize([side * factor for side in image.size], Image.Resampling.NEAREST)


def _page(title: str, blocks: Sequence[_DrawnBlock]) -> Image.Image:
    text = ImageFont.load_default(_TEXT_PX)
    width = max(sum(cell.picture.width + _GAP for cell in block.cells) - _GAP for block in blocks)
    captions = [_wrap(block.caption, width, text) for block in blocks]
    picture_height = max(cell.picture.height for block in blocks for cell in block.cells)
    caption_height = _LINE_PX * max(len(lines) for lines in captions)
    height = picture_height + _LINE_PX + _GAP + caption_height
    ideal = math.sqrt(_PAGE_ASPECT * len(blocks) * (height + _BLOCK_GAP) / (width + _BLOCK_GAP))
    per_row = min(len(blocks), max(1, round(ideal)))
    rows = math.ceil(len(blocks) / per_row)
    heading = ImageFont.load_default(_TITLE_PX)
    content_width = max(per_row * (width + _BLOCK_GAP) - _BLOCK_GAP, math.ceil(heading.getlength(title)))
    top = _MARGIN + _TITLE_PX + _BLOCK_GAP
    page_size = (2 * _MARGIN + content_width, top + rows * (height + _BLOCK_GAP) - _BLOCK_GAP + _MARGIN)
    page = Image.new("RGB", page_size, _PAPER)
    draw = ImageDraw.Draw(page)
    draw.text((_MARGIN, _MARGIN - 4), title, fill=_INK, font=heading)
    for index, (block, lines) in enumerate(zip(blocks, captions, strict=True)):
        row, column = divmod(index, per_row)
        corner = (_MARGIN + column * (width + _BLOCK_GAP), top + row * (height + _BLOCK_GAP))
        _draw_block(page, draw, block, lines, corner, picture_height, text)
    return page


def _draw_block(
    page: Image.Image,
    draw: ImageDraw.ImageDraw,
    block: _DrawnBlock,
    lines: Sequence[str],
    corner: tuple[int, int],
    picture_height: int,
    font: ImageFont.FreeTypeFont | ImageFont.ImageFont,
) -> None:
    x, y = corner
    for cell in block.cells:
        page.paste(cell.picture, (x, y))
        right, bottom = x + cell.picture.width, y + cell.picture.height
        draw.rectangle((x - 1, y - 1, right, bottom), outline=_FRAME)
        draw.text((x, y + picture_height + 3), cell.label, fill=cell.colour, font=font)
        x = right + _GAP
    for index, line in enumerate(lines):
        top = y + picture_height + _LINE_PX + _GAP + index * _LINE_PX
        draw.text((corner[0], top), line, fill=_INK, font=font)


def _wrap(text: str, width: int, font: ImageFont.FreeTypeFont | ImageFont.ImageFont) -> list[str]:
    """Break a caption into at most three lines of ``width`` pixels."""
    lines = [""]
    for word in text.split():
        longer = f"{lines[-1]} {word}".strip()
        if font.getlength(longer) <= width:
            lines[-1] = longer
            continue
        if lines[-1]:
            lines.append("")
        for character in word:
            if font.getlength(lines[-1] + character) > width and lines[-1]:
                lines.append("")
            lines[-1] += character
    if len(lines) > _CAPTION_LINES:
        kept = lines[_CAPTION_LINES - 1]
        while kept and font.getlength(f"{kept}...") > width:
            kept = kept[:-1]
        lines = [*lines[: _CAPTION_LINES - 1], f"{kept.rstrip()}..."]
    return lines


def _png(image: Image.Image) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, "PNG", optimize=True)
    return buffer.getvalue()
