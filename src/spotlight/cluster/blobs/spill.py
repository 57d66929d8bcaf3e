"""A process's folder for blobs spilled from memory; see ``blob_store.py``.

DIRECTORY/lock                      held briefly by a starting process
DIRECTORY/blobs-XXXXXXXX/lock       held by its process while it lives
DIRECTORY/blobs-XXXXXXXX/000001     a line of JSON (label, length and checksum), then the blob
"""

from __future__ import annotations

import fcntl
import itertools
import json
import logging
import os
import shutil
import tempfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Self

from spotlight_rewards.base.file_errors import storage_errors
from spotlight_rewards.base.files import TEMPORARY_PREFIX, discard

log = logging.getLogger("spotlight.store")

_PREFIX = "blobs-"
_LOCK = "lock"
_HEADER_BYTES_MAX = 64 * 1024


class Damaged(Exception):  # noqa: N818 - internal to the store
    """A file is corrupt; names it, what was found and what was expected."""


class SpillFolder:
    """Files of one process. Thread-safe. Create with :meth:`claim`."""

    def __init__(self, path: Path, lock: int) -> None:
        self.path, self._lock = path, lock
        self._serial = itertools.count(1)

    @classmethod
    def claim(cls, directory: Path) -> Self:
        """Create a folder in ``directory``; delete those of dead processes. StoreError if unusable."""
        with storage_errors("cannot use the directory for values on disk", directory):
            directory.mkdir(parents=True, exist_ok=True)
            with _locked(directory / _LOCK):
                _remove_abandoned(directory)
                path = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=directory))
                return cls(path, _lock(path / _LOCK, wait=True))

    def write(self, data: bytes, label: str) -> Path:
        """Write a blob to a new file, renamed into place once complete.

        Raises OSError, leaving no file, if the disk is full or not writable.
        """
        name = f"{next(self._serial):06d}"
        path, temporary = self.path / name, self.path / (TEMPORARY_PREFIX + name)
        try:
            with temporary.open("wb") as file:
                file.write(_header(data, label))
                file.write(data)
            return temporary.rename(path)
        except OSError:
            discard(temporary)
            raise

    def read(self, path: Path, label: str) -> bytes:
        """Read what :meth:`write` wrote under that label. Raises Damaged."""
        try:
            with path.open("rb") as file:
                header, data = file.readline(_HEADER_BYTES_MAX), file.read()
        except OSError as error:
            raise Damaged(f"{path}: the {label} cannot be read ({error})") from error
        if header != _header(data, label):
            found = header[:200].decode(errors="replace").strip()
            expected = _header(data, label).decode().strip()
            raise Damaged(
                f"{path}: the file of the {label} is damaged or cut: it says {found}, "
                f"but by its {len(data)} bytes it should say {expected}"
            )
        return data

    def release(self) -> None:
        """Delete the folder and release its lock."""
        shutil.rmtree(self.path, ignore_errors=True)
        os.close(self._lock)


def _header(data: bytes, label: str) -> bytes:
    about = {"value": label, "bytes": len(data), "crc32": f"{zlib.crc32(data):08x}"}
    return json.dumps(about).encode() + b"\n"


def _remove_abandoned(directory: Path) -> None:
    for folder in directory.glob(_PREFIX + "*"):
        try:
            lock = _lock(folder / _LOCK, wait=False)
        except BlockingIOError:
            continue  # its process is alive
        except OSError as error:
            log.warning("%s: cannot tell whether its process lives, so it stays: %s", folder, error)
            continue
        size = sum(file.stat().st_size for file in folder.iterdir())
        shutil.rmtree(folder, ignore_errors=True)
        os.close(lock)
        log.info("%s: deleted %d bytes that a process left behind", folder, size)


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    lock = _lock(path, wait=True)
    try:
        yield
    finally:
        os.close(lock)


def _lock(path: Path, *, wait: bool) -> int:
    """Hold a lock file until the descriptor is closed. Without ``wait``: BlockingIOError if it is held."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
    except OSError:
        os.close(descriptor)
        raise
    return descriptor
