"""Samples made again outlive the deletion of those they replace, whichever the store hears of first."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from spotlight.cluster.blobs.blob_client import BlobClient
from spotlight.cluster.blobs.blob_server import BlobServer
from spotlight.cluster.blobs.blob_store import StoredBlob
from spotlight.cluster.sample_scoring import AcceptedSamples
from spotlight.scheduler import events as ev
from spotlight.scheduler.types import RolloutId, WorkerId
from spotlight.worker.reports import Report, ReportedValue

WORKER, EVALUATED = WorkerId("w"), RolloutId("e000002-000-000")


class Actor:
    """The server's methods, called as Ray's actors are; deleting pictures waits for ``meanwhile``."""

    def __init__(self, server: BlobServer, meanwhile: Callable[[], Coroutine[Any, Any, None]]) -> None:
        self._server, self._meanwhile = server, meanwhile

    def __getattr__(self, name: str) -> Any:
        async def call(*args: Any) -> Any:
            if name in ("drop", "keep_only") and args[0] == "image":
                await self._meanwhile()
            return await getattr(self._server, name)(*args)

        return SimpleNamespace(remote=lambda *args: asyncio.ensure_future(call(*args)))


async def nothing() -> None: ...


@pytest.mark.parametrize("deletes", ["drop", "sweep"])
@pytest.mark.parametrize("made_again", [False, True])
def test_only_values_from_before_they_were_discarded_are_deleted(
    tmp_path: Path, deletes: str, made_again: bool
) -> None:
    async def scene() -> list[StoredBlob | None]:
        server = BlobServer(tmp_path, 1000)

        async def make() -> None:
            value = ReportedValue("image", EVALUATED, b"picture")
            await server.deliver(Report(WORKER, "digest", (value,), (ev.GroupFormed(WORKER, 1),)))

        samples = AcceptedSamples(BlobClient(Actor(server, make if made_again else nothing)))
        await make()
        await samples.store.take()
        samples.accept([EVALUATED], "digest")
        samples.forget([EVALUATED])
        await (samples.drop([EVALUATED], samples.store.puts) if deletes == "drop" else samples.sweep([]))
        return await samples.store.fetch("image", [EVALUATED], "digest")

    assert asyncio.run(scene()) == [StoredBlob(0, b"picture") if made_again else None]
