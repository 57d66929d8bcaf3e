"""Plays a spot trace on machines that really come and go, in real time: notices and SIGKILLs on the second.

Two threads: one keeps the trace's time, tells and kills; the other brings machines up one after another, so
a slow start delays other starts and nothing else. What was done, and when, is in the book.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable
from typing import Protocol

from spotlight.cluster.local.local_cluster import LocalCluster, LocalClusterError
from spotlight.cluster.local.market_book import Book, Order
from spotlight.fleet.traces.trace import Trace
from spotlight.scheduler.types import NodeKind

log = logging.getLogger("spotlight.cluster.local.market")


class MachineError(Exception):
    """A machine did not come up, could not be told, or did not die."""


class Machines(Protocol):
    """Where the trace is played. Every method may raise :class:`MachineError`."""

    def add(self, name: str, slots: int) -> None:
        """Bring a machine up; returns when it is."""
        ...

    def notice(self, name: str) -> None:
        """Tell a machine that it will be taken."""
        ...

    def kill(self, name: str) -> None:
        """Take a machine, without a word."""
        ...


class LocalMachines:
    """Spot nodes of a local Ray."""

    def __init__(self, cluster: LocalCluster) -> None:
        self._cluster = cluster

    def add(self, name: str, slots: int) -> None:
        """See :class:`Machines`."""
        self._do(lambda: self._cluster.add_node(name, NodeKind.SPOT, slots))

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
    """Plays a trace within the block of a ``with``; nodes that are up at its end stay.

    Args:
        trace: in real seconds from the beginning of the block (``market_book.timed``).
    """

    def __init__(self, trace: Trace, machines: Machines, clock: Callable[[], float] = time.monotonic) -> None:
        self._trace, self._machines, self._clock = trace, machines, clock
        self._book = Book()
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
            self._book.close()

    @property
    def book(self) -> Book:
        """What was done; complete when the block has ended."""
        return self._book

    def wait(self, timeout_s: float | None = None) -> bool:
        """Until the trace has been played; False: not within ``timeout_s``."""
        self._threads[0].join(timeout_s)
        return not self._threads[0].is_alive()

    def _now_s(self) -> float:
        return self._clock() - self._began_s

    def _keep_time(self) -> None:
        for event in self._trace.events:
            if self._over.wait(max(0.0, event.time_s - self._now_s())):
                return
            with self._lock:
                order = self._book.due(event)
            if order is not None:
                self._obey(order, event.node, event.gpus)

    def _bring_up(self) -> None:
        while (item := self._queue.get()) is not None and not self._over.is_set():
            name, slots = item
            with self._lock:
                wanted = self._book.starts(name)
            if not wanted:
                continue
            error = self._try(lambda name=name, slots=slots: self._machines.add(name, slots))  # type: ignore[misc]
            with self._lock:
                order = self._book.added(name, self._now_s(), error)
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
                    self._book.noticed(index, self._now_s(), error)
            case Order.KILL:
                error = self._try(lambda: self._machines.kill(name))
                with self._lock:
                    self._book.killed(index, self._now_s(), error)

    def _try(self, action: Callable[[], None]) -> str:
        """What went wrong; empty: nothing."""
        try:
            action()
        except MachineError as error:
            log.warning("spot market: %s", error)
            return str(error)
        return ""
