"""Copies a model's files from other nodes into this node's hub cache.

Invariants:
- A file gets its name among the blobs once its SHA-256 is the manifest's and it is on the disk, and a
  snapshot is linked once all its files are here: readers of the cache see whole files only, also after a
  power cut.
- What arrived stays: the next source, or the next process, goes on from there. Files are identified by
  content, so it does not matter which node had them.
- One process of a node copies at a time (the caller holds a lock).
"""

from __future__ import annotations

import hashlib
import logging
import math
import os
import shutil
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from spotlight_files.hub_list import Listed, require_listed
from spotlight_files.hub_snapshot import (
    FileSource,
    PendingBytes,
    SnapshotFile,
    SnapshotManifest,
    SourceLostError,
    WantedModel,
    require_fit,
)
from spotlight_rewards.base.files import fsync_path

log = logging.getLogger("spotlight.files")

CHUNK_BYTES = 16 * 2**20
_AHEAD = 3
"""Chunks asked for before the first has arrived: the source reads while others travel and are hashed."""
_ASKED_MAX = 8
"""Nodes that have not given the files before the hub is asked."""
_PART = ".from-a-node"


def fetch_snapshot(
    wanted: WantedModel,
    sources: Iterable[FileSource],
    directory: Path,
    chunk_bytes: int = CHUNK_BYTES,
    limit_s: float = math.inf,
    hub_list: Callable[[], Listed | None] = lambda: None,
) -> str | None:
    """Copy the files from the first source that has them, and from others in turn if it is lost.

    Args:
        directory: of the model in the hub's cache.
        limit_s: after this long no further source is asked.
        hub_list: the hub's own list of the commit, if it can be had: what is not in it is refused.

    Returns:
        The commit; None if no source had the files, or none was left; the log says which.

    Raises:
        OSError: this node's disk is full or broken.
    """
    ends_s = time.monotonic() + limit_s
    for asked, source in enumerate(sources, start=1):
        began_s = time.monotonic()
        try:
            offer = source.offer(wanted)
            if offer is not None:
                require_fit(offer, wanted)
                copied = copy_files(offer, source, directory / "blobs", chunk_bytes)
                listed = hub_list()
                if listed is None:
                    log.warning(
                        "%s: checked against the hashes that node %s gave, not the hub's: its list is "
                        "neither cached here nor to be had. A node that lies leaves false files in %s",
                        wanted.hub_id, source.name, directory,
                    )  # fmt: skip
                else:
                    require_listed(offer, listed, directory / "blobs")
                _publish(offer, directory)
                seconds = time.monotonic() - began_s
                log.info(
                    "%s: %d MB were fetched from node %s in %.1f s",
                    wanted.hub_id, copied // 10**6, source.name, seconds,
                )  # fmt: skip
                return offer.commit
        except SourceLostError as error:
            log.warning("%s: not from node %s: %s", wanted.hub_id, source.name, error)
        if asked >= _ASKED_MAX or time.monotonic() > ends_s:
            break
    return None


def copy_files(offer: SnapshotManifest, source: FileSource, blobs: Path, chunk_bytes: int) -> int:
    """Copy those of the offered files that are missing; returns how many bytes were received.

    Raises:
        SourceLostError: see there; what was received stays.
        OSError: this node's disk is full or broken.
    """
    blobs.mkdir(parents=True, exist_ok=True)
    missing = {file.blob: file for file in offer.files if not (blobs / file.blob).is_file()}
    left = sum(file.bytes - _size(blobs / f"{name}{_PART}") for name, file in missing.items())
    free = shutil.disk_usage(blobs).free
    if left > free:
        raise OSError(f"{blobs}: {left} bytes are to come, {free} are free: enlarge the disk or set HF_HOME")
    return sum(_copy_file(file, source, blobs, chunk_bytes) for file in missing.values())


def _copy_file(file: SnapshotFile, source: FileSource, blobs: Path, chunk_bytes: int) -> int:
    part = blobs / f"{file.blob}{_PART}"
    before = _size(part)
    received = _receive(file, source, part, chunk_bytes)
    if received is None and before:  # what lay here may be what is damaged: once more, all from this source
        received = _receive(file, source, part, chunk_bytes)
    if received is None:
        raise SourceLostError(f"{file.path} is damaged: its SHA-256 is not {file.sha256[:12]}...")
    fsync_path(part)
    part.rename(blobs / file.blob)
    return received


def _receive(file: SnapshotFile, source: FileSource, part: Path, chunk_bytes: int) -> int | None:
    """Complete ``part``; the bytes received, or None if the whole is damaged, and removed."""
    with part.open("a+b") as out:
        out.seek(0)
        digest = hashlib.file_digest(out, "sha256")
        start = out.tell()
        for data in _stream(file, source, start, chunk_bytes):
            digest.update(data)
            out.write(data)
    if digest.hexdigest() == file.sha256:
        return file.bytes - start
    part.unlink()
    return None


def _stream(file: SnapshotFile, source: FileSource, start: int, chunk_bytes: int) -> Iterator[bytes]:
    under_way: deque[tuple[int, PendingBytes]] = deque()
    asked = start
    while asked < file.bytes or under_way:
        while asked < file.bytes and len(under_way) < _AHEAD:
            length = min(chunk_bytes, file.bytes - asked)
            under_way.append((length, source.read(file.path, asked, length)))
            asked += length
        length, pending = under_way.popleft()
        data = pending()
        if len(data) != length:
            raise SourceLostError(f"{file.path}: found {len(data)} bytes, expected {length}")
        yield data


def _publish(offer: SnapshotManifest, directory: Path) -> None:
    """Link the snapshot."""
    root = directory / "snapshots" / offer.commit
    for file in offer.files:
        link = root / file.path
        link.parent.mkdir(parents=True, exist_ok=True)
        draft = link.with_name(f"{link.name}{_PART}")
        draft.unlink(missing_ok=True)
        draft.symlink_to(os.path.relpath(directory / "blobs" / file.blob, link.parent))
        draft.replace(link)


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0
