"""A node that follows the head of a run: real commands, and a lease in memory."""

from __future__ import annotations

import errno
import json
import socket
import threading
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

import pytest
from obstore.store import MemoryStore

from spotlight.store.run_summary import RunSummary, SampleCounts
from spotlight_bucket import follow_head
from spotlight_bucket.bucket_objects import BucketError, Objects
from spotlight_bucket.follow_head import FINISHED, follow, head_of
from spotlight_bucket.lease import HEAD, Holder, claim
from spotlight_bucket.snapshots import CHUNKS, RunSnapshot, StoredFile, append, chunk_name, take_over

COPY = "1" * 32
JOIN = ("bash", "-c", 'echo "$0" >>"$1"; sleep 60 & wait')


@pytest.fixture(autouse=True)
def _quickly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(follow_head, "_LOOKS_EVERY_S", 0.01)


@pytest.fixture
def heads() -> Iterator[list[str]]:
    """Addresses at which something listens."""
    listening = [socket.create_server(("127.0.0.1", 0)) for _ in range(2)]
    yield [f"127.0.0.1:{each.getsockname()[1]}" for each in listening]
    for each in listening:
        each.close()


def test_the_lease_tells_where_the_head_is_until_the_run_has_finished() -> None:
    objects = Objects(MemoryStore(), "s3://bucket/demo")
    assert head_of(objects) is None
    lease = claim(objects, COPY, print, address="10.0.0.5:6379")
    base = take_over(objects, lease.holder.epoch, COPY)
    assert lease.renew()
    assert head_of(objects) == "10.0.0.5:6379"
    lease.release()
    assert head_of(objects) is None, "it was stopped"
    for serial, (trained, planned) in enumerate([(2, 2), (2, 3), (3, 3)], base.serial + 1):
        texts = {"summary.json": summary_of(trained), "config.yaml": f"iterations: {planned}\n"}
        files = {name: stored(objects, text.encode()) for name, text in texts.items()}
        append(objects, RunSnapshot(serial, base.epoch, COPY, files))
        assert head_of(objects) == (FINISHED if trained == planned else None), "stopped, and not at its end"
    again = claim(objects, COPY, print, address="10.0.0.6:6379")
    assert again.holder.epoch == lease.holder.epoch + 1
    assert head_of(objects) == "10.0.0.6:6379", "it trains on"


def test_a_disk_without_room_for_the_summary_ends_no_follower(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def full() -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    objects = Objects(MemoryStore(), "s3://bucket/demo")
    lease = claim(objects, COPY, print)
    base = take_over(objects, lease.holder.epoch, COPY)
    files = dict.fromkeys(("summary.json", "config.yaml"), StoredFile(0, ()))
    append(objects, RunSnapshot(base.serial + 1, base.epoch, COPY, files))
    lease.release()
    monkeypatch.setattr(follow_head, "TemporaryDirectory", full)
    assert follow(lambda: head_of(objects), ["true"], 0.05, threading.Event()) == 1
    assert "cannot bring the run's summary" in capsys.readouterr().err


def summary_of(iterations: int) -> str:
    return json.dumps(
        asdict(RunSummary(iterations, (), None, 9.0, {}, 0.25, SampleCounts(10, 10, {}), None, 3))
    )


def stored(objects: Objects, content: bytes) -> StoredFile:
    chunk = chunk_name(1, content)
    objects.put(f"{CHUNKS}/{chunk}", content)
    return StoredFile(len(content), (chunk,))


@pytest.mark.parametrize("address", ["$(reboot):1", "10.0.0.5", "10.0.0.5:x", "a b:1"])
def test_what_is_no_address_gets_into_no_command(address: str) -> None:
    objects = Objects(MemoryStore(), "s3://bucket/demo")
    objects.put(HEAD, json.dumps(asdict(Holder(1, COPY, "here", address=address))).encode())
    with pytest.raises(BucketError, match="its address is"):
        head_of(objects)


@pytest.mark.parametrize("address", ["localhost", "ray://head:10001", "[fe80::1%eth0]:6379"])
def test_a_head_whose_own_address_is_none_of_a_cluster_keeps_its_lease(address: str) -> None:
    objects = Objects(MemoryStore(), "s3://bucket/demo")
    lease = claim(objects, COPY, print, address=address)
    assert lease.renew()
    assert head_of(objects) is None
    lease.release()
    assert claim(objects, COPY, print).holder.epoch == 2, "the next one starts"


@pytest.mark.parametrize("host", ["a..b", "a" * 64])
def test_a_head_whose_name_cannot_be_one_does_not_answer(host: str) -> None:
    assert follow(lambda: f"{host}:6379", JOIN, 0.0, threading.Event()) == 1


def test_a_command_that_is_not_here_is_refused_before_any_head_is_waited_for(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["follow_head", "s3://bucket/demo", "--", "launch/ray-strat.sh", "{}"])
    with pytest.raises(SystemExit):
        follow_head.main()
    assert "no command 'launch/ray-strat.sh'" in capsys.readouterr().err


def test_the_command_runs_beside_one_head_after_the_other(heads: list[str], tmp_path: Path) -> None:
    joined, told = tmp_path / "joined", threading.Event()

    def look() -> str | None:
        """The second head is there once the first was joined; the bucket fails once; then the run ends."""
        seen = joined.read_text().split() if joined.exists() else []
        if len(seen) == 1 and not told_of:
            told_of.append("a failure")
            raise BucketError("503")
        return [heads[0], heads[1], FINISHED][len(seen)]

    told_of: list[str] = []
    assert follow(look, [*JOIN, "{}", str(joined)], 0.0, told) == 0
    assert joined.read_text().split() == heads
    assert told_of


def test_without_a_head_that_answers_it_ends(heads: list[str], tmp_path: Path) -> None:
    command = [*JOIN, "{}", str(tmp_path / "joined")]
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        nobody = f"127.0.0.1:{closed.getsockname()[1]}"
        assert follow(lambda: nobody, command, 0.0, threading.Event()) == 1
    assert not (tmp_path / "joined").exists()


def test_told_to_end_it_ends_the_command(heads: list[str], tmp_path: Path) -> None:
    joined, told = tmp_path / "joined", threading.Event()

    def look() -> str | None:
        if joined.exists():
            told.set()
        return heads[0]

    assert follow(look, [*JOIN, "{}", str(joined)], 0.0, told) == 143
