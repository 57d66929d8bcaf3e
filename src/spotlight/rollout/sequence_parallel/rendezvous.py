"""The key-value store through which groups find each other. It lives outside of every group.

One process that outlives them (the head, a reserved node) serves it; each worker connects once. It keeps some
hundred bytes a member of each group ever formed. Its protocol knows no passwords: it listens on the loopback
unless told otherwise, and belongs into the cluster's private network where it is.
"""

from __future__ import annotations

import socket
from dataclasses import dataclass
from datetime import timedelta

import torch.distributed as dist
from torch._C._distributed_c10d import Store, TCPStore


@dataclass(frozen=True, slots=True)
class Address:
    """Where the store listens."""

    host: str
    port: int


def serve(host: str = "127.0.0.1", port: int = 0, timeout_s: float = 30.0) -> tuple[Store, Address]:
    """Serve a store from this process for as long as the returned object lives.

    Args:
        port: 0 takes a free one.

    Raises:
        OSError: the address cannot be listened on.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listening = socket.create_server((host, port), family=family, backlog=1024)
    taken: int = listening.getsockname()[1]
    # Handed our own socket, because the store's own listens on all interfaces. It closes it in the end.
    store = TCPStore(
        host,
        taken,
        is_master=True,
        wait_for_workers=False,
        timeout=timedelta(seconds=timeout_s),
        master_listen_fd=listening.detach(),
    )
    return store, Address(host, taken)


def connect(address: Address, timeout_s: float = 30.0) -> Store:
    """This process's connection to the store.

    Args:
        timeout_s: of the connection and, unless said otherwise, of each request.

    Raises:
        ConnectionError: nobody answers there.
    """
    try:
        return TCPStore(address.host, address.port, is_master=False, timeout=timedelta(seconds=timeout_s))
    except dist.DistError as error:
        raise ConnectionError(
            f"no group store answers at {address.host}:{address.port} within {timeout_s:g} s: is the process "
            "that serves it alive, and the port reachable from here?"
        ) from error
