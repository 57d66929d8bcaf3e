"""The workers' processes, as the head sees them: started, watched, told, ended.

    start ──► (back-off) ──► actor ──► ready() ──► WorkerStarted ──► watch() ... ──► WorkerCrashed
                                                             one call hangs all the time: it ends when the
                                                             process does, or when its time is up

A process that fails to start is told to people once, with the end of its log, and tried again after a
growing pause; it has started once it has weights. Every process has the epoch of the ``StartWorker`` that it
obeys; what comes from an older one is of no consequence.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

from spotlight.cluster.loop import Calls, NoAnswerError
from spotlight.scheduler import effects as ef
from spotlight.scheduler import events as ev
from spotlight.scheduler.types import NodeId, WorkerId
from spotlight.worker.interfaces import Command

HEARTBEATS_MISSED = 3
IDLE_DEATHS = 3
"""Deaths of a worker that had weights, without any progress between them, that may be an accident."""
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.5, 60.0
"""Before a process is started in place of one that died: doubled with every failure to start."""


class Handle(Protocol):
    """A worker's process: calls return a reference to the answer (Ray's, with ``future()``), at once."""

    def ready(self) -> Any:
        """Answered when the process is up."""

    def tell(self, command: Command) -> Any:
        """Answered when the worker has the command."""

    def watch(self, hang_s: float) -> Any:
        """Answered after ``hang_s``; fails when the process or its work ends."""


class Starter(Protocol):
    """Makes and ends the processes; see ``worker/actor.py``."""

    def start(self, order: ef.StartWorker) -> Handle:
        """A new process, at once; raises LookupError when the node is gone."""

    def kill(self, handle: Any) -> None:
        """End a process (SIGKILL); nothing if it is dead."""

    def log_tail(self, order: ef.StartWorker, then: Callable[[str], None]) -> None:
        """Call ``then``, later, with the last lines that the process wrote, or an empty text."""


@dataclass(slots=True)
class _Process:
    order: ef.StartWorker
    handle: Handle
    ready: bool = False
    proven: bool = False


@dataclass(slots=True)
class WorkerPool:
    """See the module's docstring. For the loop's thread only.

    Attributes:
        tell_head: hands an event to the controller.
        note: tells people.
        crashed: a worker's process died or did not start, and its node lives.
    """

    calls: Calls
    starter: Starter
    tell_head: Callable[[ev.Event], None]
    note: Callable[[str], None]
    crashed: Callable[[WorkerId, str], None]
    heartbeat_s: float
    start_s: float
    _processes: dict[WorkerId, _Process] = field(default_factory=dict)
    _orders: dict[WorkerId, ef.StartWorker] = field(default_factory=dict)
    _failures: dict[WorkerId, int] = field(default_factory=dict)
    _idle_deaths: dict[WorkerId, int] = field(default_factory=dict)
    _deaths: dict[WorkerId, tuple[ef.StartWorker, str]] = field(default_factory=dict)

    def start(self, order: ef.StartWorker) -> None:
        """Start a process, in place of whatever of that worker is left; a repeated order is answered."""
        process = self._processes.get(order.worker)
        if process is not None and process.order.epoch == order.epoch:
            if process.ready:
                self.tell_head(ev.WorkerStarted(order.worker, order.epoch))
            return
        waiting = self._orders.get(order.worker)
        self._orders[order.worker] = order
        if process is not None:
            self._end(order.worker)
        if waiting is not None and waiting.epoch == order.epoch:
            return
        failures = self._failures.get(order.worker)
        if failures is None:
            self._launch(order)
        else:
            pause_s = min(LONGEST_PAUSE_S, FIRST_PAUSE_S * 2.0 ** min(failures, 30))
            self.calls.loop.call_later(pause_s, self._launch, order)

    def tell(self, worker: WorkerId, command: Command) -> None:
        """Send a command; one for a process that is gone is dropped: its death will be told."""
        process = self._processes.get(worker)
        if process is not None and process.ready:
            self._send(process, process.handle.tell(command), "a command")

    def prove(self, worker: WorkerId) -> None:
        """A worker has weights: whatever ends it from now on, it can be started."""
        process = self._processes.get(worker)
        if process is not None:
            process.proven = True

    def worked(self, worker: WorkerId) -> None:
        """A worker's progress was heard of."""
        self._idle_deaths.pop(worker, None)

    def lose(self, node: NodeId) -> None:
        """A node is gone, and its processes."""
        for worker in [name for name, order in self._orders.items() if order.node == node]:
            del self._orders[worker]
            self._failures.pop(worker, None)
            self._deaths.pop(worker, None)
            self._idle_deaths.pop(worker, None)
            self._end(worker)

    def distrust(self, worker: WorkerId) -> None:
        """End a process that reported what cannot be; the controller has it started anew."""
        process = self._processes.get(worker)
        if process is not None:
            self._died(process, RuntimeError("it worked with other weights than were published"))

    def close(self) -> None:
        """End all processes."""
        self._orders.clear()
        for worker in list(self._processes):
            self._end(worker)

    @property
    def alive(self) -> list[WorkerId]:
        """Workers whose process is up."""
        return [worker for worker, process in self._processes.items() if process.ready]

    # -- a process's life ------------------------------------------------------------------------------

    def _launch(self, order: ef.StartWorker) -> None:
        if self._orders.get(order.worker) != order:
            return  # its node is gone, or a newer order came
        if (death := self._deaths.pop(order.worker, None)) is not None:
            self._tell_of(*death)
        try:
            process = _Process(order, self.starter.start(order))
        except LookupError:
            return  # the node is gone; the controller hears of it
        except Exception as error:  # noqa: BLE001 - whatever the cluster says, it is this worker that failed
            self._failures[order.worker] = self._failures.get(order.worker, 0) + 1
            self._deaths[order.worker] = order, _brief(error)
            self.tell_head(ev.WorkerCrashed(order.worker, order.epoch))
            return
        self._processes[order.worker] = process
        self.calls.send(
            process.handle.ready(),
            f"start of {order.worker}",
            self.start_s,
            lambda _: self._started(process),
            lambda error: self._died(process, error),
        )

    def _tell_of(self, order: ef.StartWorker, why: str) -> None:
        """A process died whose node lives: else nobody would start it again."""
        self.crashed(order.worker, why)
        if self._failures[order.worker] == 1:
            idle = self._idle_deaths.get(order.worker, 0) > IDLE_DEATHS
            what = "dies before it has done anything" if idle else "does not start"
            told = f"{order.worker} {what}, and is tried again with growing pauses: {why}"
            self.starter.log_tail(order, lambda tail: self.note(f"{told}\n{tail}" if tail else told))

    def _started(self, process: _Process) -> None:
        if self._processes.get(process.order.worker) is not process:
            return
        process.ready = True
        self._failures.setdefault(process.order.worker, 0)
        self.tell_head(ev.WorkerStarted(process.order.worker, process.order.epoch))
        self._watch(process)

    def _watch(self, process: _Process) -> None:
        if self._processes.get(process.order.worker) is process:
            self.calls.send(
                process.handle.watch(self.heartbeat_s),
                f"heartbeat of {process.order.worker}",
                self.heartbeat_s * HEARTBEATS_MISSED,
                lambda _: self._watch(process),
                lambda error: self._died(process, error),
            )

    def _send(self, process: _Process, reference: Any, what: str) -> None:
        # Taking a command is the work of an instant. Whoever cannot is dead, which watch() tells, or stopped:
        # then the command waits for it like the rest.
        self.calls.send(
            reference, f"{what} for {process.order.worker}", self.start_s, lambda _: None, lambda _: None
        )

    def _died(self, process: _Process, error: Exception) -> None:
        worker = process.order.worker
        if self._processes.get(worker) is not process:
            return
        why = "shows no sign of life" if isinstance(error, NoAnswerError) else _brief(error)
        if process.proven:
            idle = self._idle_deaths[worker] = self._idle_deaths.get(worker, 0) + 1
            self._failures[worker] = max(0, idle - IDLE_DEATHS)
        else:
            self._failures[worker] = self._failures.get(worker, 0) + 1
        self._deaths[worker] = process.order, why
        self._end(worker)
        self.tell_head(ev.WorkerCrashed(worker, process.order.epoch))

    def _end(self, worker: WorkerId) -> None:
        process = self._processes.pop(worker, None)
        if process is not None:
            self.starter.kill(process.handle)


def _brief(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[-1] if lines else 'no reason given'}"
