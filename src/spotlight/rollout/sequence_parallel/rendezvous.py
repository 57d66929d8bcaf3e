"""The key-value store through which groups meet. It outlives every group.

A long-lived process (the head, on a reserved node) serves it; each worker connects once. It grows by some
hundred bytes per member per group. Its protocol knows no secret: it listens on the loopback interface by
default, otherwise on one address of a private network (SECURITY.md).
"""

from __future__ import annotations

import fcntl
import os
import socket
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta

import torch.distributed as dist
from torch._C._distributed_c10d import Store, TCPStore

_SIOCGIFADDR = 0x8915  # linux/sockios.h
_INTERFACES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")


@dataclass(frozen=True, slots=True)
class Address:
    """Where the store listens."""

    host: str
    port: int


def serve(host: str = "127.0.0.1", port: int = 0, timeout_s: float = 30.0) -> tuple[Store, Address]:
    """Serve a store for as long as the returned object lives.

    Args:
        port: 0 picks a free one.

    Raises:
        OSError: cannot listen on the address.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listening = socket.create_server((host, port), family=family, backlog=1024)
    taken: int = listening.getsockname()[1]
    # Pass our own socket, which the store closes: its default listens on all interfaces.
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
    """Connect this process to the store.

    Args:
        timeout_s: for connecting and, by default, for each request.

    Raises:
        ConnectionError: nobody answers.
    """
    try:
        return TCPStore(address.host, address.port, is_master=False, timeout=timedelta(seconds=timeout_s))
    except dist.DistError as error:
        raise ConnectionError(
            f"no group store answers at {address.host}:{address.port} within {timeout_s:g} s: is the process "
            "that serves it alive, and the port reachable from here?"
        ) from error


@contextmanager
def listening_only_on(host: str) -> Iterator[None]:
    """Binds gloo and NCCL to the interface of ``host``, for groups made within: gloo's default is often the
    loopback.

    Interfaces set by the user are respected.
    """
    interface = _interface_of(host)
    ours = [] if interface is None else [name for name in _INTERFACES if name not in os.environ]
    os.environ |= {name: str(interface) for name in ours}
    try:
        yield
    finally:
        for name in ours:
            del os.environ[name]


def _interface_of(host: str) -> str | None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            try:
                answer = fcntl.ioctl(probe, _SIOCGIFADDR, struct.pack("256s", name.encode()))
            except OSError:  # an interface without an address
                continue
            if socket.inet_ntoa(answer[20:24]) == host:
                return name
    return None
