"""What the head asks over a real Ray: of the blob store, and whatever it awaits with a deadline.

What a sender got acknowledged outlives it; the head hears at once.
"""

from __future__ import annotations

import asyncio
import os
import signal
import statistics
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from own_ray import own_ray
from ray.exceptions import RayActorError, RayTaskError

from spotlight.cluster.blobs.blob_server import start_blob_store
from spotlight.cluster.blobs.blob_store import StoredBlob
from spotlight.cluster.remote_calls import NoAnswerError, answer
from spotlight.scheduler.events import LeaseProgressed
from spotlight.scheduler.types import LeaseId, WorkerId
from spotlight.worker.reports import Report, ReportedValue
from spotlight_rewards.base.file_errors import StoreError

ray = pytest.importorskip("ray")

MARK = "digest of the weights"
SENDER = WorkerId("node/0")
MEMORY = 1_000_000
STATE_BYTES = 120_000
"""Eight fit into the blob store's memory; larger than what Ray sends along with a call."""
ANSWER_S = 120.0


@pytest.fixture(scope="module")
def node() -> Iterator[str]:
    """A local Ray of this test's own; its node's id."""
    with own_ray(1) as node_id:
        yield node_id


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("values")


@pytest.fixture(scope="module")
def store(node: str, directory: Path) -> Any:
    return start_blob_store(directory, MEMORY, node=node)


def progress(rollout: int, step: int) -> ReportedValue:
    return ReportedValue(
        "progress", f"r{rollout}", f"{rollout} {step} ".encode().ljust(STATE_BYTES, b"x"), step
    )


def committed(step: int, *rollouts: int) -> Report:
    """What a worker reports after a step."""
    event = LeaseProgressed(SENDER, LeaseId(1), 1, step)
    return Report(SENDER, MARK, tuple(progress(rollout, step) for rollout in rollouts), (event,))


def make_sender(store: Any) -> Any:
    """A process of its own that delivers."""

    # Defined here, so that Ray sends it by value: its processes cannot import this file.
    class Sender:
        def pid(self) -> int:
            return os.getpid()

        def deliver(self, store: Any, report: Report) -> float:
            """When the call was made."""
            began = time.monotonic()
            ray.get(store.deliver.remote(report), timeout=30)
            return began

        def deliver_until_killed(self, store: Any, reports: list[Report], path: str) -> None:
            for number, report in enumerate(reports):
                ray.get(store.deliver.remote(report), timeout=30)
                Path(path).write_text(str(number), encoding="utf-8")

    return ray.remote(Sender).options(num_cpus=0).remote()


def take(store: Any, timeout_s: float = ANSWER_S) -> Any:
    return ray.get(store.take.remote(timeout_s), timeout=2 * ANSWER_S)


def fetch(store: Any, names: list[str]) -> list[StoredBlob | None]:
    kept: list[StoredBlob | None] = ray.get(store.fetch.remote("progress", names, MARK), timeout=ANSWER_S)
    return kept


def test_what_was_acknowledged_outlives_a_killed_sender(store: Any, tmp_path: Path) -> None:
    sender, written = make_sender(store), tmp_path / "acknowledged"
    pid = ray.get(sender.pid.remote(), timeout=ANSWER_S)
    # Twelve rollouts in turn: the older half is on disk when the sender dies.
    reports = [committed(step, step % 12, (step + 1) % 12) for step in range(200)]
    running = sender.deliver_until_killed.remote(store, reports, str(written))
    while not written.exists() or int(written.read_text() or 0) < 20:
        time.sleep(0.005)
    os.kill(pid, signal.SIGKILL)
    with pytest.raises(ray.exceptions.RayActorError):
        ray.get(running, timeout=ANSWER_S)

    received = [delivered.event.steps for delivered in take(store)]
    acknowledged = int(written.read_text() or 20)  # empty if it died in the midst of writing it
    assert received == list(range(len(received)))
    assert acknowledged < len(received) < 200  # the last may have come without its answer having gone out
    last = received[-1]
    expected = {}
    for step in received:
        expected |= {f"r{step % 12}": step, f"r{(step + 1) % 12}": step}
    for name, kept in zip(expected, fetch(store, list(expected)), strict=True):
        assert kept is not None
        assert kept.step in (expected[name], last + 1)  # values of a report come before its event
        assert kept.data.startswith(f"{name[1:]} {kept.step} ".encode())


