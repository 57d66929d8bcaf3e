from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kept_tiles import read_tiles
from PIL import Image, ImageFont

from spotlight.store import images
from spotlight.store.images import (
    Tile,
    drawn_iterations,
    drop_pictures,
    read_tile,
    read_tile_note,
    write_comparison,
    write_grid,
    write_progress,
)
from spotlight.store.picture_names import tiles_of
from spotlight.store.run_directory import RunPaths
from spotlight_rewards.base import picture_page
from spotlight_rewards.base.file_errors import StoreError
from spotlight_rewards.base.picture_page import Block, _wrap, picture_of

BETTER, WORSE = (0x1A, 0x7F, 0x4B), (0xB3, 0x38, 0x2C)


@pytest.fixture
def paths(tmp_path: Path) -> RunPaths:
    (tmp_path / "images").mkdir()
    return RunPaths(tmp_path)


def tile(
    colour: tuple[int, int, int], caption: str = "a red circle", score: float = 0.5, side: int = 32
) -> Tile:
    return Tile(np.full((side, side, 3), colour, np.uint8), caption, score)


def pixels(path: Path) -> np.ndarray[tuple[int, ...], np.dtype[np.uint8]]:
    return np.asarray(Image.open(path).convert("RGB"))


def area(path: Path, colour: tuple[int, int, int]) -> int:
    return int((pixels(path) == colour).all(axis=-1).sum())


@pytest.mark.parametrize(("side", "shown"), [(32, 128), (48, 144), (200, 200), (384, 384), (1024, 384)])
def test_every_picture_is_shown_whole_at_a_visible_size(paths: RunPaths, side: int, shown: int) -> None:
    colours = [(200, 10 * index, 7) for index in range(7)]
    tiles = [tile(colour, f"prompt {index // 2}", side=side) for index, colour in enumerate(colours)]
    path = write_grid(paths, 40, tiles, columns=2, title="iteration 40")
    assert path == paths.images / "iteration-000040.png"
    assert [area(path, colour) for colour in colours] == [shown * shown] * 7


def test_small_pictures_are_enlarged_without_blur(paths: RunPaths) -> None:
    noise = np.random.default_rng(0).integers(0, 256, (32, 32, 3), np.uint8)
    page = pixels(write_grid(paths, 0, [Tile(noise, "noise", 0.0)], columns=1, title=""))
    enlarged = noise.repeat(4, axis=0).repeat(4, axis=1)
    corners = np.argwhere((page[:-127, :-127] == enlarged[0, 0]).all(axis=-1))
    assert any(np.array_equal(page[y : y + 128, x : x + 128], enlarged) for y, x in corners)


@given(
    text=st.text(max_size=200),
    width=st.integers(40, 400),
)
@settings(max_examples=60, deadline=None)
def test_captions_fit_their_width_and_lose_only_their_end(text: str, width: int) -> None:
    font = ImageFont.load_default(14)
    lines = _wrap(text, width, font)
    assert len(lines) <= 3
    assert all(font.getlength(line) <= width for line in lines if len(line) > 1)
    shown, whole = "".join("".join(lines).split()), "".join(text.split())
    assert shown == whole or (shown.endswith("...") and whole.startswith(shown[:-3]))


def test_tiles_are_kept_as_they_were_made(paths: RunPaths) -> None:
    rng = np.random.default_rng(1)
    tiles = [
        Tile(rng.integers(0, 256, (24, 40, 3), np.uint8), caption, score)
        for caption, score in (("déjà vu 红色", 1 / 3), ("déjà vu 红色", -2.0), ('"quoted"\nlines', 1e-9))
    ]
    for iteration in (20, 0):
        write_grid(paths, iteration, [*tiles, *tiles], columns=3, title="t")
    write_grid(paths, 20, tiles, columns=3, title="made again, with fewer pictures")
    assert drawn_iterations(paths) == [0, 20]
    for kept, made in zip(read_tiles(paths, 20), tiles, strict=True):
        assert np.array_equal(kept.picture, made.picture)
        assert (kept.caption, kept.score) == (made.caption, made.score)


