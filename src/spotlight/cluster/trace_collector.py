"""The profiler's traces, gathered in the run directory: rank 0 writes its own, a worker sends one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol

from spotlight.cluster.blobs.blob_server import TRACE
from spotlight.cluster.blobs.blob_store import StoredBlob
from spotlight.models.kernels.step_profile import trace_file
from spotlight.scheduler.types import Phase


class TraceStore(Protocol):
    """What is used of :class:`~spotlight.cluster.blobs.blob_client.BlobClient`."""

    async def fetch(self, kind: str, names: Sequence[str], weights_digest: str) -> list[StoredBlob | None]:
        """Blobs by name; None where missing."""

    async def drop(self, kind: str, names: Sequence[str]) -> None:
        """Delete blobs."""


class TraceCollector:
    """Tells of each trace once. Does nothing without ``profiled_steps``.

    Args:
        folder: where traces belong; older ones are deleted.
    """

    def __init__(
        self, store: TraceStore, folder: Path, note: Callable[[str], None], profiled_steps: int
    ) -> None:
        self._store, self._folder, self._note = store, folder, note
        self._missing = [Phase.ROLLOUT, Phase.TRAINING] if profiled_steps else []
        for kind in self._missing:
            trace_file(folder, kind).unlink(missing_ok=True)

    async def collect(self) -> None:
        """Look for traces that were taken since."""
        if Phase.ROLLOUT in self._missing:
            await self._receive()
        for kind in [kind for kind in self._missing if trace_file(self._folder, kind).exists()]:
            self._missing.remove(kind)
            self._note(f"trace of {kind} steps: {trace_file(self._folder, kind)}")

    async def _receive(self) -> None:
        (trace,) = await self._store.fetch(TRACE, [Phase.ROLLOUT], "")
        if trace is None:
            return
        path = trace_file(self._folder, Phase.ROLLOUT)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(trace.data)
        except OSError as error:
            self._missing.remove(Phase.ROLLOUT)
            self._note(f"the trace {path} cannot be written: {error}")
        await self._store.drop(TRACE, [Phase.ROLLOUT])