def test_the_head_hears_at_once(store: Any) -> None:
    sender = make_sender(store)
    take(store, 0)
    ray.get(sender.deliver.remote(store, committed(0, 1)), timeout=ANSWER_S)  # its process is up
    take(store)
    waits = []
    for step in range(1, 21):
        ray.get(sender.deliver.remote(store, committed(100 + step, 1)), timeout=ANSWER_S)
        assert len(ray.get(store.take.remote(0.0), timeout=ANSWER_S)) == 1
        question = store.take.remote(3600.0)
        time.sleep(0.01)  # so that it mostly waits there before there is something to take
        answer = sender.deliver.remote(store, committed(step, 1))
        (delivered,) = ray.get(question, timeout=ANSWER_S)
        now = time.monotonic()
        assert (delivered.event.steps, delivered.weights_digest) == (step, MARK)
        waits.append(now - ray.get(answer, timeout=ANSWER_S))
    median, most = (1000 * wait for wait in (statistics.median(waits), max(waits)))
    print(f"\nfrom delivery to the head: median {median:.1f} ms, max {most:.1f} ms")


def test_a_full_disk_is_the_senders_error_as_it_is(store: Any, directory: Path) -> None:
    (folder,) = directory.glob("blobs-*")
    folder.rename(folder.with_name("away"))  # as if the disk were gone
    large = Report(SENDER, MARK, (ReportedValue("weights", "digest", b"w" * MEMORY),), committed(1).events)
    with pytest.raises(StoreError, match=r"cannot keep weights of digest .* Nothing .* was lost"):
        ray.get(store.deliver.remote(large), timeout=ANSWER_S)
    with pytest.raises(StoreError, match="cannot keep weights of digest"):
        take(store, 0)  # the head hears of it too: senders only die of it
    folder.with_name("away").rename(folder)
    ray.get(store.deliver.remote(large), timeout=ANSWER_S)
    assert len(take(store)) == 1
    assert ray.get(store.keep_only.remote("weights", []), timeout=ANSWER_S) == 1


def test_a_blob_store_that_dies_is_heard_of_and_leaves_its_files_to_the_next(
    store: Any, directory: Path, node: str
) -> None:
    (folder,) = directory.glob("blobs-*")
    question = store.take.remote(3600.0)
    ray.kill(store)
    with pytest.raises(ray.exceptions.RayActorError):  # not GetTimeoutError
        ray.get(question, timeout=ANSWER_S)
    following = start_blob_store(directory, MEMORY, node=node)
    assert fetch(following, ["r1"]) == [None]
    assert not folder.exists()
    ray.get(following.close.remote(), timeout=ANSWER_S)
    assert list(directory.glob("blobs-*")) == []
    with pytest.raises(StoreError, match="the blob store is closed"):
        ray.get(following.put.remote("progress", "r1", b"x"), timeout=ANSWER_S)


# -- any call: see spotlight.cluster.remote_calls ------------------------------------------------------------


def make_answering() -> Any:
    """An actor that tells, fails or takes its time."""

    class Answering:
        def quick(self) -> str:
            return "in time"

        def __init__(self) -> None:
            self.go_on, self.finished = threading.Event(), 0

        def slow(self) -> str:
            self.go_on.wait()
            self.finished += 1
            return "late"

        def let_go_on(self, goes_on: bool) -> int:
            if goes_on:
                self.go_on.set()
            else:
                self.go_on.clear()
            return self.finished

        def fail(self) -> None:
            raise StoreError("no space left")

    return ray.remote(Answering).options(num_cpus=0, max_concurrency=4).remote()


async def calls() -> None:
    actor = make_answering()
    assert await answer(actor.quick.remote(), "a call", 60.0) == "in time"

    with pytest.raises(StoreError, match="no space left") as failed:
        await answer(actor.fail.remote(), "a call", 60.0)
    assert isinstance(failed.value, RayTaskError)
    assert isinstance(failed.value.cause, StoreError)  # type: ignore[attr-defined]

    # A caller that gives up a call, by its deadline or by being cancelled, neither ends it nor disturbs Ray.
    with pytest.raises(NoAnswerError, match=r"a call: no answer within 0\.2 s"):
        await answer(actor.slow.remote(), "a call", 0.2)
    asking = asyncio.create_task(answer(actor.slow.remote(), "a call", 3600.0))
    await asyncio.sleep(0)
    asking.cancel()
    await asyncio.wait({asking})
    assert asking.cancelled()
    give_up_s = time.monotonic() + 120
    while await answer(actor.let_go_on.remote(True), "a call", 60.0) < 2:
        assert time.monotonic() < give_up_s, "a call that nobody waits for is not made"
        await asyncio.sleep(0.05)
    await answer(actor.let_go_on.remote(False), "a call", 60.0)

    # An open call fails as soon as its actor is dead; so does every later one.
    hanging = asyncio.create_task(answer(actor.slow.remote(), "a call", 3600.0))
    await asyncio.sleep(0)
    ray.kill(actor)
    with pytest.raises(RayActorError):
        await hanging
    with pytest.raises(RayActorError):
        await answer(actor.quick.remote(), "a call", 60.0)


@pytest.mark.usefixtures("node")
def test_references_are_awaited_with_deadlines_in_the_driver_s_process() -> None:
    asyncio.run(calls())
