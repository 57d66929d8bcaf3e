"""Tensors as a byte stream in bounded buckets, with device-independent checksums.

Invariants:
- The pieces of all buckets, in order, cover every byte of every tensor once.
- Pieces start at multiples of 16 bytes in tensor and bucket, so they can be read as words.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

_ALIGNMENT = 16
_COLUMNS = 4096


@dataclass(frozen=True, slots=True)
class Piece:
    """A byte range of one tensor, placed in a bucket.

    Attributes:
        index: of the tensor.
        start: first byte in the tensor.
        stop: end, exclusive.
        at: offset in the bucket.
    """

    index: int
    start: int
    stop: int
    at: int


def cut(sizes: Sequence[int], bucket_bytes: int) -> Iterator[list[Piece]]:
    """Divide tensors of ``sizes`` bytes into buckets, each as full as possible.

    Raises:
        ValueError: ``bucket_bytes`` is not a positive multiple of 16.
    """
    if bucket_bytes < _ALIGNMENT or bucket_bytes % _ALIGNMENT:
        raise ValueError(f"bucket_bytes is {bucket_bytes}; expected a positive multiple of {_ALIGNMENT}")
    bucket: list[Piece] = []
    at = 0
    for index, size in enumerate(sizes):
        start = 0
        while start < size:
            if at == bucket_bytes:
                yield bucket
                bucket, at = [], 0
            stop = min(size, start + bucket_bytes - at)
            bucket.append(Piece(index, start, stop, at))
            at += -(-(stop - start) // _ALIGNMENT) * _ALIGNMENT
            start = stop
    if bucket:
        yield bucket


def as_bytes(tensor: Tensor) -> Tensor:
    """A tensor's memory as [bytes] uint8, without a copy.

    Raises:
        ValueError: it is not contiguous.
    """
    if not tensor.is_contiguous():
        raise ValueError(
            f"a tensor of shape {list(tensor.shape)} is not contiguous; call .contiguous() first"
        )
    return tensor.detach().reshape(-1).view(torch.uint8)


def checksum(data: Tensor) -> Tensor:
    """Three position-weighted 64-bit sums over [bytes] uint8: [3] int64, on the data's device.

    Words form rows of 4096; row and column sums are weighted by odd numbers modulo 2^64, so any damaged word
    changes both. Independent of summation order and memory-bound. Detects faults, not tampering.
    """
    if data.storage_offset() % 8:
        data = data.clone()
    words = data[: data.numel() // 8 * 8].view(torch.int64)
    rows = words.numel() // _COLUMNS
    grid = words[: rows * _COLUMNS].view(rows, _COLUMNS)
    rest = torch.cat([words[rows * _COLUMNS :], data[8 * words.numel() :].to(torch.int64)])
    return torch.stack([_weighted(grid.sum(1)), _weighted(grid.sum(0)), _weighted(rest)])


def digest_of(tensors: Mapping[str, Tensor]) -> str:
    """SHA-256 over names, types, shapes and checksums of tensors on one device; equal on any device.

    Empty if there are none.

    Raises:
        ValueError: a tensor is not contiguous.
    """
    if not tensors:
        return ""
    names = sorted(tensors)
    sums = torch.stack([checksum(as_bytes(tensors[name])) for name in names]).tolist()
    rows = [[n, str(tensors[n].dtype), list(tensors[n].shape), s] for n, s in zip(names, sums, strict=True)]
    return hashlib.sha256(json.dumps(rows).encode()).hexdigest()


def _weighted(values: Tensor) -> Tensor:
    return (values * torch.arange(1, 2 * values.numel() + 1, 2, device=values.device)).sum()
