"""Files of the run directory to and from a learner rank whose node does not share it, in pieces.

This end is in the blob store's process, which is on the head's node; the other is ``rank_folder.py``.
"""

from __future__ import annotations

import os
from pathlib import Path, PurePosixPath

from spotlight_rewards.base.file_errors import StoreError, storage_errors


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
