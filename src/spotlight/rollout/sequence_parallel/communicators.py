"""What moves tensors between the ranks of a group: gloo between CPUs, NCCL between GPUs, one interface.

A communicator is opened and closed many times in the life of a process. A member that dies or hangs while
others wait for it must end in :class:`SpPeerLostError` within ``collective_s``:

- gloo's collectives block their thread. A dead peer's socket closes, which ends them in milliseconds; a
  stopped one runs into gloo's own time-out. Both are errors of the collective, told by their text: torch
  raises a plain RuntimeError.
- NCCL's are kernels: a dead peer tells the host nothing. A timer aborts the communicator when what was begun
  is not done in time; then the kernels return, and ``bounded`` raises.

Both serve one node: gloo binds to the loopback.
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
    """A rank that others waited for is dead, stopped, or out of reach."""


class Communicator(Protocol):
    """The default process group of this process: its sequence-parallel group, or nothing.

    Attributes:
        device: where tensors must be to be exchanged.
        collective_s: a collective that is not done after so long ends in an error.
    """

    device: torch.device
    collective_s: float

    def open(self, store: Store, rank: int, degree: int) -> dist.ProcessGroup:
        """Connect to the other ranks, who all call it too.

        Raises:
            SpPeerLostError: some could not be reached in time.
        """

    def close(self) -> None:
        """Leave at once, whatever the state; nothing to do when closed. Collectives of the others fail."""

    def bounded(self) -> AbstractContextManager[None]:
        """Around collectives: on leaving it they are done.

        Raises:
            SpPeerLostError: a peer is dead or late. Other errors pass as they are.
        """


class Gloo:
    """Between CPUs of one machine; see :class:`Communicator`."""

    def __init__(self, collective_s: float) -> None:
        self.device = torch.device("cpu")
        self.collective_s = collective_s

    def open(self, store: Store, rank: int, degree: int) -> dist.ProcessGroup:
        """See :meth:`Communicator.open`."""
        with self.bounded(), _on_loopback():
            return _opened("gloo", store, rank, degree, self.collective_s)

    def close(self) -> None:
        """See :meth:`Communicator.close`. Sockets close at once: the others need not wait for a time-out."""
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
    """Between GPUs of one machine; see :class:`Communicator`.

    Written to torch's and NCCL's documentation and not exercised by any test: that takes two GPUs, since NCCL
    refuses two ranks on one.

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
        # Else torch's watchdog ends the process when a collective fails; here the process goes on.
        os.environ["TORCH_NCCL_ASYNC_ERROR_HANDLING"] = "0"
        torch.cuda.set_device(self.device)
        with self.bounded():
            return _opened("nccl", store, rank, degree, self.collective_s, self.device)

    def close(self) -> None:
        """See :meth:`Communicator.close`. Aborts: an orderly end would wait for peers that are gone."""
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
            timer.join()  # an abort under way ends first
        if expired.is_set():
            raise SpPeerLostError(f"NCCL collectives were not done after {self.collective_s:g} s")


def communicator(device: torch.device, collective_s: float) -> Communicator:
    """What suits the device: NCCL for GPUs, gloo for anything else."""
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
    # torch numbers groups, the number is part of where ranks meet, and only destroying a group sets it back:
    # whoever failed to open one before would wait at another place than the rest.
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
    """Have gloo listen where only this machine can connect, unless the user named an interface."""
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
