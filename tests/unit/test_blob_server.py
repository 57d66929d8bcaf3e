"""The blob server: values first, then events, in each sender's order, nobody waits for another's disk."""

from __future__ import annotations

import asyncio
import pickle
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any, TypeAlias

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spotlight.cluster.blobs.blob_server import BlobServer, Delivered
from spotlight.cluster.blobs.blob_store import BlobStore, StoredBlob
from spotlight.scheduler.events import GroupFormed, GroupStopped
from spotlight.scheduler.types import WorkerId
from spotlight.worker.reports import Report, ReportedValue
from spotlight_rewards.base.file_errors import StoreError

A, B = WorkerId("node-a/0"), WorkerId("node-b/0")
SOON_S = 5.0


def stored(store: BlobStore) -> int:
    """How many values it has."""
    return sum(len(versions) for names in store._index.kinds.values() for versions in names.values())


def report(sender: WorkerId, number: int, *values: ReportedValue, mark: str = "m") -> Report:
    return Report(sender, mark, values, (GroupFormed(sender, number), GroupStopped(sender, number)))


def progress(name: str, step: int = 0, size: int = 10) -> ReportedValue:
    return ReportedValue("progress", name, b"x" * size, step)


Scene: TypeAlias = Callable[[BlobServer, BlobStore], Coroutine[Any, Any, None]]


def played(scene: Scene, path: Path, **limits: int) -> None:
    """Run a scene with a blob server of its own."""

    async def play() -> None:
        server = BlobServer(path, limits.pop("memory_bytes", 1000), **limits)
        async with asyncio.timeout(20):
            await scene(server, server._store)
        await server.close()

    asyncio.run(play())


def test_values_are_there_when_their_events_are(tmp_path: Path) -> None:
    async def scene(server: BlobServer, store: BlobStore) -> None:
        # Too large for the memory, so that keeping takes a while.
        values = [progress(f"r{i}", 3, 200_000) for i in range(20)]
        delivering = asyncio.create_task(server.deliver(report(A, 1, *values)))
        taken = await server.take(SOON_S)
        kept = [store.get("progress", f"r{i}", "m") for i in range(20)]
        assert all(each and each.step == 3 for each in kept)
        assert taken == [Delivered(event, "m", store.puts) for event in report(A, 1).events]
        await delivering
        assert await server.fetch("progress", ["r4", "other"], "m") == [StoredBlob(3, b"x" * 200_000), None]
        assert await server.fetch("progress", ["r4"]) == [None]

    played(scene, tmp_path)


def test_a_report_that_could_not_be_kept_leaves_no_event(tmp_path: Path) -> None:
    async def scene(server: BlobServer, store: BlobStore) -> None:
        await server.deliver(report(A, 1, progress("old")))
        folder = store._folder.path
        folder.rename(folder.with_name("away"))  # as if the disk were gone; root may write anywhere
        with pytest.raises(StoreError, match="cannot keep progress of r2 at step 1"):
            await server.deliver(report(A, 2, progress("r1", 1), progress("r2", 1, 500)))
        with pytest.raises(StoreError, match="cannot keep progress of r2 at step 1"):
            await server.take(0)  # the head hears of it too: senders only die of it
        folder.with_name("away").rename(folder)
        await server.deliver(report(A, 3, progress("r2", 1, 500)))
        events = [delivered.event for delivered in await server.take(0)]
        assert events == [*report(A, 1).events, *report(A, 3).events]
        assert None not in await server.fetch("progress", ["old", "r1", "r2"], "m")

    played(scene, tmp_path)


@settings(max_examples=20)
@given(plan=st.lists(st.tuples(st.sampled_from([A, B]), st.sampled_from([0, 1, 400])), max_size=25))
def test_each_sender_is_heard_in_its_order(
    plan: list[tuple[WorkerId, int]], tmp_path_factory: pytest.TempPathFactory
) -> None:
    async def scene(server: BlobServer, store: BlobStore) -> None:
        sent = [
            report(sender, i, *([progress(f"r{i % 4}", i, size)] if size else []))
            for i, (sender, size) in enumerate(plan)
        ]
        delivering = [asyncio.create_task(server.deliver(one)) for one in sent]
        taken: list[Delivered] = []
        while len(taken) < 2 * len(plan):
            taken += await server.take(SOON_S)
        await asyncio.gather(*delivering)
        for sender in (A, B):
            expected = [event for one in sent if one.worker == sender for event in one.events]
            assert [each.event for each in taken if each.event in expected] == expected

    played(scene, tmp_path_factory.mktemp("blobs"), memory_bytes=500)


