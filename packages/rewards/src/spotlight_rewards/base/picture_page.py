"""Pictures and videos on one page, with captions and labels: comparisons, grids, contact sheets."""

from __future__ import annotations

import io
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageDraw, ImageFont

from spotlight_rewards.base.files import write_atomically
from spotlight_rewards.base.media_files import read_upright

BEFORE_AFTER = "before-after.png"
"""Name of a comparison, which is no sample."""
_SIDE_PX = (128, 384)
"""Range of a displayed image's longer side: enlarged by integer factors, reduced by averaging."""
_PAPER, _INK, FAINT, _FRAME = "#fbfaf7", "#22252a", "#7b8088", "#d9d6ce"
BETTER, WORSE = "#1a7f4b", "#b3382c"
_MARGIN, _GAP, _BLOCK_GAP = 28, 6, 22
_TITLE_PX, _TEXT_PX = 22, 14
_LINE_PX, _CAPTION_LINES = 18, 3
_PAGE_ASPECT = 1.5
_CONTACT_FRAMES, _PLAYED_MAX = 4, 24
FPS = 16.0
"""Of tiles that do not say."""


@dataclass(frozen=True, slots=True)
class Cell:
    """A picture, or a video [frames, height, width, 3], with a label under it."""

    media: NDArray[np.uint8]
    label: str
    colour: str


@dataclass(frozen=True, slots=True)
class Block:
    """Cells side by side under one caption."""

    caption: str
    cells: tuple[Cell, ...]


@dataclass(frozen=True, slots=True)
class Strip:
    """Images side by side under one caption, each with its own label, after the prompt's references."""

    caption: str
    pictures: tuple[tuple[NDArray[np.uint8], str], ...]
    references: tuple[NDArray[np.uint8], ...] = ()


def write_strips(path: Path, title: str, strips: Sequence[Strip], *, fps: float = FPS) -> None:
    """Write a page of strips as PNG; of videos a page that plays at ``fps``, too."""
    blocks = [
        Block(
            strip.caption,
            (
                *reference_cells(strip.references),
                *(Cell(picture, label, FAINT) for picture, label in strip.pictures),
            ),
        )
        for strip in strips
    ]
    write_page(path, title, blocks, fps)


def picture_of(path: str | Path) -> NDArray[np.uint8]:
    """A reference picture as shown: upright, [height, width, 3], sides of at most 384 pixels."""
    upright = read_upright(Path(path))
    upright.thumbnail((_SIDE_PX[1], _SIDE_PX[1]))
    return np.asarray(upright)


def reference_cells(references: Sequence[NDArray[np.uint8]]) -> tuple[Cell, ...]:
    """The pictures that a prompt is about, as cells."""
    return tuple(Cell(picture, "reference", FAINT) for picture in references)


