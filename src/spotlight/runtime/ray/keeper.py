"""The keeper: what workers made, safe from their deaths, and what they have to say, in order.

    worker ── deliver(values, events) ──► vault ──► mailbox ── take ──► head
                                            └── fetch ──► workers, learner ranks, head

Invariants
    1. An event is never heard before the values delivered with it are safe.
    2. What one sender delivers is heard in the order in which it was delivered: a sender waits for each.
    3. A delivery whose values cannot be kept fails for its sender, and none of its events is heard.

The mailbox needs no bound of its own: a sender has one delivery under way, with the few events that its leases
give cause to, and the head takes everything at once.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from spotlight.core.events import Event
from spotlight.core.types import WorkerId
from spotlight.rollout.reports import Report
from spotlight.store.vault import Kept, Usage, Vault

if TYPE_CHECKING:
    from ray.actor import ActorHandle


@dataclass(frozen=True, slots=True)
class Delivered:
    """An event of a worker; ``mark`` is the digest of the weights it worked with."""

    worker: WorkerId
    mark: str
    event: Event


class Keeper:
    """See the module's docstring. Methods are coroutines of one event loop; the disk is used beside it."""

    def __init__(self, directory: Path, memory_bytes: int) -> None:
        self._vault = Vault(directory, memory_bytes)
        self._mail: list[Delivered] = []
        self._came = asyncio.Event()

    async def deliver(self, report: Report) -> None:
        """Keep a report's values, then let its events be heard.

        Raises:
            StoreError: a value cannot be kept.
        """
        if report.values:
            await asyncio.to_thread(self._keep, report)
        if report.events:
            self._mail += [Delivered(report.worker, report.mark, event) for event in report.events]
            self._came.set()

    def _keep(self, report: Report) -> None:
        for value in report.values:
            self._vault.put(value.kind, value.name, value.data, mark=report.mark, step=value.step)

    async def take(self, timeout_s: float) -> list[Delivered]:
        """Everything that was not heard yet; waits for something, but not longer than ``timeout_s``."""
        if not self._mail:
            try:
                await asyncio.wait_for(self._came.wait(), timeout_s)
            except TimeoutError:
                return []
        mail, self._mail = self._mail, []
        self._came.clear()
        return mail

    async def fetch(self, kind: str, names: Sequence[str], mark: str = "") -> list[Kept | None]:
        """Values by name; None for those that are not there."""
        return await asyncio.to_thread(lambda: [self._vault.get(kind, name, mark) for name in names])

    async def put(self, kind: str, name: str, data: bytes, mark: str = "") -> None:
        """Keep a value that does not change under its name. Raises StoreError."""
        await asyncio.to_thread(self._vault.put, kind, name, data, mark=mark)

    async def drop(self, kind: str, names: Sequence[str]) -> None:
        """Forget values, whatever their marks."""
        await asyncio.to_thread(self._vault.drop, kind, names)

    async def keep_only(self, kind: str, names: Collection[str]) -> int:
        """Forget all other values of a kind; returns how many."""
        return await asyncio.to_thread(self._vault.keep_only, kind, names)

    async def usage(self) -> Usage:
        """What is held now."""
        return self._vault.usage()

    async def close(self) -> None:
        """Forget everything."""
        self._vault.close()


def start_keeper(directory: Path, memory_bytes: int, node: str) -> ActorHandle[Any]:
    """The keeper as an actor on a Ray node; it ends with the run that started it."""
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    place = NodeAffinitySchedulingStrategy(node, soft=False)
    actor = ray.remote(num_cpus=0, max_restarts=0, max_concurrency=1000, scheduling_strategy=place)(Keeper)
    return actor.remote(directory, memory_bytes)  # type: ignore[no-any-return]
