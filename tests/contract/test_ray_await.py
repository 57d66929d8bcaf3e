"""What of Ray's references the head relies on when it awaits them: see ``spotlight.cluster.remote_calls``."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator

import pytest
import ray
from ray.exceptions import RayActorError, RayTaskError

from spotlight.cluster.local.local_cluster import local_cluster
from spotlight.cluster.nodes.connection import connected
from spotlight.cluster.remote_calls import NoAnswerError, answer
from spotlight.store.store_errors import StoreError


@pytest.fixture(scope="module", autouse=True)
def _cluster() -> Iterator[None]:
    with local_cluster(1) as cluster, connected(cluster.address):
        yield


@ray.remote(num_cpus=0, max_concurrency=4)
class Answering:
    def quick(self) -> str:
        return "told"

    def slow(self, seconds: float) -> str:
        time.sleep(seconds)
        self.finished = seconds
        return "told late"

    def last_finished(self) -> float:
        return getattr(self, "finished", 0.0)

    def fail(self) -> None:
        raise StoreError("no space left")


async def scene() -> None:
    actor = Answering.remote()
    assert await answer(actor.quick.remote(), "a call", 60.0) == "told"

    with pytest.raises(StoreError, match="no space left") as failed:
        await answer(actor.fail.remote(), "a call", 60.0)
    assert isinstance(failed.value, RayTaskError)
    assert isinstance(failed.value.cause, StoreError)  # type: ignore[attr-defined]

    # A caller that gives up a call, by its deadline or by being cancelled, neither ends it nor disturbs Ray.
    with pytest.raises(NoAnswerError, match=r"a call: no answer within 0\.2 s"):
        await answer(actor.slow.remote(1.5), "a call", 0.2)
    asking = asyncio.create_task(answer(actor.slow.remote(1.6), "a call", 60.0))
    await asyncio.sleep(0.2)
    asking.cancel()
    await asyncio.wait({asking})
    assert asking.cancelled()
    give_up_s = time.monotonic() + 30
    while await answer(actor.last_finished.remote(), "a call", 60.0) < 1.5:
        assert time.monotonic() < give_up_s, "a call that nobody waits for is not made"
        await asyncio.sleep(0.1)

    # An open call fails as soon as its actor is dead; so does every later one.
    hanging = asyncio.create_task(answer(actor.slow.remote(600.0), "a call", 60.0))
    await asyncio.sleep(0.2)
    ray.kill(actor)
    with pytest.raises(RayActorError):
        await hanging
    with pytest.raises(RayActorError):
        await answer(actor.quick.remote(), "a call", 60.0)


def test_references_are_awaited_with_deadlines_in_the_driver_s_process() -> None:
    asyncio.run(scene())
