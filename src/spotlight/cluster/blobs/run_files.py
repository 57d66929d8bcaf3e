"""Files of the run directory to and from a learner rank whose node does not share it, in pieces.

The other end is the blob store's process, which is on the head's node.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path, PurePosixPath
from typing import Protocol

from spotlight_rewards.base.file_errors import StoreError, storage_errors

PIECE_BYTES = 16 << 20


class RunFiles:
    """Files below the run directory, by path in it. Methods raise StoreError: the disk, or no such path."""

    def __init__(self, root: Path) -> None:
        self._root = root

    def sizes(self, folder: str) -> dict[str, int]:
        """Bytes of all files below a folder, by path relative to it."""
        place = self._place(folder)
        with storage_errors("cannot read", place):
            return {
                path.relative_to(place).as_posix(): path.stat().st_size
                for path in place.rglob("*")
                if path.is_file()
            }

    def read(self, path: str, start: int, length: int) -> bytes:
        """So many bytes of a file, or those up to its end."""
        with storage_errors("cannot read", place := self._place(path)), place.open("rb") as file:
            file.seek(start)
            return file.read(length)

    def write(self, path: str, start: int, data: bytes | memoryview) -> None:
        """Write a piece of a file, which is cut off where it ends; folders are made."""
        with storage_errors("cannot write", place := self._place(path)):
            place.parent.mkdir(parents=True, exist_ok=True)
            descriptor = os.open(place, os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o644)
            with os.fdopen(descriptor, "wb") as file:
                file.seek(start)
                file.write(data)
                file.truncate()

    def _place(self, path: str) -> Path:
        parts = PurePosixPath(path).parts
        if not parts or path.startswith("/") or ".." in parts:
            raise StoreError(f"{path!r} is asked of the run directory; expected a path below it.")
        return self._root / path


class RemoteFiles(Protocol):
    """:class:`RunFiles` of the head's node."""

    def file_sizes(self, folder: str) -> Mapping[str, int]:
        """See :meth:`RunFiles.sizes`."""

    def read_file(self, path: str, start: int, length: int) -> bytes:
        """See :meth:`RunFiles.read`."""

    def write_file(self, path: str, start: int, data: bytes) -> None:
        """See :meth:`RunFiles.write`."""


def send_folder(local: Path, files: RemoteFiles, folder: str) -> None:
    """Write all files below ``local`` into a folder of the run directory. Raises as ``files``, OSError."""
    for path in sorted(each for each in local.rglob("*") if each.is_file()):
        target, start = f"{folder}/{path.relative_to(local).as_posix()}", 0
        with path.open("rb") as file:
            while (piece := file.read(PIECE_BYTES)) or not start:
                files.write_file(target, start, piece)
                start += len(piece)
                if not piece:
                    break


def bring_folder(files: RemoteFiles, folder: str, local: Path) -> None:
    """The other way. Raises as ``files``, OSError, StoreError: a file has become shorter."""
    for path, size_bytes in files.file_sizes(folder).items():
        target = local / path
        target.parent.mkdir(parents=True, exist_ok=True)
        with target.open("wb") as file:
            while (start := file.tell()) < size_bytes:
                piece = files.read_file(f"{folder}/{path}", start, min(PIECE_BYTES, size_bytes - start))
                if not piece:
                    raise StoreError(f"{folder}/{path}: {start} bytes; expected {size_bytes}.")
                file.write(piece)
