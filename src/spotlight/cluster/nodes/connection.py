"""Joins a Ray cluster as its driver, and leaves it."""

from __future__ import annotations

import contextlib
import logging
import signal
import socket
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import ray
from ray._private import worker as ray_worker

from spotlight_rewards.base.errors import ConfigError, Problem

log = logging.getLogger("spotlight.cluster")

NAMESPACE = "spotlight"
_KNOCK_S = 5.0


@contextmanager
def connected(address: str) -> Iterator[None]:
    """Make this process a driver of the cluster for the block.

    Args:
        address: HOST:PORT, or ``auto``: this machine's cluster.

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
    try:
        yield
    finally:
        ray.shutdown()


def _knock(address: str) -> None:
    """Fail fast: Ray itself tries for two minutes to reach an absent cluster."""
    if address == "auto":
        return
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal():
        raise _unreachable(address, "not of the form HOST:PORT")
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=_KNOCK_S).close()
    except (OSError, OverflowError) as error:
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
