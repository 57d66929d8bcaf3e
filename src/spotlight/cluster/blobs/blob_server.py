"""The blob store with a mailbox: worker values and events outlive the workers.

    worker ── deliver(values, events) ──► blobs            (memory, then disk)
                                      └─► mailbox ──► head ── take()
    learner, workers, head ◄── fetch() ── blobs

Invariants:
- An event enters the mailbox only after all values of its report are stored. If one cannot be, the report
  leaves no event and its sender gets the error.
- Events of one sender keep their order. Senders wait neither for each other nor for another's disk I/O.
- Each event is handed out once; the head has one ``take`` in flight at a time.
- The mailbox is bounded: with a stalled head (SIGSTOP, a long write), deliveries, and thus workers, wait with
  their values already stored.

Any put may evict to disk, so all run in threads; deliveries have their own, lest they wait for large reads.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast
from weakref import WeakValueDictionary

from spotlight.cluster.blobs.blob_store import BlobStore, StoredBlob
from spotlight.cluster.blobs.run_files import RunFiles
from spotlight.cluster.remote_calls import on_node
from spotlight.scheduler.events import Event
from spotlight.scheduler.types import WorkerId
from spotlight.worker.reports import Report, ReportedValue, RolloutSpeed, address
from spotlight_rewards.base.file_errors import StoreError

if TYPE_CHECKING:
    from ray.actor import ActorHandle

NEGATIVE = "negative"
"""Name of the negative prompt's embedding; prompt names are hexadecimal."""
TRACE = "trace"
"""Kind of the profiler's trace of a worker."""
MAILBOX_EVENTS = 65_536
"""Minutes of events from hundreds of workers; 10-20 MB."""
_DELIVERY_THREADS = 4
CONCURRENT_CALLS = 10_000
"""A waiting call (for events, for room) costs only a coroutine and must not block the next call."""


@dataclass(frozen=True, slots=True)
class Delivered:
    """An event for the head.

    Attributes:
        weights_digest: of the weights behind the event's values.
        puts: of the store, those of these values included.
    """

    event: Event | RolloutSpeed
    weights_digest: str
    puts: int


class BlobServer:
    """The actor's class; it also reads and writes the run directory for who does not share it.

    All methods belong to one event loop.

    Args:
        directory: for blobs on disk, on the actor's node, in the run directory.
        memory_bytes: limit of blobs in memory.
        mailbox_events: mailbox size beyond which deliveries wait.

    Raises StoreError if the directory is unusable.
    """

    def __init__(self, directory: Path, memory_bytes: int, mailbox_events: int = MAILBOX_EVENTS) -> None:
        if mailbox_events < 1:
            raise ValueError(f"mailbox_events is {mailbox_events}; expected at least 1")
        self._store, self._files = BlobStore(directory, memory_bytes), RunFiles(directory.parent)
        self._mailbox: list[Delivered] = []
        self._mailbox_events = mailbox_events
        self._threads = ThreadPoolExecutor(_DELIVERY_THREADS, "blob-delivery")
        self._filled, self._emptied = asyncio.Event(), asyncio.Event()
        self._failure: StoreError | None = None
        # Weak, so that locks of departed workers go away.
        self._turns: WeakValueDictionary[WorkerId, asyncio.Lock] = WeakValueDictionary()

    async def deliver(self, report: Report) -> None:
        """Store the report's values, then pass on its events.

        Raises StoreError if a value could not be stored; then no event was passed on. Values stored before it
        stay, which is harmless.
        """
        turn = self._turns.setdefault(report.worker, asyncio.Lock())
        async with turn:
            if report.values:
                loop = asyncio.get_running_loop()
                try:
                    await loop.run_in_executor(
                        self._threads, self._keep, report.values, report.weights_digest
                    )
                except StoreError as error:
                    self._failure = error
                    self._filled.set()
                    raise
            if report.events:
                while len(self._mailbox) >= self._mailbox_events:
                    self._emptied.clear()
                    await self._emptied.wait()
                puts = self._store.puts
                self._mailbox.extend(Delivered(each, report.weights_digest, puts) for each in report.events)
                self._filled.set()

    async def take(self, timeout_s: float) -> list[Delivered]:
        """Return all pending events once there is one; empty after ``timeout_s``.

        Raises StoreError if a delivery could not be stored: its sender merely dies, so the head must learn
        of it here.
        """
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                while not self._mailbox and self._failure is None:
                    self._filled.clear()
                    await self._filled.wait()
        if self._failure is not None:
            failure, self._failure = self._failure, None
            raise failure
        taken, self._mailbox = self._mailbox, []
        self._emptied.set()
        return taken

    async def fetch(
        self, kind: str, names: Sequence[str], weights_digest: str = ""
    ) -> list[StoredBlob | None]:
        """Latest step of each named blob; None where missing."""
        return await asyncio.to_thread(
            lambda: [self._store.get(kind, name, weights_digest) for name in names]
        )

    async def put(self, kind: str, name: str, data: bytes | memoryview) -> None:
        """Store one blob; see :meth:`BlobStore.put`. Raises StoreError."""
        # Copied, in the thread: a view's memory belongs to the transport.
        await asyncio.to_thread(lambda: self._store.put(kind, name, bytes(data)))

    async def drop(self, kind: str, names: Sequence[str], last_put: int | None = None) -> None:
        """Delete blobs under any weights digest."""
        await asyncio.to_thread(self._store.drop, kind, names, last_put)

    async def keep_only(self, kind: str, names: Collection[str], last_put: int | None = None) -> int:
        """Delete all blobs of a kind except ``names``; returns how many."""
        return await asyncio.to_thread(self._store.keep_only, kind, names, last_put)

    async def file_sizes(self, folder: str) -> dict[str, int]:
        """See :meth:`RunFiles.sizes`."""
        return await asyncio.to_thread(self._files.sizes, folder)

    async def read_file(self, path: str, start: int, length: int) -> bytes:
        """See :meth:`RunFiles.read`."""
        return await asyncio.to_thread(self._files.read, path, start, length)

    async def write_file(self, path: str, start: int, data: bytes | memoryview) -> None:
        """See :meth:`RunFiles.write`."""
        await asyncio.to_thread(self._files.write, path, start, data)

    async def close(self) -> None:
        """Delete all blobs, files included."""
        await asyncio.to_thread(self._threads.shutdown)
        await asyncio.to_thread(self._store.close)

    def _keep(self, values: Sequence[ReportedValue], weights_digest: str) -> None:
        for value in values:
            digest = address(weights_digest, value.suffix)
            self._store.put(value.kind, value.name, value.data, weights_digest=digest, step=value.step)


def start_blob_store(directory: Path, memory_bytes: int, *, node: str) -> ActorHandle[Any]:
    """Start the actor on Ray node ``node``; it ends with this process, or by ``ray.kill``.

    Returns at once: a startup error (an unusable directory) is raised by the first call.
    """
    import ray

    # A restarted store would be empty, so its death must be visible: `on_node` allows none.
    actor = ray.remote(BlobServer).options(**on_node(node), max_concurrency=CONCURRENT_CALLS)
    return cast("ActorHandle[Any]", actor.remote(directory, memory_bytes))
