"""Files that commands write: a missing place is found before the work, and no half of a file is left. I/O."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from spotlight_rewards.base.errors import ConfigError, Problem
from spotlight_rewards.base.files import write_atomically


def require_place(path: Path) -> None:
    """Create the folder of an output file, and see that a file can be made there.

    Raises:
        ConfigError: it cannot, or ``path`` is a folder itself.
    """
    try:
        if path.is_dir():
            raise _no_place(path, "It is a folder: name a file in it.")
        if not _is_stream(path):
            require_folder(path.parent)
    except OSError as error:
        raise _no_place(path, f"{error.strerror}.") from None


def require_folder(folder: Path) -> None:
    """Create a folder, and make a file in it for a moment. Raises OSError."""
    folder.mkdir(parents=True, exist_ok=True)
    if not os.access(folder, os.W_OK):  # a temporary file would be tried under a hundred names
        raise PermissionError(13, "Permission denied")
    with tempfile.NamedTemporaryFile(dir=folder):
        pass


def write_file(path: Path, content: str | bytes) -> None:
    """Replace an output file, whole or not at all. Raises :class:`ConfigError` if that fails."""
    require_place(path)
    data = content if isinstance(content, bytes) else content.encode()
    try:
        if _is_stream(path):
            path.write_bytes(data)
        else:
            write_atomically(path.resolve(), data)  # of a link, what it leads to
    except OSError as error:
        raise _no_place(path, f"{error.strerror}.") from None


def _is_stream(path: Path) -> bool:
    """Whether it is a pipe or a device, such as /dev/stdout, which nothing replaces."""
    return path.exists() and not path.is_file() and not path.is_dir()


def _no_place(path: Path, remedy: str) -> ConfigError:
    return ConfigError(str(path), [Problem("FILE", str(path), "a place for it", remedy)])
