"""Many tensors as one host buffer, and a host buffer on a GPU: few large transfers through pinned memory.

torch keeps the pinned memory for the next version.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TypeAlias

import torch
from torch import Tensor

Kind: TypeAlias = tuple[torch.dtype, Sequence[int]]
"""Type and shape of a tensor."""

STAGED_BYTES = 256 * 2**20
ON_DEVICE_BYTES = 2 * 2**30
"""Most bytes put on a GPU beside the weights that they replace: adapters are smaller, whole models not."""


def gather(tensors: Sequence[Tensor], kinds: Sequence[Kind], flat: Tensor) -> None:
    """Copy tensors of one device one after another into [bytes] uint8 on the CPU, rounded to ``kinds``."""
    at = 0
    for part in _parts([nbytes(kind) for kind in kinds]):
        size = sum(map(nbytes, kinds[part]))
        host = flat[at : at + size]
        at += size
        if tensors[0].device.type == "cpu":
            torch._foreach_copy_(carve(host, kinds[part]), list(tensors[part]))
            continue
        staged = torch.empty(size, dtype=torch.uint8, device=tensors[0].device)
        torch._foreach_copy_(carve(staged, kinds[part]), list(tensors[part]))
        host.copy_(_pinned(size).copy_(staged))


def on_device(flat: Tensor, device: torch.device) -> Tensor:
    """A copy of [bytes] uint8 from the CPU."""
    copy = torch.empty(flat.numel(), dtype=torch.uint8, device=device)
    for start in range(0, flat.numel(), STAGED_BYTES):
        source = flat[start : start + STAGED_BYTES]
        copy[start : start + source.numel()].copy_(_pinned(source.numel()).copy_(source))
    return copy


def carve(flat: Tensor, kinds: Sequence[Kind]) -> list[Tensor]:
    """Views of [bytes] uint8, one after another; a type must not follow a smaller one."""
    sizes = [nbytes(kind) for kind in kinds]
    parts = torch.split(flat, sizes)
    return [
        part.view(dtype).view(torch.Size(shape)) for part, (dtype, shape) in zip(parts, kinds, strict=True)
    ]


def nbytes(kind: Kind) -> int:
    """Bytes of a tensor."""
    dtype, shape = kind
    return dtype.itemsize * torch.Size(shape).numel()


def _pinned(size: int) -> Tensor:
    return torch.empty(size, dtype=torch.uint8, pin_memory=True)


def _parts(sizes: Sequence[int]) -> Iterator[slice]:
    """Runs of at most ``STAGED_BYTES``, or of one."""
    first = held = 0
    for index, size in enumerate(sizes):
        if index > first and held + size > STAGED_BYTES:
            yield slice(first, index)
            first, held = index, 0
        held += size
    yield slice(first, len(sizes))
