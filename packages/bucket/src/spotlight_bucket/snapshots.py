"""Snapshots of a run directory in a bucket: a chain of small objects, each of which a conditional put adds.

    snapshots/0000000042.json    every file of the run: its size, and the chunks that it consists of
    chunks/000003-<sha256>       content, up to 16 MiB, named by its digest and the epoch that sent it

A snapshot counts once it is there, and its chunks are there before it. Number N+1 can be added once: of two
heads one wins, and the other finds an epoch above its own there (:class:`FencedError`). So the chain is the
fence; the lease (``lease.py``) only keeps a second head from starting in vain.

A snapshot lists as garbage the chunks that are removed after it. A head never takes such a chunk for one that
is there, nor sends one under a name of an earlier epoch: what a head that was given up still removes harms
nobody.

Everything read here was written by those who may write to the bucket, and is refused unless it is what
:func:`render` writes.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import PurePosixPath
from typing import Any

from spotlight_bucket.bucket_objects import BucketError, Objects
from spotlight_rewards.base.file_errors import StoreError

SNAPSHOTS, CHUNKS = "snapshots", "chunks"
CHUNK_BYTES = 16 << 20
SMALL_CHUNK_BYTES = 256 << 10
"""Of files that grow or change in places, such as the ledger: what stays the same is not sent again."""
_IN_LARGE_CHUNKS = {"checkpoints", "lora", "merged", "profile"}
_SNAPSHOT_BYTES_MAX = 64 << 20
_FILE_BYTES_MAX = 1 << 42
_SERIAL = re.compile(r"(\d{10})\.json")
_CHUNK = re.compile(r"(\d{6})-([0-9a-f]{64})")
_COPY = re.compile(r"[0-9a-f]{32}")
_PART_BYTES_MAX, _PATH_CHARACTERS_MAX = 255, 4096


class FencedError(BucketError):
    """Another head has taken the run over; nothing of this one reaches the bucket any more."""


@dataclass(frozen=True, slots=True)
class StoredFile:
    """A file in the bucket: chunks by name, each of :func:`chunk_bytes_of` its path but the last."""

    size_bytes: int
    chunks: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class RunSnapshot:
    """A state of a run directory.

    Attributes:
        epoch: of the head that added it.
        copy: the working copy whose files these are.
        files: by path relative to the run directory.
        garbage: chunks that are removed once it is there.
    """

    serial: int
    epoch: int
    copy: str
    files: Mapping[str, StoredFile] = field(default_factory=dict)
    garbage: tuple[str, ...] = ()

    @property
    def chunks(self) -> set[str]:
        return {chunk for file in self.files.values() for chunk in file.chunks}

    @property
    def size_bytes(self) -> int:
        return sum(file.size_bytes for file in self.files.values())


def chunk_bytes_of(path: str) -> int:
    """Into pieces of which size a file of the run directory is cut."""
    return CHUNK_BYTES if path.partition("/")[0] in _IN_LARGE_CHUNKS else SMALL_CHUNK_BYTES


def chunk_name(epoch: int, content: bytes) -> str:
    return f"{epoch:06d}-{hashlib.sha256(content).hexdigest()}"


def digest_of(chunk: str) -> str:
    return chunk.partition("-")[2]


def is_chunk(name: str) -> bool:
    return _CHUNK.fullmatch(name) is not None


def render(snapshot: RunSnapshot) -> bytes:
    return json.dumps(asdict(snapshot), separators=(",", ":"), sort_keys=True).encode()


def name_of(serial: int) -> str:
    return f"{SNAPSHOTS}/{serial:010d}.json"


def serials(objects: Objects) -> list[int]:
    """Of the snapshots that are there, ascending. Raises BucketError."""
    found = (_SERIAL.fullmatch(name) for name in objects.names(SNAPSHOTS))
    return sorted(int(match[1]) for match in found if match)


def read_snapshot(objects: Objects, serial: int) -> RunSnapshot | None:
    """None: it is not there (any more). Raises BucketError, also of one that no head can have written."""
    found = objects.get(name_of(serial), _SNAPSHOT_BYTES_MAX)
    if found is None:
        return None
    try:
        snapshot = _parsed(json.loads(found[0]))
        if snapshot.serial != serial:
            raise ValueError(f"its serial is {snapshot.serial}")
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise BucketError(
            f"{objects.address}/{name_of(serial)}: not a snapshot of a run ({str(error)[:200]}). Remove it, "
            "or take another prefix."
        ) from error
    return snapshot


def newest_snapshot(objects: Objects) -> RunSnapshot | None:
    """None: there never was one. Raises BucketError."""
    while found := serials(objects):
        if (snapshot := read_snapshot(objects, found[-1])) is not None:
            return snapshot
    return None  # all that were listed were removed: a newer one replaced them, and was listed next time


def append(objects: Objects, snapshot: RunSnapshot) -> None:
    """Add the next snapshot.

    Raises:
        FencedError: another head has.
        BucketError: the bucket does not take it now.
        StoreError: no reader would take it, however often it is tried.
    """
    content = render(snapshot)
    if len(content) > _SNAPSHOT_BYTES_MAX:
        raise StoreError(
            f"{objects.address}: the list of the run's {len(snapshot.files)} files has {len(content)} bytes; "
            f"expected at most {_SNAPSHOT_BYTES_MAX}, or nobody could read it. Remove old pictures."
        )
    if objects.create(name_of(snapshot.serial), content):
        return
    there = read_snapshot(objects, snapshot.serial)
    if there != snapshot:  # equal: the answer to an earlier try was lost
        by = "unknown" if there is None else there.epoch
        raise FencedError(
            f"{objects.address}: another head has taken this run over (epoch {by}; this one is "
            f"{snapshot.epoch}), so this one ends. "
            "What it did since its last snapshot does not count."
        )


def take_over(objects: Objects, epoch: int, copy: str) -> RunSnapshot:
    """Fence the heads before: the chain's end, as added by this epoch with the files of the one before it.

    Raises:
        FencedError: a head of a later epoch has done so meanwhile.
        BucketError: the bucket.
    """
    while True:
        before = newest_snapshot(objects) or RunSnapshot(0, 0, copy)
        if before.epoch > epoch:
            raise FencedError(f"{objects.address}: a head of epoch {before.epoch} has taken this run over.")
        # The copy stays that of the files: this head may end before it has them.
        claimed = replace(before, serial=before.serial + 1, epoch=epoch)
        try:
            append(objects, claimed)
        except FencedError:
            continue  # by the head before, which may still add one until it is fenced
        return claimed


def _parsed(tree: dict[str, Any]) -> RunSnapshot:
    files = {path: _file(path, each) for path, each in tree["files"].items()}
    folders = {str(parent) for path in files for parent in PurePosixPath(path).parents}
    if clash := folders & files.keys():
        raise ValueError(f"{min(clash)!r} is a file and a folder")
    serial, epoch, copy = tree["serial"], tree["epoch"], tree["copy"]
    garbage = tuple(tree["garbage"])
    if not (_is_count(serial, 10**10) and _is_count(epoch, 10**6) and _COPY.fullmatch(copy)):
        raise ValueError(f"serial, epoch and copy are {serial!r}, {epoch!r} and {copy!r}")
    if wrong := [each for each in garbage if not is_chunk(each)]:
        raise ValueError(f"garbage {wrong[0]!r}")
    return RunSnapshot(serial, epoch, copy, files, garbage)


def _file(path: str, tree: dict[str, Any]) -> StoredFile:
    size_bytes, chunks = tree["size_bytes"], tuple(tree["chunks"])
    if not is_plain(path):
        raise ValueError(f"the path {path[:100]!r}")
    piece = chunk_bytes_of(path)
    if not (_is_count(size_bytes, _FILE_BYTES_MAX) and len(chunks) == -(-size_bytes // piece)):
        raise ValueError(f"{path}: {size_bytes!r} bytes in {len(chunks)} chunks")
    if wrong := [each for each in chunks if not is_chunk(each)]:
        raise ValueError(f"{path}: the chunk {wrong[0]!r}")
    return StoredFile(size_bytes, chunks)


def is_plain(path: str) -> bool:
    """Whether a path leads to a file below a folder, and its parts are names that may be shown."""
    parts = path.split("/")
    return len(path) <= _PATH_CHARACTERS_MAX and all(
        part not in ("", ".", "..") and part.isprintable() and "\\" not in part
        and len(part.encode("utf-8", "surrogatepass")) <= _PART_BYTES_MAX
        for part in parts
    )  # fmt: skip


def _is_count(value: object, end: int) -> bool:
    return type(value) is int and 0 <= value < end
