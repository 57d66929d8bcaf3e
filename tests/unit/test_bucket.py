"""Runs in a bucket: what is sent, what is brought back, and which head counts."""

from __future__ import annotations

import errno
import json
import shutil
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import BinaryIO

import pytest
from bucket_head import ONE, OTHER, Head, quiet
from obstore.store import MemoryStore
from store_history import history

from spotlight.store.checkpoints import CheckpointStore
from spotlight.store.ledger.sqlite_ledger import SqliteLedger
from spotlight.store.run_directory import RunPaths
from spotlight.store.store_errors import RunInUseError
from spotlight_bucket import bucket_runs, replicator, run_files, snapshots
from spotlight_bucket.bucket_objects import BucketError, Objects, Version
from spotlight_bucket.bucket_runs import BUCKET_RUNS
from spotlight_bucket.lease import HEAD, claim, holder_of
from spotlight_bucket.local_copies import bring_to_work, working_copy
from spotlight_bucket.run_files import consistent_files
from spotlight_bucket.snapshots import (
    CHUNKS,
    SMALL_CHUNK_BYTES,
    FencedError,
    RunSnapshot,
    name_of,
    newest_snapshot,
    render,
)
from spotlight_rewards.ballots import Ballot, BallotBox
from spotlight_rewards.base.file_errors import StoreError


@pytest.fixture
def objects() -> Objects:
    return Objects(MemoryStore(), "s3://bucket/demo")


@pytest.fixture
def head(tmp_path: Path, objects: Objects) -> Head:
    return Head(tmp_path / "one", objects, ONE)


def content_of(run: Path) -> dict[str, bytes]:
    return {
        path.relative_to(run).as_posix(): path.read_bytes()
        for path in run.rglob("*")
        if path.is_file() and not path.name.startswith(("ledger", "lock"))
    }