def test_a_slow_disk_holds_up_its_sender_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def scene(server: BlobServer, store: BlobStore) -> None:
        writing, go_on = threading.Event(), threading.Event()
        write = store._folder.write

        def slow(data: bytes, label: str) -> Path:
            writing.set()
            assert go_on.wait(10)
            return write(data, label)

        monkeypatch.setattr(store._folder, "write", slow)
        first = asyncio.create_task(server.deliver(report(A, 1, progress("large", 0, 900))))
        await asyncio.to_thread(writing.wait, 10)
        second = asyncio.create_task(server.deliver(report(A, 2)))  # needs no disk, but comes after the first
        await server.deliver(report(B, 1, progress("small")))
        assert [delivered.event for delivered in await server.take(SOON_S)] == [*report(B, 1).events]
        assert await server.fetch("progress", ["small", "large"], "m") == [StoredBlob(0, b"x" * 10), None]
        assert not first.done()
        assert not second.done()
        go_on.set()
        await asyncio.gather(first, second)
        assert [delivered.event for delivered in await server.take(SOON_S)] == [
            *report(A, 1).events,
            *report(A, 2).events,
        ]

    played(scene, tmp_path)


def test_a_question_is_answered_at_once_or_when_its_time_is_over(tmp_path: Path) -> None:
    async def scene(server: BlobServer, store: BlobStore) -> None:
        began = time.monotonic()
        assert await server.take(0.1) == []
        assert time.monotonic() - began >= 0.1
        assert await server.take(0) == []
        asking = asyncio.create_task(server.take(3600.0))
        await asyncio.sleep(0)  # it waits
        await server.deliver(report(A, 1))
        await server.deliver(report(B, 1))
        assert len(await asking) in (2, 4)
        # A question that is given up takes nothing with it.
        await server.take(0)
        asking = asyncio.create_task(server.take(SOON_S))
        await asyncio.sleep(0)
        asking.cancel()
        await server.deliver(report(A, 2))
        assert len(await server.take(0)) == 2

    played(scene, tmp_path)


def test_a_head_that_stands_still_makes_deliveries_wait_their_values_safe(tmp_path: Path) -> None:
    async def scene(server: BlobServer, store: BlobStore) -> None:
        delivering = [
            asyncio.create_task(server.deliver(report(WorkerId(f"w{i % 3}"), i, progress(f"r{i}"))))
            for i in range(9)
        ]
        while stored(store) < 5:  # two reports are in the box, one of each sender waits
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.05)
        assert sum(task.done() for task in delivering) == 2
        assert stored(store) == 5
        received = await server.take(0)
        assert len(received) == 4
        while len(received) < 18:
            taken = await server.take(SOON_S)
            assert 0 < len(taken) <= 4
            received += taken
        await asyncio.gather(*delivering)

    played(scene, tmp_path, mailbox_events=3)


def test_everything_else_is_the_vaults(tmp_path: Path) -> None:
    async def scene(server: BlobServer, store: BlobStore) -> None:
        await server.put("weights", "digest", b"w" * 3000)
        await server.put("weights", "digest", b"w" * 3000)
        await server.put("progress", "r1", b"s")
        assert stored(store) == 2
        await server.drop("weights", ["digest", "never there"])
        assert await server.keep_only("progress", ["r2"]) == 1
        assert stored(store) == 0

    played(scene, tmp_path)
    with pytest.raises(ValueError, match="mailbox_events is 0"):
        BlobServer(tmp_path, 0, mailbox_events=0)


def test_senders_that_left_leave_nothing_behind(tmp_path: Path) -> None:
    async def scene(server: BlobServer, store: BlobStore) -> None:
        for i in range(50):
            await server.deliver(report(WorkerId(f"w{i}"), i))
        assert len(server._turns) == 0

    played(scene, tmp_path)


def test_the_blob_stores_process_starts_without_torch() -> None:
    program = (
        "import sys, spotlight.cluster.blobs.blob_server\n"
        "print({'torch', 'ray', 'diffusers'} & set(sys.modules))"
    )
    assert subprocess.check_output([sys.executable, "-c", program], text=True) == "set()\n"


@pytest.mark.parametrize(
    "thing", [progress("r1", 3, 1000), StoredBlob(3, b"x" * 1000)], ids=["value", "kept"]
)
def test_values_are_pickled_beside_their_bytes_which_become_our_own(
    thing: ReportedValue | StoredBlob,
) -> None:
    for protocol in range(2, 6):
        assert pickle.loads(pickle.dumps(thing, protocol)) == thing
    buffers: list[pickle.PickleBuffer] = []
    packed = pickle.dumps(thing, protocol=5, buffer_callback=buffers.append)
    assert len(packed) < 300
    assert [bytes(buffer) for buffer in buffers] == [thing.data]
    lent = bytearray(thing.data)  # memory of the transport, which may use it for something else
    back = pickle.loads(packed, buffers=[memoryview(lent)])
    lent[:] = bytes(len(lent))
    assert back == thing
    assert type(back.data) is bytes
