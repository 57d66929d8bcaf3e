"""Durable file operations: a file's content is on the disk before the file is renamed into place."""

from __future__ import annotations

import errno
import os
import shutil
import stat
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from io import BufferedReader, BufferedWriter
from pathlib import Path

TEMPORARY_PREFIX = ".writing-"


def at_home(path: str | Path) -> Path:
    """A path with its ``~`` replaced; of a user that is not here as it is, which is no file then."""
    try:
        return Path(path).expanduser()
    except RuntimeError:
        return Path(path)


def open_regular(path: Path) -> BufferedReader:
    """Open a file that another may have put there, for reading.

    Raises OSError, also for anything but a file: a FIFO or a device would be waited for, perhaps forever.
    """
    return os.fdopen(_opened_regular(path, os.O_RDONLY), "rb")


def read_regular(path: Path, bytes_max: int) -> bytes:
    """What the file holds, as :func:`open_regular` reads it. Raises OSError, also if it is larger."""
    with open_regular(path) as file:
        content = file.read(bytes_max + 1)
    if len(content) > bytes_max:
        raise OSError(errno.EFBIG, f"larger than {bytes_max} bytes", str(path))
    return content


def open_to_append(path: Path) -> BufferedWriter:
    """Open a file, made if it is missing, for writing at its end. Raises as :func:`open_regular`."""
    # Reading, too: a FIFO that nobody reads cannot be opened for writing alone, and would not be called one.
    return os.fdopen(_opened_regular(path, os.O_RDWR | os.O_CREAT | os.O_APPEND), "ab")


def _opened_regular(path: Path, flags: int) -> int:
    descriptor = os.open(path, flags | os.O_NONBLOCK | os.O_NOCTTY, 0o644)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "not a regular file", str(path))
    return descriptor


def default_cache() -> Path:
    """Where data is kept that may be made again; a run's ``cache_dir`` is another place of its own."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "spotlight"


def fsync_path(path: Path) -> None:
    """Force a file's contents, or a directory's entries, to disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def discard(path: Path) -> None:
    """Remove a file in cleaning up, if that is possible: on a disk that takes no writes any more, what failed
    before is the error to report.
    """
    with suppress(OSError):
        path.unlink(missing_ok=True)


@contextmanager
def removed_if_failed(folder: Path) -> Iterator[None]:
    """Leave no half of a folder that is made in the block, or the same command would be refused for it."""
    try:
        yield
    except BaseException:
        shutil.rmtree(folder.resolve(), ignore_errors=True)  # of a link, what it leads to
        raise


def fsync_tree(folder: Path) -> None:
    """Force a folder, and all that is in it, to disk."""
    for path in folder.rglob("*"):
        fsync_path(path)
    fsync_path(folder)


def write_atomically(path: Path, content: bytes, mode: int = 0o666) -> None:
    """Replace ``path`` atomically, also across a power loss. On OSError it is unchanged.

    Args:
        mode: of the new file, less what the process's umask takes.
    """
    temporary = path.parent / f"{TEMPORARY_PREFIX}{path.name}"  # with_name refuses "." in its own words
    try:
        temporary.unlink(missing_ok=True)  # of a killed process, with a mode of its own
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT, mode)
        with os.fdopen(descriptor, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except OSError:
        discard(temporary)
        raise
    fsync_path(path.parent)


def lasting_id(path: Path) -> str:
    """A random id, made once and kept in the file: one that is made again gets another."""
    if not path.exists():
        write_atomically(path, uuid.uuid4().hex.encode())
    return read_regular(path, 1 << 10).decode()