def test_a_seed_is_compared_with_itself_when_others_are_missing(paths: RunPaths) -> None:
    colours = {member: (10 + member, 200, 100) for member in range(3)}

    def made(member: int, plus: int) -> Tile:
        red, green, blue = colours[member]
        return Tile(tile((red, green, blue + plus)).picture, "a", 0.5, member=member)

    write_grid(paths, 0, [made(0, 0), made(1, 0), made(2, 0)], columns=3, title="")
    write_grid(paths, 5, [None, made(1, 9), made(2, 9)], columns=3, title="")
    notes = filter(read_tile_note, tiles_of(paths, 5))
    assert [path.name for path in notes] == ["000005-001.png", "000005-002.png"]
    assert [each.member for each in read_tiles(paths, 5)] == [1, 2]
    path = write_comparison(paths, before=0, after=5, title="t")
    for member, (red, green, blue) in colours.items():
        shown = [area(path, (red, green, blue + plus)) > 0 for plus in (0, 9)]
        assert shown == [member > 0] * 2
    strip = write_progress(paths, [0, 5], rows=1, title="t")
    assert [area(strip, (11, 200, 100 + plus)) > 0 for plus in (0, 9)] == [True, True]


def test_comparison_shows_both_and_colours_the_change(paths: RunPaths) -> None:
    red, blue = (250, 1, 1), (1, 1, 250)
    write_grid(paths, 0, [tile(red, "a", 0.2), tile(red, "b", 0.2)], columns=1, title="")
    write_grid(
        paths, 40, [tile(blue, "a", 0.9), tile(blue, "a", 0.9), tile(blue, "b", 0.9)], columns=2, title=""
    )
    path = write_comparison(paths, before=0, after=40, title="before and after")
    assert (area(path, red), area(path, blue)) == (2 * 128 * 128, 2 * 128 * 128)
    assert area(path, BETTER) > 0
    assert area(path, WORSE) == 0
    path = write_comparison(paths, before=40, after=0, title="the other way round")
    assert area(path, BETTER) == 0
    assert area(path, WORSE) > 0


def test_large_pictures_are_held_as_small_as_they_are_shown(
    paths: RunPaths, monkeypatch: pytest.MonkeyPatch
) -> None:
    held, read = list[int](), list[Path]()

    def drawn(path: Path, title: str, blocks: Sequence[Block], fps: float) -> None:
        held.append(max(cell.media.nbytes for block in blocks for cell in block.cells))

    def reading(run: RunPaths, path: Path) -> Tile:
        read.append(path)
        return read_tile(run, path)

    for iteration in (0, 40):
        pictures = [tile((9, 9, 9), f"prompt {index}", side=1024) for index in range(3)]
        write_grid(paths, iteration, pictures, columns=1, title="")
    for module in (images, picture_page):
        monkeypatch.setattr(module, "write_page", drawn)
    monkeypatch.setattr(images, "read_tile", reading)
    write_comparison(paths, before=0, after=40, title="")
    assert (len(read), held) == (6, [384 * 384 * 3])
    write_progress(paths, [0, 40], rows=1, title="")
    assert (len(read), held) == (6 + 2, [384 * 384 * 3] * 2)


