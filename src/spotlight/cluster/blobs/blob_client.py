"""The head's client of the blob store: calls have deadlines, and a silent store is fatal."""

from __future__ import annotations

from collections.abc import Awaitable, Collection, Sequence
from typing import Any

from spotlight.cluster.blobs.blob_server import Delivered
from spotlight.cluster.blobs.blob_store import StoredBlob
from spotlight.cluster.remote_calls import RayLostError, answer, cause_of
from spotlight_rewards.base.file_errors import StoreError

ANSWER_S = 120.0
"""Timeout for fetching images."""
TAKE_S = 20.0
"""Long-poll timeout for new reports; the store is presumed dead after twice as long."""


class BlobClient:
    """Calls the blob store's actor.

    Methods raise :class:`RayLostError` on silence, and StoreError if its disk is full or broken.
    """

    def __init__(self, actor: Any) -> None:
        self._actor = actor

    async def take(self) -> list[Delivered]:
        """Events delivered by workers, in each worker's order; empty on timeout."""
        delivered: list[Delivered] = await self._ask(
            self._actor.take.remote(TAKE_S), "reports of workers", 2 * TAKE_S
        )
        return delivered

    async def fetch(self, kind: str, names: Sequence[str], weights_digest: str) -> list[StoredBlob | None]:
        """Latest step of each named blob; None where missing."""
        what = f"{kind}s of {len(names)} rollouts"
        stored: list[StoredBlob | None] = await self._ask(
            self._actor.fetch.remote(kind, list(names), weights_digest), what
        )
        return stored

    async def put(self, kind: str, name: str, data: bytes) -> None:
        """Store a blob."""
        await self._ask(self._actor.put.remote(kind, name, data), f"storing {kind} {name}")

    async def drop(self, kind: str, names: Sequence[str]) -> None:
        """Delete blobs."""
        await self._ask(self._actor.drop.remote(kind, list(names)), f"dropping {kind}s")

    async def keep_only(self, kind: str, names: Collection[str]) -> None:
        """Delete all blobs of a kind except ``names``."""
        await self._ask(self._actor.keep_only.remote(kind, set(names)), f"sweeping {kind}s")

    async def _ask(self, reference: Awaitable[Any], what: str, deadline_s: float = ANSWER_S) -> Any:
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
