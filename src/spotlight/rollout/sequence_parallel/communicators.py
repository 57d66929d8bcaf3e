"""Collectives between the ranks of a group: gloo for CPUs, NCCL for GPUs, behind one interface.

A communicator is opened and closed many times per process. If a member dies or hangs, the others must get a
:class:`SpPeerLostError` within ``collective_s``:

- gloo blocks the thread. A dead peer's closed socket ends the collective in milliseconds, a stopped peer runs
  into gloo's timeout. torch raises a plain RuntimeError for both, recognized by its text.
- NCCL runs kernels and does not report a dead peer. A timer aborts the communicator, the kernels return, and
  ``bounded`` raises, whatever else the abort makes of what was being exchanged. An abort that does not return
  ends the process. While it opens there is nothing to abort: a process whose peer is missing then cannot be
  freed, and :class:`CommunicatorStuckError` ends it.

Both serve one node: gloo binds to the loopback interface.
"""

from __future__ import annotations

import os
import re
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, wait
from contextlib import AbstractContextManager, contextmanager
from datetime import timedelta
from typing import Protocol

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import Store, _abort_process_group, _set_pg_timeout, _world

from spotlight.rollout.sequence_parallel.rendezvous import listening_only_on
from spotlight_rewards.base.device_errors import end_if_lost, end_process

_HANDLING = "TORCH_NCCL_ASYNC_ERROR_HANDLING"
_GLOO = re.compile(r"gloo|Connection closed by peer|Connection reset by peer|Timed out waiting \d+ms")


class SpPeerLostError(RuntimeError):
    """A rank is dead, stopped or unreachable while others wait for it."""


class CommunicatorStuckError(RuntimeError):
    """Opening a communicator has not returned in time, and cannot be ended: the process must end."""


