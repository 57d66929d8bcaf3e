"""Durable file operations: a file's content is on the disk before the file is renamed into place."""

from __future__ import annotations

import os
import uuid
from pathlib import Path

TEMPORARY_PREFIX = ".writing-"


def fsync_path(path: Path) -> None:
    """Force a file's contents, or a directory's entries, to disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_atomically(path: Path, content: bytes, mode: int = 0o666) -> None:
    """Replace ``path`` atomically, also across a power loss. On OSError it is unchanged.

    Args:
        mode: of the new file, less what the process's umask takes.
    """
    temporary = path.with_name(TEMPORARY_PREFIX + path.name)
    try:
        temporary.unlink(missing_ok=True)  # of a killed process, with a mode of its own
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT, mode)
        with os.fdopen(descriptor, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise
    fsync_path(path.parent)


def lasting_id(path: Path) -> str:
    """A random id, made once and kept in the file: one that is made again gets another."""
    if not path.exists():
        write_atomically(path, uuid.uuid4().hex.encode())
    return path.read_text(encoding="utf-8")
