"""Forks of runs that are at work, and on disks that are full."""

from __future__ import annotations

import resource
import signal
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager
from itertools import count
from pathlib import Path

import pytest
from tests.unit.dashboard_run import make_run

from spotlight.store.checkpoints import Checkpoint, CheckpointStore
from spotlight.store.fork import make_fork
from spotlight.store.ledger.ledger_queries import open_readonly, position
from spotlight.store.manifest import CheckpointHeader
from spotlight.store.picture_names import TILES, tile_path
from spotlight.store.run_directory import RunPaths
from spotlight_rewards.base.file_errors import StoreError
from spotlight_rewards.base.files import TEMPORARY_PREFIX, write_atomically

FORKS = 20
"""Before, one of six failed."""


@pytest.fixture
def parent(tmp_path: Path) -> tuple[RunPaths, Checkpoint]:
    paths = make_run(tmp_path / "parent", 4)
    paths.checkpoints.mkdir()
    store = CheckpointStore(paths.checkpoints, keep=1)
    with (
        closing(open_readonly(paths.ledger)) as ledger,
        store.writer(CheckpointHeader(4, position(ledger), "", "")) as folder,
    ):
        (folder / "weights").write_bytes(b"x")
    newest = store.newest_valid()
    assert newest is not None
    return paths, newest


def fork(parent: tuple[RunPaths, Checkpoint], name: str) -> bool:
    place = parent[0].path.parent / name
    return make_fork(*parent, place, f"name: {name}\n", {"name": ("parent", name)}, 0.0)


def test_a_fork_is_made_while_its_parent_writes_pictures(parent: tuple[RunPaths, Checkpoint]) -> None:
    ends = threading.Event()
    tile = tile_path(parent[0], 5, 0, TILES)
    write_atomically(tile, bytes(2000))
    (tile.parent / f"{TEMPORARY_PREFIX}gone").symlink_to("nothing")  # as one that has its name by now

    def write() -> None:
        for number in count():
            if ends.is_set():
                return
            write_atomically(tile_path(parent[0], 5, number % 50, TILES), bytes(2000))

    writer = threading.Thread(target=write)
    writer.start()
    try:
        assert all(fork(parent, f"fork-{number}") for number in range(FORKS))
    finally:
        ends.set()
        writer.join()


@contextmanager
def files_of_at_most(bytes_max: int) -> Iterator[None]:
    before, handler = resource.getrlimit(resource.RLIMIT_FSIZE), signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (bytes_max, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)


def test_a_full_disk_leaves_nothing_of_a_fork(parent: tuple[RunPaths, Checkpoint]) -> None:
    folder = parent[0].path.parent
    few = files_of_at_most(parent[0].ledger.stat().st_size // 2)
    with few, pytest.raises(StoreError, match="cannot make the fork"):
        fork(parent, "fork")
    assert [path.name for path in folder.iterdir()] == ["parent"]
    assert fork(parent, "fork")
