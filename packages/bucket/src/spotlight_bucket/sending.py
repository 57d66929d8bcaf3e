"""Send files to a bucket in chunks, several at once, each content once.

Memory is bounded by :data:`SENDERS` chunks. Chunks that were sent are known, so what failed goes on where it
was: nothing that arrived is sent again.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple, Self

from spotlight_bucket.bucket_objects import Objects
from spotlight_bucket.run_files import OpenFile
from spotlight_bucket.snapshots import (
    CHUNKS,
    StoredFile,
    chunk_bytes_of,
    chunk_name,
    digest_of,
    is_chunk,
)
from spotlight_bucket.transfers import Transfers

SENDERS = 8
"""Chunks of 16 MiB on their way at once."""
_SETTLED_S = 1.0
"""A file's time must be so old that a later change of it is sure to have another."""


@dataclass(slots=True)
class Sent:
    """Bytes and requests of this process.

    Attributes:
        cpu_s: of the threads that send.
        there: bytes of the files of the call under way, or the last, that the bucket holds.
    """

    bytes: int = 0
    requests: int = 0
    cpu_s: float = 0.0
    there: int = 0


class _Arrival(NamedTuple):
    bytes: int
    cpu_s: float


@dataclass(slots=True)
class Sender:
    """Sends one run's files under one epoch."""

    objects: Objects
    epoch: int
    sent: Sent = field(default_factory=Sent)
    _known: dict[str, str] = field(default_factory=dict)
    _described: dict[str, tuple[tuple[int, int, int], StoredFile]] = field(default_factory=dict)
    _transfers: Transfers = field(default_factory=lambda: Transfers(SENDERS))

    def look(self, gone: Iterable[str]) -> set[str]:
        """Ask the bucket which chunks are there; of those in ``gone`` none is. Raises BucketError."""
        there = {name for name in self.objects.names(CHUNKS) if is_chunk(name)}
        self._known = {digest_of(name): name for name in there - set(gone)}
        self._described.clear()
        return there

    def forget(self, chunks: Iterable[str]) -> None:
        """These are removed."""
        for chunk in chunks:
            if self._known.get(digest_of(chunk)) == chunk:
                del self._known[digest_of(chunk)]

    def send(self, files: Iterable[OpenFile]) -> dict[str, StoredFile]:
        """What the bucket holds of the files once this returns.

        Raises BucketError, OSError of the disk; chunks that had arrived stay known.
        """
        found: dict[str, StoredFile] = {}
        under_way: dict[Future[_Arrival], str] = {}
        self.sent.there = 0
        try:
            for each in files:
                if (stored := self._unchanged(each)) is None:
                    stored = self._send(each, under_way)
                else:
                    self.sent.there += each.size_bytes
                if stored is not None:
                    found[each.path] = stored
            while under_way:
                self._settle(under_way)
        finally:
            if not isinstance(sys.exception(), KeyboardInterrupt):  # which ends at once
                for future in under_way:  # after an error: what arrives still counts
                    if future.exception() is None:
                        self._arrived(under_way[future])
                        self.sent.cpu_s += future.result().cpu_s
        self._described = {path: kept for path, kept in self._described.items() if path in found}
        return found

    def _unchanged(self, file: OpenFile) -> StoredFile | None:
        stamp, stored = self._described.get(file.path, (None, None))
        if stored is None or stamp != file.stamp:
            return None
        there = all(self._known.get(digest_of(chunk)) == chunk for chunk in stored.chunks)
        return stored if there else None

    def _send(self, file: OpenFile, under_way: dict[Future[_Arrival], str]) -> StoredFile | None:
        piece, left, chunks = chunk_bytes_of(file.path), file.size_bytes, list[str]()
        coming = {digest_of(chunk): chunk for chunk in under_way.values()}
        while left > 0:
            content = file.file.read(min(piece, left))
            if len(content) < min(piece, left):
                return None  # cut by the run while it was read: the next snapshot has it
            left -= len(content)
            name = chunk_name(self.epoch, content)
            digest = digest_of(name)
            there = self._known.get(digest) or coming.get(digest)
            if there is None:
                while len(under_way) >= SENDERS:
                    self._settle(under_way)
                future = self._transfers.submit(partial(self._put, name, content))
                under_way[future] = coming[digest] = name
                self.sent.bytes += len(content)
                self.sent.requests += 1
            else:
                self.sent.there += len(content)
            chunks.append(there or name)
        stored = StoredFile(file.size_bytes, tuple(chunks))
        if time.time() - file.stamp[2] / 1e9 > _SETTLED_S:
            self._described[file.path] = file.stamp, stored
        return stored

    def _put(self, name: str, content: bytes) -> _Arrival:
        began_s = time.thread_time()
        self.objects.put(f"{CHUNKS}/{name}", content)
        return _Arrival(len(content), time.thread_time() - began_s)

    def _settle(self, under_way: dict[Future[_Arrival], str]) -> None:
        done, _ = wait(under_way, return_when=FIRST_COMPLETED)
        for future in done:
            name = under_way.pop(future)
            arrival = future.result()
            self.sent.there += arrival.bytes
            self.sent.cpu_s += arrival.cpu_s
            self._arrived(name)

    def _arrived(self, chunk: str) -> None:
        self._known[digest_of(chunk)] = chunk

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._transfers.__exit__(*error)
