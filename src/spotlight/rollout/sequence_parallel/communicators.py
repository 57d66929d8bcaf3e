"""Collectives between the ranks of a group: gloo for CPUs, NCCL for GPUs, behind one interface.

A communicator is opened and closed many times per process. If a member dies or hangs, the others must get a
:class:`SpPeerLostError` within ``collective_s``:

- gloo blocks the thread. A dead peer's closed socket ends the collective in milliseconds, a stopped peer runs
  into gloo's timeout. torch raises a plain RuntimeError for both, recognized by its text.
- NCCL runs kernels and does not report a dead peer. A timer aborts the communicator, the kernels return, and
  ``bounded`` raises.

Both serve one node: gloo binds to the loopback interface.
"""

from __future__ import annotations

import os
import re
import socket
import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from datetime import timedelta
from typing import Protocol

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import Store, _abort_process_group, _world

_GLOO = re.compile(r"gloo|Connection closed by peer|Connection reset by peer|Timed out waiting \d+ms")


class SpPeerLostError(RuntimeError):
    """A rank is dead, stopped or unreachable while others wait for it."""


class Communicator(Protocol):
    """This process's default process group: its sequence-parallel group, or none.

    Attributes:
        device: required device of exchanged tensors.
        collective_s: time limit of a collective.
    """

    device: torch.device
    collective_s: float

    def open(self, store: Store, rank: int, degree: int) -> dist.ProcessGroup:
        """Connect to the other ranks, which must call this too.

        Raises:
            SpPeerLostError: a rank could not be reached in time.
        """

    def close(self) -> None:
        """Leave immediately, in any state; collectives of the others fail. No effect when closed."""

    def bounded(self) -> AbstractContextManager[None]:
        """Context for collectives, which are complete on exit.

        Raises:
            SpPeerLostError: a peer is dead or late. Other errors pass through.
        """


class Gloo:
    """See :class:`Communicator`."""

    def __init__(self, collective_s: float) -> None:
        self.device = torch.device("cpu")
        self.collective_s = collective_s

    def open(self, store: Store, rank: int, degree: int) -> dist.ProcessGroup:
        """See :meth:`Communicator.open`."""
        with self.bounded(), _on_loopback():
            return _opened("gloo", store, rank, degree, self.collective_s)

    def close(self) -> None:
        """See :meth:`Communicator.close`. Closes the sockets, so the others need not wait for a timeout."""
        if dist.is_initialized():
            dist.destroy_process_group()

    @contextmanager
    def bounded(self) -> Iterator[None]:
        """See :meth:`Communicator.bounded`."""
        try:
            yield
        except RuntimeError as error:
            if isinstance(error, dist.DistError) or _GLOO.search(str(error)):
                raise SpPeerLostError(str(error).splitlines()[0]) from error
            raise


class Nccl:
    """See :class:`Communicator`.

    Not tested: that needs two GPUs, since NCCL refuses two ranks on one. Follows torch's and NCCL's
    documentation.

    Args:
        device: this process's GPU, with an index.
    """

    def __init__(self, device: torch.device, collective_s: float) -> None:
        if device.type != "cuda" or device.index is None:
            raise ValueError(f"NCCL's device is {device}; expected a GPU with its index, such as cuda:0")
        self.device = device
        self.collective_s = collective_s

    def open(self, store: Store, rank: int, degree: int) -> dist.ProcessGroup:
        """See :meth:`Communicator.open`. Connects eagerly, so that the first step does not pay for it."""
        # Otherwise torch's watchdog kills the process when a collective fails; this one must survive.
        os.environ["TORCH_NCCL_ASYNC_ERROR_HANDLING"] = "0"
        torch.cuda.set_device(self.device)
        with self.bounded():
            return _opened("nccl", store, rank, degree, self.collective_s, self.device)

    def close(self) -> None:
        """See :meth:`Communicator.close`. Aborts, because an orderly shutdown waits for dead peers."""
        if dist.is_initialized():
            _abort_process_group()

    @contextmanager
    def bounded(self) -> Iterator[None]:
        """See :meth:`Communicator.bounded`."""
        expired = threading.Event()

        def expire() -> None:
            expired.set()
            self.close()

        timer = threading.Timer(self.collective_s, expire)
        timer.start()
        try:
            yield
            torch.cuda.synchronize(self.device)
        except RuntimeError as error:
            if expired.is_set() or isinstance(error, dist.DistError):
                raise SpPeerLostError(str(error).splitlines()[0]) from error
            raise
        finally:
            timer.cancel()
            timer.join()  # wait for an abort in progress
        if expired.is_set():
            raise SpPeerLostError(f"NCCL collectives were not done after {self.collective_s:g} s")


def communicator(device: torch.device, collective_s: float) -> Communicator:
    """NCCL for GPUs, gloo otherwise."""
    if not collective_s > 0:
        raise ValueError(f"collective_s is {collective_s}; expected seconds above 0")
    return Nccl(device, collective_s) if device.type == "cuda" else Gloo(collective_s)


def _opened(
    backend: str,
    store: Store,
    rank: int,
    degree: int,
    timeout_s: float,
    device: torch.device | None = None,
) -> dist.ProcessGroup:
    if dist.is_initialized():
        raise RuntimeError(
            "this process has a default process group already: a rollout worker's only group is its "
            "sequence-parallel one, so keep learner ranks and rollout workers in processes of their own"
        )
    # torch's group counter is part of the rendezvous key, and only destroying a group resets it. After a
    # failed attempt to open one, this rank would wait under another key than the rest.
    _world.group_count = 0
    timeout = timedelta(seconds=timeout_s)
    dist.init_process_group(
        backend, store=store, rank=rank, world_size=degree, timeout=timeout, device_id=device
    )
    group = dist.group.WORLD
    assert group is not None
    return group


@contextmanager
def _on_loopback() -> Iterator[None]:
    name = "GLOO_SOCKET_IFNAME"
    loopback = next((found for _, found in socket.if_nameindex() if found.startswith("lo")), None)
    if name in os.environ or loopback is None:
        yield
        return
    os.environ[name] = loopback
    try:
        yield
    finally:
        del os.environ[name]
