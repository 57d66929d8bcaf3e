"""Where workers' values and events go, so that they outlive the workers: a vault, and a mailbox for the head.

    worker ── deliver(values, events) ──► vault            (memory, then disk)
                                      └─► mailbox ──► head ── take()
    learner, workers, head ◄── fetch() ── vault

Invariants:
- An event is in the mailbox only after all values of its report are in the vault; a report whose values could
  not be kept leaves no event, and its sender has the error.
- Events of one sender are taken in the order in which its reports came. Senders do not wait for each other,
  nor for somebody's disk.
- What was taken is handed out once: the head asks one question at a time.
- The mailbox is bounded. While the head listens it is nearly empty, since a worker's reports follow the steps
  of its leases. A head that stands still (SIGSTOP, a long write) would let it grow with every step of every
  worker: once it is full, deliveries wait for room, their values safe already, and so do those workers.

Reaching memory takes microseconds, but any put may have to move others to disk: all run in threads, and
deliveries in threads of their own, so that no progress waits while somebody reads gigabytes.
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

from spotlight.cluster.blobs.blob_store import BlobStore, StoredBlob, Usage
from spotlight.scheduler.events import Event
from spotlight.scheduler.types import WorkerId
from spotlight.store.store_errors import StoreError
from spotlight.worker.reports import Report, ReportedValue

if TYPE_CHECKING:
    from ray.actor import ActorHandle

NEGATIVE = "negative"
"""Name of the negative prompt's embedding among conditions; prompts' own names are hexadecimal digits."""
MAILBOX_EVENTS = 65_536
"""Minutes of a cluster of many hundred workers; 10-20 MB."""
_DELIVERY_THREADS = 4
CONCURRENT_CALLS = 10_000
"""Of a call that waits (for the head, for room) only a coroutine is held; the next one must still come in."""


@dataclass(frozen=True, slots=True)
class Delivered:
    """An event for the head.

    Attributes:
        mark: digest of the weights that made the values the event speaks of.
        sender: which worker delivered it.
    """

    event: Event
    mark: str
    sender: WorkerId


class BlobServer:
    """See the module's docstring. All methods belong to one event loop.

    Args:
        vault: to be used by nobody else; :meth:`close` closes it.
        mailbox_events: how many events wait for the head before deliveries do.
    """

    def __init__(self, vault: BlobStore, mailbox_events: int = MAILBOX_EVENTS) -> None:
        if mailbox_events < 1:
            raise ValueError(f"mailbox_events is {mailbox_events}; expected at least 1")
        self._vault = vault
        self._mailbox: list[Delivered] = []
        self._mailbox_events = mailbox_events
        self._threads = ThreadPoolExecutor(_DELIVERY_THREADS, "keeper-delivery")
        self._filled, self._emptied = asyncio.Event(), asyncio.Event()
        self._failure: StoreError | None = None
        # A sender's lock lives as long as a report of it does: workers come and go.
        self._turns: WeakValueDictionary[WorkerId, asyncio.Lock] = WeakValueDictionary()

    async def deliver(self, report: Report) -> None:
        """Keep the report's values, then pass its events on.

        Raises:
            StoreError: a value could not be kept. None of the events was passed on; values of the report that
                came before it may be kept, which harms nobody.
        """
        turn = self._turns.setdefault(report.worker, asyncio.Lock())
        async with turn:
            if report.values:
                loop = asyncio.get_running_loop()
                try:
                    await loop.run_in_executor(self._threads, self._keep, report.values, report.mark)
                except StoreError as error:
                    self._failure = error
                    self._filled.set()
                    raise
            if report.events:
                while len(self._mailbox) >= self._mailbox_events:
                    self._emptied.clear()
                    await self._emptied.wait()
                self._mailbox.extend(Delivered(event, report.mark, report.worker) for event in report.events)
                self._filled.set()

    async def take(self, timeout_s: float) -> list[Delivered]:
        """All events that wait, as soon as there is one; none after ``timeout_s``.

        Raises:
            StoreError: what a sender brought could not be kept: the head must know, since senders only die.
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

    async def fetch(self, kind: str, names: Sequence[str], mark: str = "") -> list[StoredBlob | None]:
        """Values by name, the latest step of each; None where there is none."""
        return await asyncio.to_thread(lambda: [self._vault.get(kind, name, mark) for name in names])

    async def put(self, kind: str, name: str, data: bytes, mark: str = "", step: int = 0) -> bool:
        """Keep one value; see :meth:`BlobStore.put`. Raises StoreError."""
        return await asyncio.to_thread(self._vault.put, kind, name, data, mark=mark, step=step)

    async def drop(self, kind: str, names: Sequence[str]) -> None:
        """Forget values, of whatever mark."""
        await asyncio.to_thread(self._vault.drop, kind, names)

    async def keep_only(self, kind: str, names: Collection[str]) -> int:
        """Forget all values of a kind but those of ``names``; how many went."""
        return await asyncio.to_thread(self._vault.keep_only, kind, names)

    async def usage(self) -> Usage:
        """What is held now."""
        return self._vault.usage()

    async def close(self) -> None:
        """Forget everything and delete its files."""
        await asyncio.to_thread(self._threads.shutdown)
        await asyncio.to_thread(self._vault.close)

    def _keep(self, values: Sequence[ReportedValue], mark: str) -> None:
        for value in values:
            self._vault.put(value.kind, value.name, value.data, mark=mark, step=value.step)


class BlobActor(BlobServer):
    """A room with a vault of its own.

    Args:
        directory: for values on disk, on the keeper's node.
        memory_bytes: the most that values take in memory.

    Raises:
        StoreError: the directory cannot be used.
    """

    def __init__(self, directory: str, memory_bytes: int) -> None:
        super().__init__(BlobStore(Path(directory), memory_bytes))


def start_blob_store(directory: Path, memory_bytes: int, *, node: str) -> ActorHandle[Any]:
    """Start the keeper; it ends with the process that started it, or by ``ray.kill``.

    The call returns at once: an error of the keeper's start (a directory that cannot be used) is that of the
    first call.

    Args:
        node: Ray's id of the node it runs on.
    """
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    actor = ray.remote(BlobActor).options(
        num_cpus=0,
        max_restarts=0,  # one that starts anew is empty: whoever trusts it must hear of its death
        max_task_retries=0,
        max_concurrency=CONCURRENT_CALLS,
        scheduling_strategy=NodeAffinitySchedulingStrategy(node, soft=False),
    )
    return cast("ActorHandle[Any]", actor.remote(str(directory), memory_bytes))
