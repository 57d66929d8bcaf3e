"""Joins a Ray cluster as its driver, and leaves it."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import ray
from ray._private import worker as ray_worker

from spotlight.config.errors import ConfigError, Problem

log = logging.getLogger("spotlight.runtime.ray")

NAMESPACE = "spotlight"


@contextmanager
def connected(address: str) -> Iterator[None]:
    """This process is a driver of the cluster within the block.

    Args:
        address: HOST:PORT, or ``auto``: the one this machine belongs to.

    Raises:
        ConfigError: nobody answers there, or its Ray or Python is another.
    """
    # Ray prints a paragraph to stderr for every node and process that dies; here that is daily business.
    ray_worker.print_to_stdstream = _to_log
    try:
        ray.init(
            address=address, namespace=NAMESPACE, logging_level=logging.WARNING, log_to_driver=False,
            configure_logging=False,
        )  # fmt: skip
    except (OSError, RuntimeError, ValueError, TimeoutError) as error:
        first = str(error).strip().partition("\n")[0] or type(error).__name__
        problem = Problem(
            "fleet.address", f"{address!r}: {first}",
            "HOST:PORT of a running Ray cluster with this Ray and Python",
            "See what runs with `ray status --address HOST:PORT`; leave the key out to start a local Ray.",
        )  # fmt: skip
        raise ConfigError("the cluster", [problem]) from error
    try:
        yield
    finally:
        ray.shutdown()


def _to_log(message: Mapping[str, object], *_: object, **__: object) -> None:
    log.info("Ray: %s", message.get("lines"))
