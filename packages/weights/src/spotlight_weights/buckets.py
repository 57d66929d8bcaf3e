"""Memory shared by two processes of a node, on the host or a GPU.

Host memory is an anonymous file (memfd) sent over the socket: it has no name, and is freed once both ends
close it, even by dying.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from spotlight_weights import cuda_ipc
from spotlight_weights.weight_errors import NoSpaceError, PeerLostError, WeightsError
from spotlight_weights.wire import Channel

COUNT = 2
"""Buckets per transfer: one is filled while the other is emptied."""


@contextmanager
def host_buckets(size: int) -> Iterator[tuple[list[Tensor], list[int]]]:
    """Host buckets and their descriptors, which are closed on exit. Raises NoSpaceError."""
    descriptors: list[int] = []
    try:
        for _ in range(COUNT):
            descriptor = os.memfd_create("spotlight-bucket", os.MFD_CLOEXEC)
            descriptors.append(descriptor)
            try:
                os.posix_fallocate(descriptor, 0, size)
            except OSError as error:
                raise NoSpaceError(
                    f"a peer needs {COUNT} buckets of {size} bytes of host memory to serve weights: "
                    f"{error.strerror}; free memory on the node, or serve in smaller buckets (bucket_bytes)"
                ) from error
        yield [_mapped(descriptor, size) for descriptor in descriptors], descriptors
    finally:
        for descriptor in descriptors:
            os.close(descriptor)


def take_host(channel: Channel, size: int) -> list[Tensor]:
    """Receive the peer's host buckets. Raises PeerLostError, or WeightsError if they are too small."""
    descriptors = channel.receive_files(COUNT)
    try:
        for descriptor in descriptors:
            found = os.fstat(descriptor).st_size
            if found < size:  # reading past the end would be SIGBUS
                raise WeightsError(f"{channel.peer} serves a bucket of {found} bytes, expected {size}")
        return [_mapped(descriptor, size) for descriptor in descriptors]
    finally:
        for descriptor in descriptors:
            os.close(descriptor)


def take_cuda(channel: Channel, handles: Sequence[object], size: int, device: torch.device) -> list[Tensor]:
    """Open the peer's GPU buckets. Raises PeerLostError, or WeightsError if they are too small."""
    try:
        buckets = [cuda_ipc.open_shared(handle, device) for handle in handles if isinstance(handle, dict)]
    except (RuntimeError, KeyError, TypeError, ValueError) as error:
        raise PeerLostError(
            f"cannot open the GPU memory of {channel.peer} on {device}: {error}; take the weights from "
            "another peer or from the store"
        ) from error
    if len(buckets) != COUNT or any(bucket.numel() < size for bucket in buckets):
        raise WeightsError(
            f"{channel.peer} serves buckets of {[b.numel() for b in buckets]} bytes, expected {COUNT} of "
            f"{size}"
        )
    return buckets


def _mapped(descriptor: int, size: int) -> Tensor:
    return torch.frombuffer(mmap.mmap(descriptor, size), dtype=torch.uint8)


@contextmanager
def side_stream(device: torch.device) -> Iterator[None]:
    """On a GPU, a separate stream, so that copies do not queue behind computation."""
    if device.type != "cuda":
        yield
        return
    with torch.cuda.device(device), torch.cuda.stream(torch.cuda.Stream(device)):  # type: ignore[no-untyped-call]
        yield
