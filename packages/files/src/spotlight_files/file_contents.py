"""Hashes by which a changed file is known. Large ones are sampled: reading 15 GB would cost more than it
saves."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable, Mapping
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from hashlib import _Hash

_WHOLE_FILE_BYTES = 64 * 2**20
_SAMPLES, _SAMPLE_BYTES = 64, 64 * 2**10


def contents_of(files: Mapping[str, Path]) -> str:
    """A hash of files, by the names that they are to have in it."""
    digest = hashlib.sha256()
    for name, path in sorted(files.items()):
        stat = path.stat()
        content = _content_of(path, stat.st_ino, stat.st_size, stat.st_mtime_ns)
        digest.update(os.fsencode(f"{name}\0{content}\0"))
    return digest.hexdigest()


@lru_cache(maxsize=1 << 16)  # a command that checks a run and then begins it asks twice
def _content_of(path: Path, *known_by: int) -> str:
    digest = hashlib.sha256()
    add_file(path, digest)
    return digest.hexdigest()


def below(root: Path, files: Iterable[Path]) -> dict[str, Path]:
    """Files by their names in a folder."""
    return {path.relative_to(root).as_posix(): path for path in files if path.is_file()}


def add_file(path: Path, digest: _Hash, *, times: bool = False) -> None:
    """Files up to 64 MiB whole; of larger ones the size and 64 samples, the header among them.

    Args:
        times: and when it was changed, which covers what samples miss, and differs between copies.
    """
    stat = path.stat()
    digest.update(f"{stat.st_size}\0".encode())
    with path.open("rb") as file:
        if stat.st_size <= _WHOLE_FILE_BYTES:
            digest.update(file.read())
            return
        if times:
            digest.update(f"{stat.st_mtime_ns}\0".encode())
        for i in range(_SAMPLES):
            file.seek(i * (stat.st_size - _SAMPLE_BYTES) // (_SAMPLES - 1))
            digest.update(file.read(_SAMPLE_BYTES))
