"""Plays a spot trace on real machines in real time: notices and SIGKILLs on the second.

One thread follows the trace, notifies and kills; another starts machines one at a time, so a slow start
delays only other starts. :class:`MarketRecord` says what happened when.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable
from typing import Protocol

from spotlight_fleet.emulated.local_cluster import LocalCluster, LocalClusterError
from spotlight_fleet.emulated.market_record import MarketRecord, Order
from spotlight_fleet.traces.trace import Trace

log = logging.getLogger("spotlight.fleet.emulated.market")


class MachineError(Exception):
    """A machine did not start, could not be notified, or did not die."""


class Machines(Protocol):
    """Where the trace is played. Every method may raise :class:`MachineError`."""

    def add(self, name: str, slots: int) -> None:
        """Start a machine; returns when it is up."""
        ...

    def notice(self, name: str) -> None:
        """Send a machine a preemption notice."""
        ...

    def kill(self, name: str) -> None:
        """Take a machine without notice."""
        ...


class LocalMachines:
    """Spot nodes of a local Ray."""

    def __init__(self, cluster: LocalCluster) -> None:
        self._cluster = cluster

    def add(self, name: str, slots: int) -> None:
        """See :class:`Machines`."""
        self._do(lambda: self._cluster.add_node(name, "spot", slots))

    def notice(self, name: str) -> None:
        """See :class:`Machines`."""
        self._do(lambda: self._cluster.notice(name))

    def kill(self, name: str) -> None:
        """See :class:`Machines`."""
        self._do(lambda: self._cluster.kill(name))

    def _do(self, action: Callable[[], object]) -> None:
        try:
            action()
        except LocalClusterError as error:
            raise MachineError(str(error)) from error


class Market:
    """Plays a trace for the length of a ``with`` block; nodes up at its end stay.

    Args:
        trace: in real seconds from the start of the block (``market_record.timed``).
    """

    def __init__(self, trace: Trace, machines: Machines, clock: Callable[[], float] = time.monotonic) -> None:
        self._trace, self._machines, self._clock = trace, machines, clock
        self._record = MarketRecord()
        self._lock = threading.Lock()
        self._queue: queue.SimpleQueue[tuple[str, int] | None] = queue.SimpleQueue()
        self._over = threading.Event()
        self._threads = [
            threading.Thread(target=self._keep_time, name="spot market", daemon=True),
            threading.Thread(target=self._bring_up, name="spot market: machines", daemon=True),
        ]
        self._began_s = 0.0

    def __enter__(self) -> Market:
        self._began_s = self._clock()
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._queue.put(None)
        for thread in self._threads:
            thread.join()
        with self._lock:
            self._record.close()

    @property
    def record(self) -> MarketRecord:
        """The record, complete once the block has ended."""
        return self._record

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait for the end of the trace; False on timeout."""
        self._threads[0].join(timeout_s)
        return not self._threads[0].is_alive()

    def _now_s(self) -> float:
        return self._clock() - self._began_s

    def _keep_time(self) -> None:
        for event in self._trace.events:
            if self._over.wait(max(0.0, event.time_s - self._now_s())):
                return
            with self._lock:
                order = self._record.due(event)
            if order is not None:
                self._obey(order, event.node, event.gpus)

    def _bring_up(self) -> None:
        while (item := self._queue.get()) is not None and not self._over.is_set():
            name, slots = item
            with self._lock:
                wanted = self._record.starts(name)
            if not wanted:
                continue
            error = self._try(lambda name=name, slots=slots: self._machines.add(name, slots))  # type: ignore[misc]
            with self._lock:
                order = self._record.added(name, self._now_s(), error)
            if order is not None:
                self._obey(order, name, slots)

    def _obey(self, order: tuple[Order, int], name: str, slots: int) -> None:
        what, index = order
        match what:
            case Order.ADD:
                self._queue.put((name, slots))
            case Order.NOTICE:
                error = self._try(lambda: self._machines.notice(name))
                with self._lock:
                    self._record.noticed(index, self._now_s(), error)
            case Order.KILL:
                error = self._try(lambda: self._machines.kill(name))
                with self._lock:
                    self._record.killed(index, self._now_s(), error)

    def _try(self, action: Callable[[], None]) -> str:
        try:
            action()
        except MachineError as error:
            log.warning("spot market: %s", error)
            return str(error)
        return ""