def test_a_page_of_videos_has_as_much_room_as_one_of_pictures(
    paths: RunPaths, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(images, "_CELLS_MAX", 17)
    for iteration in (0, 40):
        videos = [
            replace(each, picture=np.stack([each.picture + np.uint8(at) for at in range(6)]))
            for each in (tile((index, 0, 0), f"prompt {index}") for index in range(4))
        ]
        write_grid(paths, iteration, videos, columns=1, title="")
    write_comparison(paths, before=0, after=40, title="")
    assert "before-after.png shows 2 of 4 pairs" in caplog.text


def test_a_comparison_of_too_many_pairs_shows_the_first_that_can_be_read(
    paths: RunPaths, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(images, "_CELLS_MAX", 5)
    colours = [(200, 10 * index, 7) for index in range(4)]
    for iteration in (0, 40):
        write_grid(
            paths, iteration, [tile(each, f"prompt {each[1]}") for each in colours], columns=1, title=""
        )
    damaged = tiles_of(paths, 40)[0]
    damaged.write_bytes(damaged.read_bytes()[:-40])
    page = write_comparison(paths, before=0, after=40, title="")
    assert [area(page, each) > 0 for each in colours] == [False, True, True, False]
    assert "before-after.png shows 2 of 4 pairs" in caplog.text
    assert "left out of the comparison" in caplog.text


def test_references_stand_beside_their_results(paths: RunPaths) -> None:
    """Two prompts of equal text are told apart by theirs."""
    red, blue, green, grey = (250, 1, 1), (1, 1, 250), (1, 250, 1), (90, 91, 92)
    shown = {colour: np.full((128, 128, 3), colour, np.uint8) for colour in (green, grey)}
    for iteration, colour in ((0, red), (40, blue)):
        tiles = [
            replace(tile(colour, "edit", 0.5), references=(picture,))
            for picture in shown.values()
            for _ in range(2)
        ]
        path = write_grid(paths, iteration, tiles, columns=2, title="")
        assert [area(path, each) for each in shown] == [128 * 128] * 2
        assert area(path, colour) == 4 * 128 * 128
    kept = read_tiles(paths, 40)
    assert [each.references[0].tolist() for each in kept[::2]] == [each.tolist() for each in shown.values()]
    assert len(list((paths.images / "references").iterdir())) == 2
    path = write_comparison(paths, before=0, after=40, title="")
    assert [area(path, each) for each in shown] == [2 * 128 * 128] * 2
    path = write_progress(paths, [0, 40], rows=2, title="")
    assert [area(path, each) for each in shown] == [128 * 128] * 2


def test_a_reference_is_shown_upright_and_small(tmp_path: Path) -> None:
    picture = Image.new("RGB", (800, 400))
    turned = picture.getexif()
    turned[0x0112] = 6  # a quarter turn
    picture.save(tmp_path / "a.jpg", exif=turned)
    assert picture_of(tmp_path / "a.jpg").shape == (384, 192, 3)


def test_the_same_pictures_give_the_same_files(paths: RunPaths) -> None:
    written = [write_grid(paths, 0, [tile((1, 2, 3))], columns=1, title="t").read_bytes() for _ in range(2)]
    assert written[0] == written[1]


@pytest.mark.parametrize(
    "picture",
    [np.zeros((3, 32, 32), np.uint8), np.zeros((32, 32, 3), np.float32), np.zeros((32, 32), np.uint8)],
)
def test_what_is_no_picture_is_named(
    paths: RunPaths, picture: np.ndarray[tuple[int, ...], np.dtype[np.uint8]]
) -> None:
    with pytest.raises(ValueError, match=r"'a cat' is .* expected uint8 \[height, width, 3\]"):
        write_grid(paths, 0, [Tile(picture, "a cat", 0.0)], columns=1, title="")
    with pytest.raises(ValueError, match="no pictures"):
        write_grid(paths, 0, [], columns=1, title="")


@pytest.mark.parametrize(
    ("act", "message"),
    [
        (lambda paths: write_comparison(paths, before=0, after=7, title=""), r"no prompt in common.*\[0\]"),
        (
            lambda paths: (paths.images / "tiles/000000-001.png").write_text("x") and read_tiles(paths, 0),
            "Delete it",
        ),
        (
            lambda paths: write_grid(
                RunPaths(paths.path / "gone"), 0, [tile((1, 2, 3))], columns=1, title=""
            ),
            "cannot write the pictures",
        ),
    ],
    ids=["no-such-iteration", "foreign-file", "no-folder"],
)
def test_what_goes_wrong_is_named(paths: RunPaths, act: Callable[[RunPaths], object], message: str) -> None:
    write_grid(paths, 0, [tile((1, 2, 3))], columns=1, title="")
    with pytest.raises(StoreError, match=message):
        act(paths)


def test_pictures_of_undone_evaluations_are_removed(paths: RunPaths) -> None:
    drop_pictures(paths, resume_at=0)
    for iteration in (0, 3, 4, 40):
        write_grid(paths, iteration, [tile((9, 9, 9))], columns=1, title="")
    write_comparison(paths, before=0, after=40, title="")
    drop_pictures(paths, resume_at=4)
    assert drawn_iterations(paths) == [0, 3]
    assert sorted(path.name for path in paths.images.glob("*.png")) == [
        "before-after.png", "iteration-000000.png", "iteration-000003.png",
    ]  # fmt: skip


def test_files_of_other_names_are_left_alone(paths: RunPaths) -> None:
    names = [
        "iteration-best.png",
        "iteration-000004 (1).png",
        "tiles/._000004-000.png",
        "tiles/000004-000 (1).png",
    ]
    write_grid(paths, 4, [tile((9, 9, 9))], columns=1, title="")
    for name in names:
        (paths.images / name).touch()
    assert drawn_iterations(paths) == [4]
    assert len(read_tiles(paths, 4)) == 1
    write_grid(paths, 4, [tile((9, 9, 9))], columns=1, title="")
    drop_pictures(paths, resume_at=0)
    left = [str(path.relative_to(paths.images)) for path in paths.images.rglob("*.*")]
    assert sorted(left) == sorted(names)
