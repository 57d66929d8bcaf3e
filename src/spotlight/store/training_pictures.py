"""Best and worst picture of a few training groups, with all their rewards, every few iterations.

A thread encodes them beside the run's work. They are reduced before: over a long run whole ones would take
gigabytes of disk, and eight whole videos as much memory.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import nullcontext, suppress
from typing import Self

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from spotlight.scheduler.records import REWARD
from spotlight.scheduler.types import Rollout, RolloutId
from spotlight.store.images import Tile, keep_tiles
from spotlight.store.metrics import MetricsWriter
from spotlight.store.picture_names import TRAINING
from spotlight.store.run_directory import RunPaths
from spotlight.store.shown_media import FRAMES_MAX, PICTURE_PX, VIDEO_PX, ShownMedia, reduced, shown_media
from spotlight_rewards.base.file_errors import StoreError, storage_errors

GROUPS = 4


def best_and_worst(
    groups: Sequence[Sequence[RolloutId]], rewards: Mapping[RolloutId, float]
) -> list[tuple[RolloutId, RolloutId]]:
    """Best and worst of at most :data:`GROUPS` groups of two or more.

    First the group with the highest reward, where a reward that is fooled shows, and that with the widest
    spread, from which most is learnt; the others evenly from all, so that not only extremes are seen.
    """
    value = rewards.__getitem__
    ends = [(max(each, key=value), min(reversed(each), key=value)) for each in groups if len(each) > 1]
    if not ends:
        return []
    highest = max(ends, key=lambda pair: value(pair[0]))
    widest = max(ends, key=lambda pair: value(pair[0]) - value(pair[1]))
    evenly = (ends[at * len(ends) // GROUPS] for at in range(GROUPS))
    return list(dict.fromkeys([highest, widest, *evenly]))[:GROUPS]


def training_tile(
    picture: NDArray[np.uint8], prompt: str, rollout: Rollout, scores: Mapping[str, float], fps: float
) -> Tile:
    """At most :data:`PICTURE_PX` a side; of a video :data:`VIDEO_PX`, and every few frames at its speed."""
    every = math.ceil(len(picture) / FRAMES_MAX) if picture.ndim == 4 else 1
    if picture.ndim == 4:
        shown = np.stack([_reduced(frame, VIDEO_PX) for frame in picture[::every]])
    else:
        shown = _reduced(picture, PICTURE_PX)
    return Tile(shown, prompt, scores[REWARD], fps / every, (), rollout.member, rollout.id, scores)


def _reduced(picture: NDArray[np.uint8], side_px: int) -> NDArray[np.uint8]:
    return np.asarray(reduced(Image.fromarray(picture), side_px))


class TrainingPictures:
    """Stores pictures in a thread of its own. Use as a context manager."""

    def __init__(self, paths: RunPaths, metrics: MetricsWriter) -> None:
        self._paths, self._metrics = paths, metrics
        self._thread = ThreadPoolExecutor(1, "training-pictures")
        self._under_way: tuple[int, Future[tuple[ShownMedia, ...]]] | None = None

    def keep(self, iteration: int, tiles: Sequence[Tile | None]) -> None:
        """Begin to store an iteration's. Raises StoreError for those before."""
        self.settle()
        self._under_way = iteration, self._thread.submit(self._store, iteration, tiles)

    def settle(self, *, before: float = math.inf) -> None:
        """Wait until those of iterations ``before`` are stored, and show them to the trackers.

        To be called before a row of that iteration: some trackers take no earlier step after it.
        Raises StoreError.
        """
        if self._under_way is None or self._under_way[0] >= before:
            return
        (iteration, stored), self._under_way = self._under_way, None
        self._metrics.training_pictures(iteration, stored.result())

    def _store(self, iteration: int, tiles: Sequence[Tile | None]) -> tuple[ShownMedia, ...]:
        with storage_errors("cannot write the pictures", self._paths.images):
            keep_tiles(self._paths, iteration, tiles, TRAINING)
            return shown_media(self._paths, iteration, TRAINING)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, _kind: object, error: object, _trace: object) -> None:
        # After another error, that is the one worth reporting.
        with self._thread, suppress(StoreError) if error is not None else nullcontext():
            self.settle()
