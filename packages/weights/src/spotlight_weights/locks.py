"""File locks between the processes of a node: released by the kernel when their holder dies."""

from __future__ import annotations

import errno
import fcntl
import os
import stat
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from spotlight_weights.weight_errors import WeightsError

_POLL_FIRST_S, _POLL_LAST_S = 0.002, 0.05


def private_directory(path: Path) -> Path:
    """Create a directory private to this user, or check that an existing one is.

    Raises:
        WeightsError: it cannot be created, or another user owns or can enter it.
    """
    try:
        found = None
        while found is None:  # others may remove it in between
            with suppress(FileExistsError):
                path.mkdir(mode=0o700)
            with suppress(FileNotFoundError):
                found = path.lstat()
    except OSError as error:
        raise WeightsError(
            f"cannot make the directory {path}: {error.strerror}; name one below a directory that is there "
            "and that this user can write"
        ) from error
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o077:
        raise WeightsError(
            f"{path}: found {stat.filemode(found.st_mode)} of user {found.st_uid}, expected a directory "
            f"drwx------ of user {os.getuid()}: others who write there could change weights; remove it or "
            "name another"
        )
    return path


def try_lock(descriptor: int, *, shared: bool = False) -> bool:
    """Lock an open file without waiting. Returns whether that succeeded."""
    try:
        fcntl.flock(descriptor, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in (errno.EWOULDBLOCK, errno.EACCES):
            return False
        raise
    return True


def lock_until(descriptor: int, end_s: float, *, shared: bool = False) -> bool:
    """Wait for the lock of an open file. Returns False at ``end_s`` (``time.monotonic()``)."""
    pause_s = _POLL_FIRST_S  # poll: flock has no timeout, and SIGALRM needs the main thread
    while not try_lock(descriptor, shared=shared):
        left_s = end_s - time.monotonic()
        if left_s <= 0:
            return False
        time.sleep(min(pause_s, left_s))
        pause_s = min(2 * pause_s, _POLL_LAST_S)
    return True


@contextmanager
def held(path: Path, deadline_s: float) -> Iterator[None]:
    """Hold the exclusive lock of the file at ``path``, which is created if missing and never removed.

    Raises:
        WeightsError: not free before the deadline; names the holder's process.
    """
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        if not lock_until(descriptor, time.monotonic() + deadline_s):
            holder = os.pread(descriptor, 32, 0).decode(errors="replace").strip() or "unknown"
            raise WeightsError(
                f"{path} has been locked by process {holder} for {deadline_s:g} s, longer than a fetch may "
                "take: look at that process, or end it; its lock goes with it"
            )
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, str(os.getpid()).encode(), 0)
        yield
    finally:
        os.close(descriptor)
