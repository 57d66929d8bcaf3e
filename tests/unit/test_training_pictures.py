"""Which training pictures are kept, and that keeping them holds up nothing and loses no error."""

from __future__ import annotations

import errno
from pathlib import Path
from threading import Event

import numpy as np
import pytest

from spotlight.scheduler.types import RolloutId
from spotlight.store import training_pictures
from spotlight.store.images import Tile, drawn_iterations, drop_pictures, read_tile_note
from spotlight.store.metrics import MetricsRow, MetricsWriter
from spotlight.store.picture_names import TRAINING, tiles_of
from spotlight.store.run_directory import RunPaths
from spotlight.store.shown_media import ShownMedia
from spotlight.store.training_pictures import GROUPS, TrainingPictures, best_and_worst
from spotlight_rewards.base.file_errors import StoreError

PICTURE = np.zeros((8, 8, 3), dtype=np.uint8)
TILES = [
    Tile(PICTURE, "a", at, rollout=f"r{at}", scores={"reward": at, "judge": 1 - at}) for at in (0.75, 0.25)
]


def ids(*names: str) -> list[RolloutId]:
    return [RolloutId(name) for name in names]


def test_the_highest_and_the_widest_group_are_shown_and_others_evenly() -> None:
    groups = [ids(f"{group}a", f"{group}b", f"{group}c") for group in range(12)]
    rewards = dict.fromkeys([name for group in groups for name in group], 0.5)
    rewards |= {RolloutId("7b"): 0.9, RolloutId("7c"): 0.8, RolloutId("5a"): 0.85, RolloutId("5c"): -3.0}
    shown = best_and_worst(groups, rewards)
    assert shown == [("7b", "7a"), ("5a", "5c"), ("0a", "0c"), ("3a", "3c")]
    assert len(shown) == GROUPS


@pytest.mark.parametrize(
    ("groups", "shown"),
    [
        ([], []),
        ([ids("a")], []),  # the others of its group were dropped: nothing to compare it with
        ([ids("a", "b"), ids("c")], [("a", "b")]),
        ([ids("d", "e")], [("d", "e")]),  # silent: two pictures all the same
        ([ids("b", "a"), ids("d", "e")], [("a", "b"), ("d", "e")]),
    ],
)
def test_a_group_is_shown_once_and_never_one_picture_twice(
    groups: list[list[RolloutId]], shown: list[tuple[str, str]]
) -> None:
    rewards = dict(zip(ids("a", "b", "c", "d", "e"), (1.0, 0.0, 9.0, 0.5, 0.5), strict=True))
    assert best_and_worst(groups, rewards) == shown


class Tracker:
    """Remembers what it is shown."""

    def __init__(self) -> None:
        self.seen: list[object] = []

    def write(self, row: MetricsRow) -> None:
        self.seen.append(row.iteration)

    def training_pictures(self, iteration: int, shown: tuple[ShownMedia, ...]) -> None:
        self.seen.append((iteration, *((each.tag, each.caption) for each in shown)))

    def flush(self) -> None: ...

    def close(self) -> None: ...


def run_at(directory: Path) -> RunPaths:
    paths = RunPaths(directory)
    paths.images.mkdir()
    return paths


def test_they_are_encoded_beside_the_run_and_shown_before_a_later_row(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    paths, tracker, may_write = run_at(tmp_path), Tracker(), Event()
    stores = training_pictures.keep_tiles

    def slow(*what: object) -> None:
        assert may_write.wait(60)
        stores(*what)  # type: ignore[arg-type]

    monkeypatch.setattr(training_pictures, "keep_tiles", slow)
    with (
        MetricsWriter(paths, resume_at=0, sinks=(tracker,)) as metrics,
        TrainingPictures(paths, metrics) as kept,
    ):
        kept.keep(10, TILES)
        kept.settle(before=10)  # waits for nothing: the row of the same iteration may come first
        metrics.write(MetricsRow(10, 1, 1.0, {}))
        may_write.set()
        kept.settle(before=11)
        metrics.write(MetricsRow(11, 1, 1.0, {}))
        kept.keep(12, [None, TILES[1]])  # its best picture was lost
    best = ("training_pictures/0-best", "reward 0.750, judge 0.250  a")
    worst = ("training_pictures/0-worst", "reward 0.250, judge 0.750  a")
    assert tracker.seen == [10, (10, best, worst), 11, (12, worst)]
    assert drawn_iterations(paths, TRAINING) == [10, 12]
    assert drawn_iterations(paths) == []
    (first, _) = map(read_tile_note, tiles_of(paths, 10, TRAINING))
    assert first is not None
    assert (first.rollout, first.scores) == ("r0.75", {"reward": 0.75, "judge": 0.25})
    drop_pictures(paths, resume_at=11)
    assert drawn_iterations(paths, TRAINING) == [10]


def test_a_full_disk_ends_the_run_at_its_next_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(training_pictures, "keep_tiles", full)
    paths = run_at(tmp_path)
    with MetricsWriter(paths, resume_at=0) as metrics:
        with TrainingPictures(paths, metrics) as kept:
            kept.keep(0, TILES)
            with pytest.raises(StoreError, match="cannot write the pictures"):
                kept.settle()
        with TrainingPictures(paths, metrics) as kept:
            kept.keep(0, TILES)
            kept.__exit__(ValueError, ValueError("the first error"), None)
