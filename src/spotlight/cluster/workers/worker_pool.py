"""The worker processes, as the head sees them: one task per process, from start to end.

    start() ─► (back-off) ─► actor ─► ready() ─► WorkerStarted ─► watch() ... ─► WorkerCrashed
                                                        one watch call is always pending: it ends with the
                                                        process, or at its timeout

A process that fails to start is reported once, with the end of its log, and retried with growing pauses. A
start has succeeded once the worker holds weights. Every process carries the epoch of its ``StartWorker``;
messages of older epochs are ignored.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

from spotlight.cluster.remote_calls import Conversations, NoAnswerError, Notify, answer
from spotlight.cluster.workers.worker_actor import ActorStarter, WorkerHandle
from spotlight.scheduler import effects as ef
from spotlight.scheduler import events as ev
from spotlight.scheduler.types import NodeId, WorkerId
from spotlight.worker.interfaces import Command

HEARTBEATS_MISSED = 3
IDLE_DEATHS = 3
"""A worker that has had weights may die this often without progress before its restarts back off."""
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.5, 60.0
"""Pause before a dead process is replaced; doubles with every failed start."""


@dataclass(slots=True, eq=False)
class _Process:
    order: ef.StartWorker
    task: asyncio.Task[None] | None = None
    handle: WorkerHandle | None = None
    ready: bool = False
    proven: bool = False


@dataclass(slots=True)
class _Record:
    """A worker's history, while its node lives.

    Attributes:
        failures: consecutive failed starts; None: not started yet.
        idle_deaths: since it last made progress.
        death: of the last process, unreported while its node may prove to be gone too.
    """

    order: ef.StartWorker
    failures: int | None = None
    idle_deaths: int = 0
    death: tuple[ef.StartWorker, str] | None = None


@dataclass(slots=True)
class WorkerPool:
    """All worker processes. Head's event loop only.

    Attributes:
        crashed: called when a process died or did not start while its node lives.
    """

    conversations: Conversations
    starter: ActorStarter
    put_event: Callable[[ev.Event], None]
    note: Notify
    crashed: Callable[[WorkerId, str], None]
    heartbeat_s: float
    start_s: float
    _processes: dict[WorkerId, _Process] = field(default_factory=dict)
    _records: dict[WorkerId, _Record] = field(default_factory=dict)

    def start(self, order: ef.StartWorker) -> None:
        """Start a process, replacing any older one of that worker. Idempotent per order."""
        record = self._records.get(order.worker)
        if record is not None and record.order.epoch == order.epoch:
            if order.worker in self.alive:
                self.put_event(ev.WorkerStarted(order.worker, order.epoch))
            return
        self._end(order.worker)
        record = self._records.setdefault(order.worker, _Record(order))
        record.order = order
        process = self._processes[order.worker] = _Process(order)
        pause_s = 0.0
        if record.failures is not None:
            pause_s = min(LONGEST_PAUSE_S, FIRST_PAUSE_S * 2.0 ** min(record.failures, 30))
        process.task = self.conversations.start(self._run(process, record, pause_s))

    def tell(self, worker: WorkerId, command: Command) -> None:
        """Send a command. Dropped if the process is gone, since its death will be reported."""
        process = self._processes.get(worker)
        if process is not None and process.handle is not None and process.ready:
            self.conversations.start(self._accepted(process.handle.tell(command), worker))

    def prove(self, worker: WorkerId) -> None:
        """Mark that a worker received weights: later deaths are not failed starts."""
        process = self._processes.get(worker)
        if process is not None:
            process.proven = True

    def worked(self, worker: WorkerId) -> None:
        """Record that a worker made progress."""
        if (record := self._records.get(worker)) is not None:
            record.idle_deaths = 0

    def lose(self, node: NodeId) -> None:
        """Drop the processes of a lost node."""
        for handle in chain(*self.release([node])):
            self.starter.kill(handle)

    def release(self, nodes: Sequence[NodeId]) -> tuple[list[WorkerHandle], list[WorkerHandle]]:
        """Forget the processes of nodes that roll out no more: those that hold weights, and the others.

        They are the caller's to end.
        """
        able: list[WorkerHandle] = []
        unfit: list[WorkerHandle] = []
        for worker in [name for name, record in self._records.items() if record.order.node in nodes]:
            del self._records[worker]
            process = self._processes.pop(worker, None)
            if process is None:
                continue
            if process.task is not None:
                process.task.cancel()
            if process.handle is not None:
                (able if process.ready and process.proven else unfit).append(process.handle)
        return able, unfit

    def distrust(self, worker: WorkerId) -> None:
        """Kill a process that sent an impossible report; the controller restarts it."""
        process = self._processes.get(worker)
        if process is not None and process.handle is not None:
            self._died(process, RuntimeError("it worked with other weights than were published"))

    def close(self) -> None:
        """End all processes."""
        for worker in list(self._processes):
            self._end(worker)

    @property
    def alive(self) -> list[WorkerId]:
        """Workers whose process is up."""
        return [worker for worker, process in self._processes.items() if process.ready]

    # -- a process's life ------------------------------------------------------------------------------

    async def _run(self, process: _Process, record: _Record, pause_s: float) -> None:
        order = process.order
        if pause_s > 0:
            await asyncio.sleep(pause_s)
        if record.death is not None:
            self._report_death(record)
        try:
            process.handle = self.starter.start(order)
        except LookupError:
            del self._processes[order.worker]  # the node is gone; its loss will be reported
            return
        except Exception as error:  # noqa: BLE001 - any failure concerns this worker alone
            self._died(process, error)
            return
        try:
            await answer(process.handle.ready(), f"start of {order.worker}", self.start_s)
            process.ready = True
            record.failures = record.failures or 0
            self.put_event(ev.WorkerStarted(order.worker, order.epoch))
            while True:
                beat = process.handle.watch(self.heartbeat_s)
                await answer(beat, f"heartbeat of {order.worker}", self.heartbeat_s * HEARTBEATS_MISSED)
        except Exception as error:  # noqa: BLE001 - any error means that the process died
            self._died(process, error)

    async def _accepted(self, taken: Awaitable[Any], worker: WorkerId) -> None:
        # Accepting a command is instant. A process that does not is dead, which watch() reports, or stopped,
        # and then accepts it when it resumes.
        with suppress(Exception):
            await answer(taken, f"a command for {worker}", self.start_s)

    def _report_death(self, record: _Record) -> None:
        assert record.death is not None
        (order, why), record.death = record.death, None
        self.crashed(order.worker, why)
        if record.failures == 1:
            what = (
                "dies before it has done anything" if record.idle_deaths > IDLE_DEATHS else "does not start"
            )
            text = f"{order.worker} {what}, and is tried again with growing pauses: {why}"
            self.conversations.start(self._note_with_log(order, text))

    async def _note_with_log(self, order: ef.StartWorker, text: str) -> None:
        tail = await self.starter.log_tail(order)
        self.note(f"{text}\n{tail}" if tail else text)

    def _died(self, process: _Process, error: Exception) -> None:
        worker = process.order.worker
        if self._processes.get(worker) is not process:
            return
        record = self._records[worker]
        if process.proven:
            record.idle_deaths += 1
            record.failures = max(0, record.idle_deaths - IDLE_DEATHS)
        else:
            record.failures = (record.failures or 0) + 1
        record.death = (
            process.order,
            "shows no sign of life" if isinstance(error, NoAnswerError) else _brief(error),
        )
        self._end(worker)
        self.put_event(ev.WorkerCrashed(worker, process.order.epoch))

    def _end(self, worker: WorkerId) -> None:
        process = self._processes.pop(worker, None)
        if process is None:
            return
        if process.task is not None and process.task is not asyncio.current_task():
            process.task.cancel()
        if process.handle is not None:
            self.starter.kill(process.handle)


def _brief(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[-1] if lines else 'no reason given'}"
