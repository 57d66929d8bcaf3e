"""Errors of files and disks; messages name file, finding and remedy."""

from __future__ import annotations

import errno
import re
import shutil
import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryFile

from spotlight_rewards.base.errors import UserError

_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
_REFUSED = {errno.EACCES, errno.EPERM, errno.EROFS}
_SQLITE_REFUSED = {sqlite3.SQLITE_READONLY, sqlite3.SQLITE_CANTOPEN, sqlite3.SQLITE_PERM}
_NEARLY_NOTHING_BYTES = 1 << 20
_RUST_ERRNO = re.compile(r"\(os error (\d+)\)")
_TORCH_SHORT_WRITE = "unexpected pos "


class StoreError(UserError):
    """A file or directory cannot be read or written; committed data is intact."""


def storage_error(what: str, path: Path, error: BaseException) -> StoreError:
    """Convert a failed write into an error with a remedy; ``path`` is on the affected file system."""
    if _sqlite_code(error) == sqlite3.SQLITE_IOERR:
        error = _met_by_a_write(path) or error  # SQLite does not say why
    if is_out_of_space(error, path):
        free = size(free_bytes(path))
        cause = f"no space left ({free} free), or a quota or file-size limit was reached ({error})"
        remedy = "free some space, then run the same command again: it resumes from the last checkpoint"
    elif _errno(error) == errno.EROFS:
        cause = f"the disk is read-only ({error})"
        remedy = (
            "a disk turns read-only when it meets an error: repair it and mount it writable, then run the "
            "same command again"
        )
    elif _is_refused(error):
        cause = f"writing is not permitted ({error})"
        remedy = "make the directory writable for this user, or choose another one"
    else:
        cause = f"{type(error).__name__}: {error}"
        remedy = "check the disk, then run the same command again"
    return StoreError(f"{what}: {path}: {cause}. Nothing committed before was lost; {remedy}.")


@contextmanager
def storage_errors(what: str, path: Path) -> Iterator[None]:
    """Turn a failed write in the block, also of safetensors, into :func:`storage_error`'s."""
    try:
        yield
    except UserError:  # may quote one
        raise
    except Exception as error:
        if isinstance(error, OSError | sqlite3.Error) or _errno(error) is not None:
            raise storage_error(what, path, error) from error
        raise


def needs_user(error: BaseException, path: Path) -> bool:
    """Whether a failed write to ``path`` would fail again elsewhere: no space, or no permission."""
    return is_out_of_space(error, path) or _is_refused(error)


def is_out_of_space(error: BaseException, path: Path) -> bool:
    """Whether ``error`` is due to a full disk, quota or file-size limit on ``path``'s file system.

    Call before cleaning up: where the error does not tell, a full file system decides.
    """
    if (number := _errno(error)) is not None:
        return number in _FULL
    says_full = _sqlite_code(error) == sqlite3.SQLITE_FULL or _TORCH_SHORT_WRITE in str(error)
    return says_full or free_bytes(path) < _NEARLY_NOTHING_BYTES


def _is_refused(error: BaseException) -> bool:
    return _errno(error) in _REFUSED or _sqlite_code(error) in _SQLITE_REFUSED


def _met_by_a_write(path: Path) -> OSError | None:
    """The error that a file beside ``path`` meets now."""
    try:
        with TemporaryFile(dir=existing_parent(path if path.is_dir() else path.parent)):
            return None
    except OSError as error:
        return error


def _errno(error: BaseException) -> int | None:
    if isinstance(error, OSError):
        return error.errno
    match = _RUST_ERRNO.search(str(error))  # safetensors
    return int(match[1]) if match else None


def _sqlite_code(error: BaseException) -> int:
    return error.sqlite_errorcode & 0xFF if isinstance(error, sqlite3.Error) else sqlite3.SQLITE_OK


def free_bytes(path: Path) -> int:
    """Bytes available on the file system of ``path`` or its first existing parent."""
    return shutil.disk_usage(existing_parent(path)).free


def existing_parent(path: Path) -> Path:
    """``path``, or its first parent that exists."""
    while not is_there(path) and path != path.parent:
        path = path.parent
    return path


def is_there(path: Path) -> bool:
    """Whether a path exists, as far as this user can tell: of a hidden one ``Path.exists`` raises."""
    try:
        return path.exists()
    except OSError:
        return False


def hidden(path: Path) -> str:
    """Why it cannot be told whether a path exists (no permission, a mount that fails); empty: it can be."""
    try:
        path.stat()
    except (FileNotFoundError, NotADirectoryError):
        return ""
    except OSError as error:
        return f" It cannot be looked at: {error.strerror or error}."
    return ""


def size(number_of_bytes: float) -> str:
    """Bytes in binary units: ``812 B``, ``9.9 MiB``, ``38.1 GiB``."""
    value = float(number_of_bytes)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(value) < 1024:
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1024
    return f"{value:.2f} TiB"
