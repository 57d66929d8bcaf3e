"""Copies of runs in a bucket that are only read: they follow the run, and show no more than it has."""

from __future__ import annotations

import errno
import fcntl
import hashlib
import os
import re
import shutil
from contextlib import closing
from pathlib import Path

import pytest
from bucket_head import ONE, Head
from obstore.store import MemoryStore
from typer.testing import CliRunner

from spotlight.cli.main import app
from spotlight.store.checkpoints import CheckpointStore
from spotlight.store.ledger import ledger_queries as queries
from spotlight.store.run_directory import RunPaths
from spotlight.store.run_store import Wanted, local_folder
from spotlight_bucket import bucket_runs
from spotlight_bucket.bucket_objects import Objects, Version
from spotlight_bucket.local_copies import ReadCopy, is_light, working_copy
from spotlight_rewards.base.file_errors import StoreError


@pytest.fixture
def objects() -> Objects:
    return Objects(MemoryStore(), "s3://bucket/demo")


@pytest.fixture
def head(tmp_path: Path, objects: Objects) -> Head:
    return Head(tmp_path / "one", objects, ONE)


def test_a_reader_brings_what_it_needs_and_follows_the_run(
    head: Head, objects: Objects, tmp_path: Path
) -> None:
    copy = ReadCopy(tmp_path / "two", "demo", objects)
    assert not copy.renew(is_light)
    head.begin()
    head.checkpoint(1)
    (head.run / "summary.json").write_text("{}")
    head.replicator.sync()
    assert copy.renew(is_light)
    with closing(queries.open_readonly(RunPaths(copy.run).ledger)) as connection:
        assert queries.position(connection) == 0
    checkpoint = copy.run / "checkpoints" / "000001-iteration-000001"
    assert (checkpoint / "manifest.json").is_file()
    assert not (checkpoint / "weights").exists()
    assert copy.renew(lambda path: True)
    assert hashlib.sha256((checkpoint / "weights").read_bytes()).digest()
    (head.run / "summary.json").unlink()
    head.checkpoint(2)
    head.replicator.sync()
    copy.renew(is_light)
    assert not (copy.run / "summary.json").exists()
    assert (checkpoint / "weights").exists()
    head.checkpoint(3)  # two are kept
    head.replicator.sync()
    copy.renew(is_light)
    assert CheckpointStore(copy.run / "checkpoints", keep=2).iterations == [2, 3]
    assert not checkpoint.exists(), "a reader takes an empty folder for a damaged checkpoint"
    objects.delete(list(objects.names("")))
    assert not copy.renew(is_light)
    assert not copy.run.exists(), "a run that the bucket does not hold any more is still shown"


def test_a_reader_follows_a_file_that_becomes_a_folder_and_a_file_again(
    head: Head, objects: Objects, tmp_path: Path
) -> None:
    head.begin()
    copy, place = ReadCopy(tmp_path / "two", "demo", objects), head.run / "notes"
    for path in (place, place / "first", place):
        shutil.rmtree(place, ignore_errors=True)
        place.unlink(missing_ok=True)
        path.parent.mkdir(exist_ok=True)
        path.write_text("a note")
        head.replicator.sync()
        assert copy.renew(is_light)
        assert (copy.run / path.relative_to(head.run)).read_text() == "a note"


def test_a_disk_that_takes_no_writes_any_more_is_an_error_with_a_remedy(
    head: Head, objects: Objects, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object, **__: object) -> int:
        raise OSError(errno.EROFS, "Read-only file system")

    head.begin()
    (head.run / "summary.json").write_text("{}")
    head.replicator.sync()
    copy = ReadCopy(tmp_path / "two", "demo", objects)
    copy.renew(is_light)
    (head.run / "summary.json").unlink()
    head.replicator.sync()
    monkeypatch.setattr(Path, "unlink", refuse)
    with pytest.raises(StoreError, match="the disk is read-only"):
        copy.renew(is_light)
    monkeypatch.setattr(os, "pwrite", refuse)
    with pytest.raises(StoreError, match="the disk is read-only"), working_copy(tmp_path / "three", "demo"):
        pass


def test_a_run_that_cannot_be_read_keeps_no_other_from_its_readers(
    head: Head, objects: Objects, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def opened(address: str) -> Objects:
        other = Objects(MemoryStore(), address)
        if address.endswith("/damaged"):
            other.put("snapshots/0000000001.json", b"no snapshot")
        return objects if address.endswith("/demo") else other

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(bucket_runs, "open_objects", opened)
    monkeypatch.setattr(bucket_runs.BucketRuns, "names", lambda *_: ["damaged", "demo"])
    head.begin()
    head.replicator.sync()
    refused = r"damaged/snapshots/0000000001.json: not a snapshot of a run"
    told = list[str]()
    folder = local_folder(Path("s3://bucket/runs"), told.append, Wanted.PICTURES)
    assert [each.name for each in folder.iterdir() if each.is_dir()] == ["demo"]
    assert [bool(re.search(refused, said)) for said in told] == [True]
    listed = CliRunner().invoke(app, ["runs", "s3://bucket/runs"])
    assert (listed.exit_code, "demo" in listed.stdout) == (0, True)
    assert re.search(refused, listed.stderr)
    monkeypatch.setattr(bucket_runs.BucketRuns, "names", lambda *_: ["damaged"])
    with pytest.raises(StoreError, match=refused):
        local_folder(Path("s3://bucket/runs"), pytest.fail)


@pytest.mark.parametrize(
    "index", ["[]", "5", '{"config.yaml": 5}', "[" * 100_000, '{"OUTSIDE": []}', f'{{"{"a" * 5000}": []}}']
)
def test_a_readers_damaged_index_is_made_again_and_leads_nowhere_else(
    head: Head, objects: Objects, tmp_path: Path, index: str
) -> None:
    head.begin()
    head.replicator.sync()
    copy = ReadCopy(tmp_path / "two", "demo", objects)
    assert copy.renew(is_light)
    (outside := tmp_path / "outside").write_text("another's")
    (copy.run.parent / ".demo.files").write_text(index.replace("OUTSIDE", str(outside)))
    (copy.run / "config.yaml").write_text("of before")
    assert copy.renew(is_light)
    assert (copy.run / "config.yaml").read_text() == (head.run / "config.yaml").read_text()
    assert outside.exists()


def test_a_reader_keeps_others_of_its_machine_from_the_copy(
    head: Head, objects: Objects, tmp_path: Path
) -> None:
    asked = 0

    class Watched(Objects):
        def get(self, name: str, bytes_max: int) -> tuple[bytes, Version] | None:
            nonlocal asked
            asked += 1
            with (tmp_path / "two" / "read" / ".demo.lock").open() as lock, pytest.raises(BlockingIOError):
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return objects.get(name, bytes_max)

    head.begin()
    head.replicator.sync()
    copy = ReadCopy(tmp_path / "two", "demo", Watched(objects._store, objects.address))
    assert copy.renew(is_light)
    assert asked > 1
