"""The profiler's traces, gathered in the run directory: rank 0 writes its own, a worker sends one."""

from __future__ import annotations

from collections.abc import Callable, Collection
from contextlib import suppress
from pathlib import Path

from spotlight.cluster.blobs.blob_client import BlobClient
from spotlight.cluster.blobs.blob_server import TRACE
from spotlight.cluster.remote_calls import RayLostError
from spotlight.scheduler.types import Phase, WorkerId
from spotlight_kernels.measure.step_profile import trace_file
from spotlight_rewards.base.file_errors import StoreError

_NEEDS = {
    Phase.ROLLOUT: "no worker chosen for it lived to take, alone or leading its group, a second step of "
    "training rollouts",
    Phase.TRAINING: "the learner's rank 0 did not live to train a second micro-batch",
}


class TraceCollector:
    """Tells of each trace once, and of those that never came. Does nothing without ``profiled_steps``.

    Args:
        folder: where traces belong; older ones are deleted.
    """

    def __init__(
        self, store: BlobClient, folder: Path, note: Callable[[str], None], profiled_steps: int
    ) -> None:
        self._store, self._folder, self._note, self._steps = store, folder, note, profiled_steps
        self._tried: list[tuple[WorkerId, str]] = []
        self._tries = False
        self._missing = [Phase.ROLLOUT, Phase.TRAINING] if profiled_steps else []
        for kind in self._missing:
            trace_file(folder, kind).unlink(missing_ok=True)

    def steps_of(self, worker: WorkerId, node: str, nodes: Collection[str]) -> int:
        """Denoising steps that a process which starts now is to trace; 0 once there is a trace.

        One worker at a time: the next to start once the one before lost its node or was started again. A
        worker tries once as long as its node lives.

        Args:
            node: Ray's id of the worker's node; another one when it comes back under its name.
            nodes: Ray's ids of all nodes with workers.
        """
        if Phase.ROLLOUT not in self._missing:
            return 0
        if (worker, node) in self._tried:
            self._tries = self._tries and (worker, node) != self._tried[-1]
            return 0
        if self._tries and self._tried[-1][1] in nodes:
            return 0
        self._tried.append((worker, node))
        self._tries = True
        return self._steps

    async def collect(self) -> None:
        """Look for traces that were taken since."""
        if Phase.ROLLOUT in self._missing:
            await self._receive()
        for kind in [kind for kind in self._missing if trace_file(self._folder, kind).exists()]:
            self._missing.remove(kind)
            self._note(f"trace of {kind} steps: {trace_file(self._folder, kind)}")

    async def finish(self) -> None:
        """Look for the last time, while workers live, and report what is missing."""
        await self.collect()
        for kind in self._missing:
            self._note(f"no trace of {kind} steps was taken: {_NEEDS[kind]}")
        self._missing.clear()

    async def _receive(self) -> None:
        path = trace_file(self._folder, Phase.ROLLOUT)
        try:
            (trace,) = await self._store.fetch(TRACE, [Phase.ROLLOUT], "")
            if trace is None:
                return
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(trace.data)
        except (OSError, StoreError, RayLostError) as error:  # no reason to end a run
            self._missing.remove(Phase.ROLLOUT)
            self._note(f"the trace {path} cannot be fetched or written: {error}")
            return
        with suppress(StoreError, RayLostError):
            await self._store.drop(TRACE, [Phase.ROLLOUT])