def test_what_a_head_sent_is_brought_back_to_the_bit(
    head: Head, objects: Objects, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("spotlight_bucket.snapshots.CHUNK_BYTES", 1 << 20)
    head.begin()
    (head.run / "images").mkdir()
    (head.run / "images" / "empty.png").touch()
    (head.run / "lock").write_text("process 1")
    box = BallotBox(head.run / "votes")
    asked = Ballot("a cat", pictures=("1" * 32, "2" * 32))
    box.open(asked, dict.fromkeys(asked.pictures, b"png"), within_s=60)
    box.vote(asked.id, asked.pictures)
    (head.run / "elsewhere").symlink_to("/etc/hostname")
    head.checkpoint(1, size_bytes=(1 << 20) + 1)  # two chunks
    head.checkpoint(2)
    with closing(SqliteLedger(head.ledger)) as ledger:
        number = 1
        for some in history(0, 1):
            ledger.append(list(enumerate(some, number)))
            number += len(some)
        head.replicator.sync()  # beside a writer
        digest = ledger.digest_at(number - 1)
    assert head.replicator.sync()

    with working_copy(tmp_path / "two", "demo") as copy:
        base = newest_snapshot(objects)
        assert base is not None
        bring_to_work(copy, base, objects, quiet)
        (head.run / "elsewhere").unlink()
        assert BallotBox(copy.run / "votes").vote_on(asked.id)
        assert not (copy.run / "votes" / "open").exists()  # whoever voted there would vote in vain
        box.close(asked.id)
        assert content_of(copy.run) == content_of(head.run)
        assert not (copy.run / "lock").exists()
        with closing(SqliteLedger(RunPaths(copy.run).ledger)) as ledger:
            assert ledger.digest_at(number - 1) == digest


def test_what_did_not_change_is_not_sent_again_and_what_is_not_needed_is_removed(
    head: Head, objects: Objects
) -> None:
    head.begin()
    (head.run / "metrics.jsonl").write_bytes(bytes(2 * SMALL_CHUNK_BYTES))  # two equal chunks
    head.checkpoint(1)
    head.replicator.sync()
    sent, serial = head.replicator.sender.sent.requests, head.replicator.newest.serial
    head.replicator.sync()
    assert (head.replicator.sender.sent.requests, head.replicator.newest.serial) == (sent, serial)
    for iteration in range(2, 5):
        head.checkpoint(iteration)
        head.replicator.sync()
    there = set(objects.names(CHUNKS))
    held = head.replicator.newest.chunks | head.replicator._before[0] | head.replicator._garbage
    assert head.replicator.newest.chunks <= there <= held
    assert len(there) < 20


def test_of_two_heads_the_later_counts_and_harms_nothing_of_the_earlier(
    head: Head, objects: Objects, tmp_path: Path
) -> None:
    head.begin()
    head.checkpoint(1)
    head.replicator.sync()
    later = Head(tmp_path / "two", objects, OTHER)
    assert later.base.epoch == head.base.epoch + 1
    assert later.base.files == head.replicator.newest.files
    head.checkpoint(2)
    with pytest.raises(FencedError, match="another head has taken this run over"):
        head.replicator.sync()
    newest = newest_snapshot(objects)
    assert newest == later.base


def test_a_new_head_sends_what_was_sent_and_not_named_only_once(
    head: Head, objects: Objects, tmp_path: Path
) -> None:
    head.begin()
    head.checkpoint(1)
    with consistent_files(head.run, tmp_path / "backup") as files:
        head.replicator.sender.send(files)  # and then it is killed
    again = Head(tmp_path / "again", objects, ONE)
    again.run.rmdir()
    head.run.rename(again.run)
    again.replicator.sync()
    assert again.replicator.sender.sent.requests <= 1  # the copy of the ledger may differ in its first page
    assert again.replicator.newest.files


def test_chunks_that_are_garbage_are_not_taken_for_ones_that_are_there(
    head: Head, objects: Objects, tmp_path: Path
) -> None:
    head.begin()
    head.checkpoint(1)
    head.replicator.sync()
    newest = head.replicator.newest
    weights = newest.files["checkpoints/000001-iteration-000001/weights"].chunks[0]
    gone = RunSnapshot(newest.serial + 1, newest.epoch, ONE, {}, (weights,))
    head.replicator._append(gone)
    head.replicator.newest = gone
    objects.put(f"{CHUNKS}/{weights}", b"about to be removed by the head before")
    later = Head(tmp_path / "two", objects, OTHER)
    later.replicator._gone.add(weights)
    later.begin()
    later.checkpoint(1)
    later.replicator.sync()
    assert weights not in later.replicator.newest.chunks


def test_a_snapshot_whose_answer_was_lost_fences_nobody(tmp_path: Path) -> None:
    class Unanswered(Objects):
        loses = False

        def create(self, name: str, content: bytes) -> bool:
            made = super().create(name, content)
            if self.loses:
                self.loses = False
                raise BucketError("the connection was lost before the answer")
            return made

    objects = Unanswered(MemoryStore(), "s3://bucket/demo")
    head = Head(tmp_path / "one", objects, ONE)
    head.begin()
    head.checkpoint(1)
    objects.loses = True
    with pytest.raises(BucketError, match="before the answer"):
        head.replicator.sync()
    (head.run / "metrics.jsonl").write_text("{}\n")  # the run goes on meanwhile
    head.replicator._looks_again = True
    assert head.replicator.sync()
    newest = newest_snapshot(objects)
    assert newest is not None
    assert newest == head.replicator.newest
    assert "metrics.jsonl" in newest.files


def test_a_snapshot_that_nobody_could_read_is_not_written(
    head: Head, objects: Objects, monkeypatch: pytest.MonkeyPatch
) -> None:
    head.begin()
    assert head.replicator.sync()
    monkeypatch.setattr(snapshots, "_SNAPSHOT_BYTES_MAX", len(render(head.replicator.newest)) + 100)
    before = newest_snapshot(objects)
    for index in range(9):
        (head.run / f"note-{index}").write_text(str(index))
    with pytest.raises(StoreError, match="or nobody could read it") as raised:
        head.replicator.finish(patience_s=3600.0)  # no other try would help
    assert not isinstance(raised.value, BucketError)
    assert newest_snapshot(objects) == before


def test_a_head_renews_its_lease_while_it_brings_a_run_and_while_it_sends_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Slow(Objects):
        looked = 0

        def get(self, name: str, bytes_max: int) -> tuple[bytes, Version] | None:
            self._wait(name)
            return super().get(name, bytes_max)

        def put(self, name: str, content: bytes) -> None:
            self._wait(name)
            super().put(name, content)

        def _wait(self, name: str) -> None:
            if name.startswith(CHUNKS):
                self.looked += 1
                before, ends_s = holder_of(self), time.monotonic() + 5
                while holder_of(self) == before:
                    assert time.monotonic() < ends_s, "another head may take the run over meanwhile"
                    time.sleep(0.01)

    objects = Slow(MemoryStore(), "s3://bucket/runs/demo")
    monkeypatch.setattr(bucket_runs, "open_objects", lambda address: objects)
    monkeypatch.setattr(replicator, "RENEWED_EVERY_S", 0.02)
    with BUCKET_RUNS.work("s3://bucket/runs", "demo", tmp_path / "one", quiet) as runs_dir:
        (runs_dir / "demo").mkdir()
        (runs_dir / "demo" / "config.yaml").write_text("name: demo")
    sent = objects.looked
    with BUCKET_RUNS.work("s3://bucket/runs", "demo", tmp_path / "two", quiet) as runs_dir:
        assert (runs_dir / "demo" / "config.yaml").is_file()
    assert objects.looked > sent > 0
    holder = holder_of(objects)
    assert holder is not None
    assert holder.released


def test_a_copy_from_which_another_machine_went_on_is_replaced(
    head: Head, objects: Objects, tmp_path: Path
) -> None:
    head.begin()
    head.replicator.sync()
    notes: list[str] = []
    with working_copy(tmp_path / "two", "demo") as copy:
        bring_to_work(copy, head.replicator.newest, objects, notes.append)
        (copy.run / "mine").write_text("later")
        own = RunSnapshot(9, 1, copy.id, head.replicator.newest.files)
        bring_to_work(copy, own, objects, notes.append)
        assert (copy.run / "mine").exists()
        bring_to_work(copy, head.replicator.newest, objects, notes.append)
        assert not (copy.run / "mine").exists()
    assert sum("where the run went on" in note for note in notes) == 1


def test_a_disk_that_was_restored_is_brought_up_to_the_bucket(objects: Objects, tmp_path: Path) -> None:
    with working_copy(tmp_path, "demo") as copy:
        pass
    machine = tmp_path / "work"
    head = Head(machine, objects, copy.id)
    head.begin()
    head.checkpoint(1)
    head.replicator.sync()
    shutil.copytree(machine, tmp_path / "saved")
    head.checkpoint(2)
    head.replicator.sync()
    shutil.rmtree(machine)
    (tmp_path / "saved").rename(machine)
    with working_copy(tmp_path, "demo") as copy:
        bring_to_work(copy, head.replicator.newest, objects, quiet)
        newest = CheckpointStore(RunPaths(copy.run).checkpoints, keep=2).newest_header()
        assert newest is not None
        assert newest.iteration == 2
        bring_to_work(copy, head.replicator.newest, objects, lambda note: pytest.fail(note))


def test_one_process_of_a_machine_has_the_working_copy(tmp_path: Path) -> None:
    with (
        working_copy(tmp_path, "demo"),
        pytest.raises(RunInUseError, match="another process of this machine"),
        working_copy(tmp_path, "demo"),
    ):
        pass


def test_a_head_that_renews_its_lease_is_alive_and_one_that_does_not_is_waited_for(
    objects: Objects,
) -> None:
    first = claim(objects, ONE, quiet)

    def renew() -> None:
        assert first.renew()

    with pytest.raises(RunInUseError, match="has just renewed its lease"):
        claim(objects, OTHER, quiet, sleep=lambda s: renew())
    notes: list[str] = []
    second = claim(objects, OTHER, notes.append, lease_s=0)
    assert second.holder.epoch == 2
    assert not first.renew()
    second.release()
    assert claim(objects, ONE, notes.append).holder.epoch == 3
    assert claim(objects, ONE, notes.append).holder.epoch == 4  # its own: the process before is gone
    assert not notes


def test_a_run_that_is_let_go_while_it_is_waited_for_is_taken(objects: Objects) -> None:
    first = claim(objects, ONE, quiet)
    assert claim(objects, OTHER, quiet, sleep=lambda s: first.release()).holder.epoch == 2


def test_a_file_that_cannot_be_read_is_not_taken_for_one_that_is_gone(
    head: Head, objects: Objects, monkeypatch: pytest.MonkeyPatch
) -> None:
    head.begin()
    (head.run / "metrics.jsonl").write_text("a row")
    open_regular = run_files.open_regular

    def failing(path: Path) -> BinaryIO:
        if path.name == "metrics.jsonl":
            raise OSError(errno.EIO, "Input/output error", str(path))
        return open_regular(path)

    with head.replicator.sender:
        head.replicator.sync()
        monkeypatch.setattr(run_files, "open_regular", failing)
        (head.run / "summary.json").write_text("{}")
        with pytest.raises(StoreError, match=r"Input/output error.*metrics.jsonl.*Check the disk"):
            head.replicator.finish(0)
    there = newest_snapshot(objects)
    assert there is not None
    assert "metrics.jsonl" in there.files


def test_a_ledger_that_is_left_of_another_run_is_not_sent(head: Head, objects: Objects) -> None:
    head.begin()
    with head.replicator.sender:
        head.replicator.sync()
        head.ledger.unlink()
        (head.run / "metrics.jsonl").write_text("a row")
        head.replicator.sync()
    there = newest_snapshot(objects)
    assert there is not None
    assert set(there.files) == {"config.yaml", "metrics.jsonl"}


def test_a_disk_that_fails_for_a_moment_does_not_end_the_sending(
    head: Head, objects: Objects, monkeypatch: pytest.MonkeyPatch
) -> None:
    head.begin()
    monkeypatch.setattr(replicator, "_LOOKS_EVERY_S", 0.01)
    monkeypatch.setattr(replicator, "_PATIENCE_S", (0.01, 0.01))
    failures, pointer_of = [OSError(errno.ESTALE, "Stale file handle")], replicator.pointer_of

    def failing(run: Path) -> bytes:
        if failures:
            raise failures.pop()
        return pointer_of(run)

    with head.replicator.sender, head.replicator.running(lambda: None):
        _until(lambda: head.replicator.newest.serial == head.base.serial + 1)
        monkeypatch.setattr(replicator, "pointer_of", failing)
        _until(lambda: not failures)
        head.checkpoint(1)
        _until(lambda: head.replicator.newest.serial == head.base.serial + 2)


def _until(holds: Callable[[], bool], limit_s: float = 20.0) -> None:
    end_s = time.monotonic() + limit_s
    while not holds():
        assert time.monotonic() < end_s
        time.sleep(0.01)


def test_an_epoch_is_above_those_of_snapshots_though_the_lease_is_gone(head: Head, objects: Objects) -> None:
    head.begin()
    head.replicator.sync()
    objects.delete([HEAD])
    assert claim(objects, OTHER, quiet, after=7).holder.epoch == 8


def _with(**keys: object) -> Callable[[dict[str, object]], dict[str, object]]:
    return lambda tree: {**tree, **keys}


def _file(path: str, size_bytes: object = 0, chunks: object = ()) -> dict[str, object]:
    return {path: {"size_bytes": size_bytes, "chunks": chunks}}


@pytest.mark.parametrize(
    "spoil",
    [
        _with(files=_file("../escape")),
        _with(files=_file("/etc/passwd")),
        _with(files=_file("a//b")),
        _with(files=_file("a\\b")),
        _with(files=_file("a\x1b[2J")),
        _with(files=_file("x" * 300)),
        _with(files=_file("a") | _file("a/b")),
        _with(files=_file("a/" * 10_000 + "a")),
        _with(files=_file("a", 10, [])),
        _with(files=_file("a", -1)),
        _with(files=_file("a", 1e300)),
        _with(files=_file("a", True, ["000001-" + "0" * 64])),
        _with(files=_file("a", 1, ["../../head.json"])),
        _with(files=[]),
        _with(garbage=["../config.yaml"]),
        _with(serial=2),
        _with(copy="../x"),
        _with(epoch="1"),
        lambda tree: {},
    ],
)
def test_a_snapshot_that_no_head_can_have_written_is_refused(
    objects: Objects, spoil: Callable[[dict[str, object]], dict[str, object]]
) -> None:
    good = {"serial": 1, "epoch": 1, "copy": ONE, "files": {}, "garbage": []}
    objects.put(name_of(1), json.dumps(good).encode())
    assert newest_snapshot(objects) is not None
    objects.put(name_of(1), json.dumps(spoil(good)).encode())
    with pytest.raises(BucketError, match="not a snapshot of a run"):
        newest_snapshot(objects)


@pytest.mark.parametrize("content", [b"other content", b"far too long" * 100, None])
def test_a_chunk_that_is_not_what_it_is_named_for_is_refused(
    head: Head, objects: Objects, tmp_path: Path, content: bytes | None
) -> None:
    head.begin()
    head.replicator.sync()
    (chunk,) = head.replicator.newest.files["config.yaml"].chunks
    objects.delete([f"{CHUNKS}/{chunk}"])
    if content is not None:
        objects.put(f"{CHUNKS}/{chunk}", content)
    with (
        working_copy(tmp_path / "two", "demo") as copy,
        pytest.raises(BucketError, match=r"no such object|expected|larger than"),
    ):
        bring_to_work(copy, head.replicator.newest, objects, quiet)
    assert not (tmp_path / "two" / "work" / "demo").exists()