class Communicator(Protocol):
    """This process's default process group: its sequence-parallel group, or none.

    Attributes:
        device: required device of exchanged tensors.
        collective_s: time limit of a collective, unless :meth:`bounded` is given another.
    """

    device: torch.device
    collective_s: float

    def open(self, store: Store, rank: int, degree: int) -> dist.ProcessGroup:
        """Connect to the other ranks, which must call this too.

        Raises:
            SpPeerLostError: a rank could not be reached in time.
            CommunicatorStuckError: the same, and this process can open no other.
        """

    def half(self, group: dist.ProcessGroup) -> dist.ProcessGroup:
        """A group of this rank's half of the opened one: its lower ranks, or its upper ones.

        All ranks must call it; it takes half of ``collective_s`` at most. It closes with the whole. Raises
        what :meth:`open` does.
        """

    def close(self) -> None:
        """Leave immediately, in any state; collectives of the others fail. No effect when closed."""

    def bounded(self, limit_s: float | None = None) -> AbstractContextManager[None]:
        """Context for collectives, which are complete on exit.

        Args:
            limit_s: for gloo, of each; for NCCL, of all together; default: ``collective_s``.

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
        with self.bounded(), listening_only_on("127.0.0.1"):
            return _opened("gloo", store, rank, degree, self.collective_s)

    def half(self, group: dist.ProcessGroup) -> dist.ProcessGroup:
        """See :meth:`Communicator.half`."""
        with self.bounded(), listening_only_on("127.0.0.1"):
            return _half(group, self.collective_s / 4)  # each of two; later limits are set by `bounded`

    def close(self) -> None:
        """See :meth:`Communicator.close`. Closes the sockets, so the others need not wait for a timeout."""
        if dist.is_initialized():
            dist.destroy_process_group()

    @contextmanager
    def bounded(self, limit_s: float | None = None) -> Iterator[None]:
        """See :meth:`Communicator.bounded`."""
        limit = timedelta(seconds=self.collective_s if limit_s is None else limit_s)
        for group in list(_world.pg_map):
            _set_pg_timeout(limit, group)
        try:
            yield
        except RuntimeError as error:
            if isinstance(error, dist.DistError) or _GLOO.search(str(error)):
                raise SpPeerLostError(_first_line(error)) from error
            raise


class Nccl:
    """See :class:`Communicator`.

    Never run between two GPUs, and NCCL refuses two ranks on one: tests run it over gloo, made to answer as
    late as NCCL does. Follows torch's and NCCL's documentation.

    Args:
        device: this process's GPU, with an index.
    """

    def __init__(self, device: torch.device, collective_s: float) -> None:
        if device.type != "cuda" or device.index is None:
            raise ValueError(f"NCCL's device is {device}; expected a GPU with its index, such as cuda:0")
        self.device = device
        self.collective_s = collective_s
        self._handling = os.environ.get(_HANDLING)

    def open(self, store: Store, rank: int, degree: int) -> dist.ProcessGroup:
        """See :meth:`Communicator.open`. Connects eagerly, so that the first step does not pay for it."""
        # Otherwise torch's watchdog kills the process when a collective fails; this one must survive.
        os.environ[_HANDLING] = "0"
        torch.cuda.set_device(self.device)
        return self._connected(
            lambda: _opened("nccl", store, rank, degree, self.collective_s, self.device), self.collective_s
        )

    def half(self, group: dist.ProcessGroup) -> dist.ProcessGroup:
        """See :meth:`Communicator.half`."""
        return self._connected(lambda: _half(group, self.collective_s), self.collective_s / 2)

    def close(self) -> None:
        """See :meth:`Communicator.close`. Aborts, because an orderly shutdown waits for dead peers."""
        if dist.is_initialized():
            with self._ending("aborting a group of GPUs"):
                _abort_process_group()
        # The process may become a learner rank, which a failed collective is to end.
        if self._handling is None:
            os.environ.pop(_HANDLING, None)
        else:
            os.environ[_HANDLING] = self._handling

    def _connected(self, opened: Callable[[], dist.ProcessGroup], limit_s: float) -> dist.ProcessGroup:
        def connect() -> dist.ProcessGroup:
            torch.cuda.set_device(self.device)  # of this thread
            try:
                group = opened()
                _use(group, self.device)
                torch.cuda.synchronize(self.device)
            except dist.DistError as error:
                end_if_lost(error)
                raise SpPeerLostError(_first_line(error)) from error
            return group

        # In a thread, since NCCL waits for a missing peer without end, and there is nothing to abort yet.
        return _in_time(connect, limit_s)

    @contextmanager
    def _ending(self, what: str) -> Iterator[None]:
        """Ends the process if the block takes longer than a collective may."""
        why = f"{what} has not returned after {self.collective_s:g} s"
        timer = threading.Timer(self.collective_s, end_process, [why])
        timer.daemon = True
        timer.start()
        try:
            yield
        finally:
            timer.cancel()

    @contextmanager
    def bounded(self, limit_s: float | None = None) -> Iterator[None]:
        """See :meth:`Communicator.bounded`."""
        limit_s = self.collective_s if limit_s is None else limit_s
        expired, over = threading.Event(), threading.Event()

        def expire() -> None:
            expired.set()
            self.close()
            with self._ending("an exchange of GPUs that was aborted"):  # kernels may outlast their abort
                over.wait()

        timer = threading.Timer(limit_s, expire)
        timer.start()
        try:
            yield
            torch.cuda.synchronize(self.device)
        except Exception as error:
            end_if_lost(error)
            # An abort shows in many ways: a length that never came, a group that is none any more.
            if expired.is_set() or isinstance(error, dist.DistError):
                raise SpPeerLostError(_first_line(error)) from error
            raise
        finally:
            over.set()
            timer.cancel()
            timer.join()  # wait for an abort in progress
        if expired.is_set():
            raise SpPeerLostError(f"NCCL collectives were not done after {limit_s:g} s")


def _in_time(connect: Callable[[], dist.ProcessGroup], limit_s: float) -> dist.ProcessGroup:
    """What ``connect`` returns or raises, in a thread of its own: it is left behind if it takes longer."""
    opened: Future[dist.ProcessGroup] = Future()

    def run() -> None:
        try:
            opened.set_result(connect())
        except BaseException as error:  # noqa: BLE001 - result() raises it
            opened.set_exception(error)

    threading.Thread(target=run, name="nccl-opens", daemon=True).start()
    wait([opened], limit_s)
    if not opened.done():
        raise CommunicatorStuckError(
            f"opening a group of GPUs has not returned after {limit_s:g} s: a member left or died meanwhile. "
            "This process ends and is started again. If that repeats with all members there, raise "
            "fleet.collective_s"
        )
    return opened.result()


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


def _use(group: dist.ProcessGroup, device: torch.device) -> None:
    """Make every kind of collective that a group makes: NCCL connects two GPUs when one first needs it."""
    ones = torch.ones(group.size(), device=device)
    dist.all_reduce(ones, group=group)
    dist.broadcast(ones, group=group, group_src=0)
    dist.all_gather([torch.empty_like(ones) for _ in range(group.size())], ones, group=group)
    dist.all_to_all_single(torch.empty_like(ones), ones, group=group)


def _half(group: dist.ProcessGroup, timeout_s: float) -> dist.ProcessGroup:
    middle, timeout = group.size() // 2, timedelta(seconds=timeout_s)
    halves = [range(middle), range(middle, group.size())]
    made = [dist.new_group(list(ranks), timeout=timeout) for ranks in halves]
    own: dist.ProcessGroup = made[group.rank() >= middle]
    return own


def _first_line(error: BaseException) -> str:
    return next(iter(str(error).splitlines()), type(error).__name__)
