"""Joins a Ray cluster as its driver, and leaves it, even one that hangs.

A hung GCS (the cluster's own process) hangs every call that starts an actor or lists nodes, and
``ray.shutdown()``; nothing ends them. So a cluster that was given up is left by deadlines.
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

import ray
from ray._private import worker as ray_worker

from spotlight_rewards.base.errors import ConfigError, Problem

log = logging.getLogger("spotlight.cluster")

NAMESPACE = "spotlight"
_KNOCK_S = 5.0
_SHUTDOWN_S = 10.0
_SHUTDOWN_LOST_S = 2.0
"""For ``ray.shutdown()`` once Ray is lost: it waits in vain for longer, and goes on in the background."""
_TEARDOWN_S = 15.0


class Connection:
    """What this process does when Ray is lost. Thread-safe.

    Args:
        stop_cluster: ends the cluster's processes, where they are this process's own.
    """

    def __init__(self, stop_cluster: Callable[[], None]) -> None:
        self._stop_cluster = stop_cluster
        self._lost, self._left = threading.Event(), threading.Event()

    def give_up(self, error: Exception, say: Callable[[str], None]) -> None:
        """Ray is dead or hangs: end its local cluster now, and this process if it cannot leave in time.

        Args:
            say: shows the user a line.
        """
        if self._lost.is_set():
            return
        self._lost.set()
        threading.Thread(target=self._end_late, args=(error, say), name="ray-lost", daemon=True).start()
        self._stop_cluster()

    def leave(self) -> None:
        """Disconnect, or stop waiting for that."""
        shutdown = threading.Thread(target=ray.shutdown, name="ray-shutdown", daemon=True)
        shutdown.start()
        shutdown.join(_SHUTDOWN_LOST_S if self._lost.is_set() else _SHUTDOWN_S)
        if shutdown.is_alive():
            log.info("ray.shutdown() takes long: it is not waited for")
            atexit.unregister(ray.shutdown)  # Ray's own, which would wait for this one
        self._left.set()

    def _end_late(self, error: Exception, say: Callable[[str], None]) -> None:
        if self._left.wait(_TEARDOWN_S):
            return
        # No data is lost: what a killed head leaves is what a resume expects.
        say(f"{error} A call to Ray does not return: this process ends without it.")
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError, ValueError):
                stream.flush()
        os._exit(1)


@contextmanager
def connected(address: str, stop_cluster: Callable[[], None] = lambda: None) -> Iterator[Connection]:
    """Make this process a driver of the cluster for the block.

    Args:
        address: HOST:PORT, or ``auto``: this machine's cluster.
        stop_cluster: see :class:`Connection`.

    Raises ConfigError if nothing answers there, or its Ray or Python version differs.
    """
    _knock(address)
    # Ray prints a paragraph to stderr per dead node or process, which is routine here.
    ray_worker.print_to_stdstream = _to_log
    try:
        with _own_sigterm():
            ray.init(
            address=address, namespace=NAMESPACE, logging_level=logging.WARNING, log_to_driver=False,
            configure_logging=False,
        )  # fmt: skip
    except (OSError, RuntimeError, ValueError, TimeoutError) as error:
        first = str(error).strip().partition("\n")[0] or type(error).__name__
        raise _unreachable(address, first) from error
    connection = Connection(stop_cluster)
    try:
        yield connection
    finally:
        connection.leave()


def _knock(address: str) -> None:
    """Fail fast: Ray itself tries for two minutes to reach an absent cluster."""
    if address == "auto":
        return
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal():
        raise _unreachable(address, "not of the form HOST:PORT")
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=_KNOCK_S).close()
    except (OSError, OverflowError, UnicodeError) as error:
        raise _unreachable(address, str(error)) from None


def _unreachable(address: str, why: str) -> ConfigError:
    problem = Problem(
        "fleet.address", f"{address!r}: {why}",
        "HOST:PORT of a running Ray cluster with this Ray and Python (and its token, if it asks for one)",
        "See what runs with `ray status --address HOST:PORT`; leave the key out to start a local Ray.",
    )  # fmt: skip
    return ConfigError("the cluster", [problem])


@contextmanager
def _own_sigterm() -> Iterator[None]:
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    former = signal.getsignal(signal.SIGTERM)
    try:
        yield
    finally:
        with contextlib.suppress(TypeError):  # the handler was not set from Python
            signal.signal(signal.SIGTERM, former)


def _to_log(message: Mapping[str, object], *_: object, **__: object) -> None:
    log.info("Ray: %s", message.get("lines"))
