"""Bring files of a snapshot to this machine: chunks in parallel, each checked against its digest.

A file appears whole, under the name that it is checked for; memory is bounded by :data:`RECEIVERS` chunks.
"""

from __future__ import annotations

import hashlib
import os
import sys
from collections.abc import Mapping
from concurrent.futures import wait
from functools import partial
from pathlib import Path

from spotlight.store.store_errors import require_free_bytes
from spotlight_bucket.bucket_objects import BucketError, Objects
from spotlight_bucket.snapshots import CHUNKS, StoredFile, chunk_bytes_of, digest_of
from spotlight_bucket.transfers import Transfers
from spotlight_rewards.base.file_errors import storage_errors
from spotlight_rewards.base.files import TEMPORARY_PREFIX, fsync_path

RECEIVERS = 8


class MissingChunkError(BucketError):
    """A chunk of the snapshot is not there; a head may have replaced the snapshot since it was read."""


def receive(objects: Objects, files: Mapping[str, StoredFile], folder: Path) -> int:
    """Write the files below a folder, replacing those that are there; returns the bytes brought.

    Files that are there with the right content are left alone.

    Raises:
        MissingChunkError: see there.
        StoreError: a chunk is not what its name says, or the disk.
    """
    wanted = {path: file for path, file in files.items() if not holds(folder / path, path, file)}
    needed = sum(file.size_bytes for file in wanted.values())
    require_free_bytes(folder, needed)
    with storage_errors("cannot write what the bucket holds", folder):
        with Transfers(RECEIVERS) as transfers:
            for path, file in wanted.items():
                target = folder / path
                target.parent.mkdir(parents=True, exist_ok=True)
                temporary = target.with_name(TEMPORARY_PREFIX + target.name)
                temporary.unlink(missing_ok=True)
                _write(objects, file, chunk_bytes_of(path), temporary, transfers)
                temporary.replace(target)
        for parent in {(folder / path).parent for path in wanted}:
            fsync_path(parent)
    return needed


def holds(place: Path, path: str, file: StoredFile) -> bool:
    """Whether the content is there already."""
    try:
        if place.is_symlink() or not place.is_file() or place.stat().st_size != file.size_bytes:
            return False
        with place.open("rb") as opened:
            for chunk in file.chunks:
                if hashlib.sha256(opened.read(chunk_bytes_of(path))).hexdigest() != digest_of(chunk):
                    return False
    except OSError:
        return False
    return True


def _write(objects: Objects, file: StoredFile, piece: int, target: Path, transfers: Transfers) -> None:
    descriptor = os.open(target, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:

        def bring(index: int) -> None:
            start = index * piece
            content = _checked(objects, file.chunks[index], min(piece, file.size_bytes - start))
            while content:
                written = os.pwrite(descriptor, content, start)
                content, start = content[written:], start + written

        indices = range(len(file.chunks))
        for first in indices[::RECEIVERS]:
            some = indices[first : first + RECEIVERS]
            under_way = [transfers.submit(partial(bring, index)) for index in some]
            wait(under_way)  # they write to the descriptor
            for each in under_way:
                each.result()
        os.fsync(descriptor)
    finally:
        if not isinstance(
            sys.exception(), KeyboardInterrupt
        ):  # which leaves calls under way, that write to it
            os.close(descriptor)


def _checked(objects: Objects, chunk: str, size_bytes: int) -> bytes:
    found = objects.get(f"{CHUNKS}/{chunk}", size_bytes)
    if found is None:
        raise MissingChunkError(
            f"{objects.address}/{CHUNKS}/{chunk}: no such object, though a snapshot names it. Restore it "
            "from a copy of the bucket, or start a run of another name."
        )
    content = found[0]
    if len(content) != size_bytes or (digest := hashlib.sha256(content).hexdigest()) != digest_of(chunk):
        what = f"{len(content)} bytes" if len(content) != size_bytes else f"sha256 {digest}"
        raise BucketError(
            f"{objects.address}/{CHUNKS}/{chunk}: {what}; expected {size_bytes} bytes of that digest. "
            "Restore it from a copy of the bucket, or start a run of another name."
        )
    return content