def frames_of(media: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """[frames, height, width, 3], of a picture one."""
    return media[None] if media.ndim == 3 else media


def cells_of(media: NDArray[np.uint8]) -> int:
    """How much room it takes on a page, where a video shows some of its frames."""
    return min(len(frames_of(media)), _CONTACT_FRAMES)


def reduced(media: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """As many frames as a page plays, none larger than it shows them."""
    frames = frames_of(media)
    kept = frames[_spread(len(frames), _PLAYED_MAX)]
    if max(media.shape[-3:-1]) > _SIDE_PX[1]:
        kept = np.stack([np.asarray(_shown(frame)) for frame in kept])
    return kept if media.ndim == 4 else kept[0]


def write_page(path: Path, title: str, blocks: Sequence[Block], fps: float) -> None:
    """Write the page as PNG; of videos also one that plays at ``fps``, as WebP. Raises OSError."""
    frames = max(len(frames_of(cell.media)) for block in blocks for cell in block.cells)
    write_atomically(path, as_png(_page(title, blocks, _side_by_side)))
    if frames == 1:
        return
    first, *others = [
        _page(title, blocks, partial(_at, share=at / (frames - 1))) for at in _spread(frames, _PLAYED_MAX)
    ]
    buffer = io.BytesIO()
    duration_ms = round(1000 / fps * frames / (1 + len(others)))
    first.save(buffer, "WEBP", save_all=True, append_images=others, duration=duration_ms, loop=0, quality=80)
    write_atomically(path.with_suffix(".webp"), buffer.getvalue())


def _side_by_side(media: NDArray[np.uint8]) -> Image.Image:
    frames = frames_of(media)
    shown = [_shown(frames[at]) for at in _spread(len(frames), _CONTACT_FRAMES)]
    sheet = Image.new("RGB", (sum(each.width + 2 for each in shown) - 2, shown[0].height), _FRAME)
    for index, each in enumerate(shown):
        sheet.paste(each, (index * (each.width + 2), 0))
    return sheet


def _at(media: NDArray[np.uint8], share: float) -> Image.Image:
    frames = frames_of(media)
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


def _page(
    title: str, blocks: Sequence[Block], drawn: Callable[[NDArray[np.uint8]], Image.Image]
) -> Image.Image:
    text = ImageFont.load_default(_TEXT_PX)
    pictures = [[drawn(cell.media) for cell in block.cells] for block in blocks]
    width = max(sum(picture.width + _GAP for picture in row) - _GAP for row in pictures)
    captions = [_wrap(block.caption, width, text) for block in blocks]
    picture_height = max(picture.height for row in pictures for picture in row)
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
    for index, (block, shown, lines) in enumerate(zip(blocks, pictures, captions, strict=True)):
        row, column = divmod(index, per_row)
        corner = (_MARGIN + column * (width + _BLOCK_GAP), top + row * (height + _BLOCK_GAP))
        _draw_block(page, draw, block, shown, lines, corner, picture_height, text)
    return page


def _draw_block(
    page: Image.Image,
    draw: ImageDraw.ImageDraw,
    block: Block,
    pictures: Sequence[Image.Image],
    lines: Sequence[str],
    corner: tuple[int, int],
    picture_height: int,
    font: ImageFont.FreeTypeFont | ImageFont.ImageFont,
) -> None:
    x, y = corner
    for cell, picture in zip(block.cells, pictures, strict=True):
        page.paste(picture, (x, y))
        right, bottom = x + picture.width, y + picture.height
        draw.rectangle((x - 1, y - 1, right, bottom), outline=_FRAME)
        draw.text((x, y + picture_height + 3), cell.label, fill=cell.colour, font=font)
        x = right + _GAP
    for index, line in enumerate(lines):
        top = y + picture_height + _LINE_PX + _GAP + index * _LINE_PX
        draw.text((corner[0], top), line, fill=_INK, font=font)


def _wrap(text: str, width: int, font: ImageFont.FreeTypeFont | ImageFont.ImageFont) -> list[str]:
    """Break a caption into at most three lines of ``width`` pixels."""
    lines = list(islice(_lines(text, width, font), _CAPTION_LINES + 1))
    if len(lines) > _CAPTION_LINES:
        kept = lines[_CAPTION_LINES - 1]
        while kept and font.getlength(f"{kept}...") > width:
            kept = kept[:-1]
        lines = [*lines[: _CAPTION_LINES - 1], f"{kept.rstrip()}..."]
    return lines


def _lines(text: str, width: int, font: ImageFont.FreeTypeFont | ImageFont.ImageFont) -> Iterator[str]:
    line = ""
    for word in text.split():
        longer = f"{line} {word}".strip()
        if font.getlength(longer) <= width:
            line = longer
            continue
        if line:
            yield line
        line = ""
        for character in word:
            if line and font.getlength(line + character) > width:
                yield line
                line = ""
            line += character
    yield line


def as_png(image: Image.Image) -> bytes:
    """Encode."""
    buffer = io.BytesIO()
    image.save(buffer, "PNG", optimize=True)
    return buffer.getvalue()
