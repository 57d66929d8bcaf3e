"""Which training pictures are kept, and that keeping them holds up nothing and loses no error."""

from __future__ import annotations

import errno
import math
from pathlib import Path
from threading import Event
from typing import Any

import numpy as np
import pytest

from spotlight.runtime.recorder import RunRecorder
from spotlight.scheduler.effects import CommitCheckpoint
from spotlight.scheduler.types import PolicyVersion, Purpose, Rollout, RolloutId
from spotlight.store import training_pictures
from spotlight.store.checkpoints import CheckpointStore
from spotlight.store.images import Tile, drawn_iterations, drop_pictures, keep_tiles, read_tile_note
from spotlight.store.ledger.sqlite_ledger import SqliteLedger
from spotlight.store.manifest import CheckpointHeader
from spotlight.store.metrics import MetricsRow, MetricsWriter
from spotlight.store.picture_names import TRAINING, tiles_of
from spotlight.store.run_directory import RunPaths
from spotlight.store.shown_media import ShownMedia, shown_media
from spotlight.store.training_pictures import GROUPS, TrainingPictures, best_and_worst, training_tile
from spotlight_rewards.base.file_errors import StoreError
from spotlight_rewards.base.prompts import PromptId

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


def test_large_ones_are_reduced_before_they_are_held() -> None:
    rollout = Rollout(RolloutId("r"), Purpose.TRAIN, 0, PromptId("p"), 3, 3, 4, PolicyVersion(0))

    def kept(*shape: int) -> Tile:
        return training_tile(np.zeros((*shape, 3), np.uint8), "a", rollout, {"reward": 0.5}, 16.0)

    assert kept(512, 300).picture.shape == (512, 300, 3)
    assert kept(1024, 768).picture.shape == (512, 384, 3)
    assert kept(5, 64, 64).picture.shape == (5, 64, 64, 3)
    video = kept(81, 480, 832)
    assert video.picture.shape == (21, 148, 256, 3)
    assert video.fps == 4.0  # they last as long
    assert (video.score, video.rollout, video.member) == (0.5, "r", 3)


def test_those_of_a_committed_iteration_are_stored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Since a run that is killed then goes on after it."""
    paths, waited_for = run_at(tmp_path), Event()
    paths.checkpoints.mkdir()
    stores = training_pictures.keep_tiles

    def slow(*what: object) -> None:
        assert waited_for.wait(60)
        stores(*what)  # type: ignore[arg-type]

    class Kept(TrainingPictures):
        def settle(self, *, before: float = math.inf) -> None:
            waited_for.set()
            super().settle(before=before)

    monkeypatch.setattr(training_pictures, "keep_tiles", slow)
    store, header = CheckpointStore(paths.checkpoints, keep=1), CheckpointHeader(0, 0, "", "")
    with (
        SqliteLedger(paths.ledger) as ledger,
        MetricsWriter(paths, resume_at=0) as metrics,
        Kept(paths, metrics) as kept,
    ):
        ledger.begin_attempt(pid=1, host="h", workers={}, now_s=0.0)
        parts: Any = (None, {}, None, paths, ledger, store, metrics, {}, header, 1, 16.0, kept, 0.0, 0.0)
        with monkeypatch.context() as unwaited:
            unwaited.setattr(kept, "settle", lambda: None)
            kept.keep(4, TILES)
        with RunRecorder(*parts).committing(CommitCheckpoint(5, 0, {})):
            assert len(tiles_of(paths, 4, TRAINING)) == 2


def test_a_damaged_one_is_not_shown_again(tmp_path: Path) -> None:
    paths = run_at(tmp_path)
    noise = np.random.default_rng(0).integers(256, size=(200, 200, 3), dtype=np.uint8)
    keep_tiles(paths, 3, [Tile(noise, "a", 1.0), TILES[1]], TRAINING)
    first = tiles_of(paths, 3, TRAINING)[0]
    first.write_bytes(first.read_bytes()[:60_000])
    assert [each.name for each in shown_media(paths, 3, TRAINING)] == ["0-worst"]


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
