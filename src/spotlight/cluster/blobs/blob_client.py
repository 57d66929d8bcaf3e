"""Clients of the blob store. Calls have deadlines, and to the head a silent store is fatal."""

from __future__ import annotations

from collections.abc import Awaitable, Collection, Sequence
from dataclasses import dataclass
from pickle import PickleBuffer
from typing import Any, TypeVar

from spotlight.cluster.blobs.blob_server import Delivered
from spotlight.cluster.blobs.blob_store import StoredBlob
from spotlight.cluster.remote_calls import RayLostError, answer, cause_of
from spotlight.worker.reports import Report
from spotlight_rewards.base.file_errors import StoreError

T = TypeVar("T")
ANSWER_S = 120.0
"""Timeout for fetching images."""
TAKE_S = 20.0
"""Long-poll timeout for new reports; the store is presumed dead after twice as long."""


class BlobClient:
    """The head's client.

    Attributes:
        puts: of the store, as of the last event taken. What is put for work issued later comes after them.

    Methods raise :class:`RayLostError` on silence, and StoreError if its disk is full or broken.
    """

    def __init__(self, actor: Any) -> None:
        self._actor = actor
        self.puts = 0

    async def take(self) -> list[Delivered]:
        """Events delivered by workers, in each worker's order; empty on timeout."""
        asked: Awaitable[list[Delivered]] = self._actor.take.remote(TAKE_S)
        delivered = await self._ask(asked, "reports of workers", 2 * TAKE_S)
        if delivered:
            self.puts = delivered[-1].puts
        return delivered

    async def fetch(self, kind: str, names: Sequence[str], weights_digest: str) -> list[StoredBlob | None]:
        """Latest step of each named blob; None where missing."""
        what = f"{kind}s of {len(names)} rollouts"
        return await self._ask(self._actor.fetch.remote(kind, list(names), weights_digest), what)

    async def put(self, kind: str, name: str, data: bytes) -> None:
        """Store a blob."""
        await self._ask(self._actor.put.remote(kind, name, data), f"storing {kind} {name}")

    async def drop(self, kind: str, names: Sequence[str], last_put: int | None = None) -> None:
        """Delete blobs; see :meth:`BlobStore.drop`."""
        await self._ask(self._actor.drop.remote(kind, list(names), last_put), f"dropping {kind}s")

    async def keep_only(self, kind: str, names: Collection[str], last_put: int) -> None:
        """Delete all blobs of a kind except ``names``; see :meth:`BlobStore.drop`."""
        await self._ask(self._actor.keep_only.remote(kind, set(names), last_put), f"sweeping {kind}s")

    async def _ask(self, reference: Awaitable[T], what: str, deadline_s: float = ANSWER_S) -> T:
        try:
            return await answer(reference, what, deadline_s)
        except Exception as error:
            cause = getattr(error, "cause", None)  # Ray wraps what an actor raised
            if isinstance(cause, StoreError):
                raise cause from None
            raise RayLostError(
                "the blob store's process, or the Ray node under it, is dead "
                f"({type(error).__name__}: {cause_of(error)})"
            ) from error


@dataclass(frozen=True, slots=True)
class BlockingBlobClient:
    """The client of workers and learner ranks; can be sent to them.

    Methods raise the store's own errors, or Ray's: GetTimeoutError after ``answer_s``, RayActorError.
    """

    actor: Any
    answer_s: float

    def deliver(self, report: Report) -> None:
        """Store a report's values, then pass on its events."""
        self._get(self.actor.deliver.remote(report))

    def fetch(self, kind: str, names: Sequence[str], weights_digest: str = "") -> list[StoredBlob | None]:
        """Latest step of each named blob; None where missing."""
        return self._get(self.actor.fetch.remote(kind, list(names), weights_digest))

    def put(self, kind: str, name: str, data: bytes | bytearray) -> None:
        """Store a blob."""
        self._get(self.actor.put.remote(kind, name, PickleBuffer(data)))  # the transport's only copy

    def file_sizes(self, folder: str) -> dict[str, int]:
        """Of files in the run directory; see :class:`~spotlight.cluster.blobs.run_files.RunFiles`."""
        return self._get(self.actor.file_sizes.remote(folder))

    def read_file(self, path: str, start: int, length: int) -> bytes:
        """A piece of one."""
        piece: bytes = self._get(self.actor.read_file.remote(path, start, length))
        return piece

    def write_file(self, path: str, start: int, data: bytes) -> None:
        """Write a piece of one."""
        self._get(self.actor.write_file.remote(path, start, PickleBuffer(data)))

    def _get(self, reference: Awaitable[T]) -> T:
        import ray

        try:
            value: T = ray.get(reference, timeout=self.answer_s)
            return value
        except ray.exceptions.RayTaskError as error:
            raise error.cause from None
