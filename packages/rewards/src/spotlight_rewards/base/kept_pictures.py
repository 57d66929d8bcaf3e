"""Pictures that prompts are about, as tables, data sets and programs hold them; kept as files by digest.

A prompt names a kept picture ``sha256:DIGEST``, so its id depends on the picture and not on where it lies. A
name that others chose is never part of a path that is written.
"""

from __future__ import annotations

import hashlib
import io
import re
import uuid
import zlib
from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any
from zipfile import ZIP_DEFLATED, ZIP_STORED, BadZipFile, ZipFile

from spotlight_rewards.base.files import TEMPORARY_PREFIX, discard, open_regular, read_regular

PICTURES_FOLDER = "pictures"
"""Of a run's ``cache_dir``."""
PICTURE_BYTES_MAX = 1 << 26
"""Of one picture's file."""
_NAME = re.compile(r"sha256:([0-9a-f]{64})")
_NOT_IN_PNG = ("CMYK", "YCbCr")
"""Modes of JPEGs."""
_CONDITION = ("image", "condition")
"""``modality`` and ``role`` of what a prompt is about, in UniRL's ``media``."""


def kept_path(name: str, folder: Path) -> Path | None:
    """Where the picture of a ``sha256:`` name lies; None: it is no such name."""
    found = _NAME.fullmatch(name)
    return folder / found[1] if found else None


def keep(content: bytes, folder: Path) -> str:
    """Keep a picture's file in ``folder``; returns its name.

    Raises:
        ValueError: no picture, too large, or one of too many pixels; nothing is decoded.
        OSError: it cannot be written.
    """
    from PIL import UnidentifiedImageError

    from spotlight_rewards.base.media_files import open_picture

    if len(content) > PICTURE_BYTES_MAX:
        raise ValueError(f"a picture of {len(content):,} bytes; expected at most {PICTURE_BYTES_MAX:,}")
    try:
        open_picture(io.BytesIO(content)).close()
    except UnidentifiedImageError as error:
        raise ValueError(f"{len(content):,} bytes of no known format; expected a picture's file") from error
    except OSError as error:
        raise ValueError(f"no picture that can be used: {error}") from error
    digest = hashlib.sha256(content).hexdigest()
    path = folder / digest
    if not path.is_file() or path.read_bytes() != content:
        folder.mkdir(parents=True, exist_ok=True)
        temporary = folder / f"{TEMPORARY_PREFIX}{uuid.uuid4().hex}"  # other processes may write the same
        try:
            temporary.write_bytes(content)
            temporary.replace(path)
        finally:
            discard(temporary)
    return f"sha256:{digest}"


def with_kept(value: Any, folder: Path, within: Sequence[Path] = ()) -> Any:
    """A cell, its pictures in place of which their names stand; other values stay.

    Args:
        value: a picture of Pillow, a file's bytes, an undecoded ``Image`` of a data set (``bytes``, else
            ``path``), or a list of them.
        within: folders that such a ``path`` may lie in; relative ones start from the first.

    Raises:
        ValueError: see :func:`keep`; or a path that leads elsewhere.
        OSError: a file cannot be read, or the picture cannot be written.
    """
    if isinstance(value, bytes):
        return keep(value, folder)
    if isinstance(value, list | tuple):
        return [with_kept(each, folder, within) for each in value]
    if isinstance(value, Mapping) and value.keys() == {"bytes", "path"}:
        content, path = value["bytes"], value["path"]
        if isinstance(content, bytes):
            return keep(content, folder)
        if content is not None or not isinstance(path, str):
            raise ValueError(
                f"bytes of {type(content).__name__} and a path of {type(path).__name__}; expected a "
                "picture's file as bytes, or its path as a text"
            )
        return keep(_file_at(path, within), folder)
    if hasattr(value, "save") and hasattr(value, "getbands"):
        return keep(_as_png(value), folder)
    return value


def _as_png(picture: Any) -> bytes:
    """Upright, as a file of it is read: PNGs are written without the EXIF data that turn it."""
    from PIL import ImageOps

    picture, buffer = ImageOps.exif_transpose(picture), io.BytesIO()
    (picture.convert("RGB") if picture.mode in _NOT_IN_PNG else picture).save(buffer, "PNG")
    return buffer.getvalue()


def _file_at(path: str, within: Sequence[Path]) -> bytes:
    """Of a file, or of one in an archive, whose path `datasets` writes ``zip://FILE::ARCHIVE``."""
    name, chained, archive = path.removeprefix("zip://").partition("::")
    if not (path.startswith("zip://") and chained):
        return read_regular(_inside(path, within), PICTURE_BYTES_MAX)
    there = _inside(archive, within)
    try:
        now = there.stat()
        opened = _opened(there, now.st_mtime_ns, now.st_ino)
        if (kind := opened.getinfo(name).compress_type) not in (ZIP_STORED, ZIP_DEFLATED):
            raise BadZipFile(f"compression {kind}, which Python does not bound; expected none or deflate")
        with opened.open(name) as found:
            return found.read(PICTURE_BYTES_MAX + 1)
    except (BadZipFile, KeyError, RuntimeError, EOFError, zlib.error) as error:
        raise ValueError(f"the file {path!r}, which cannot be read ({error}); expected a picture") from error


@lru_cache(maxsize=1)  # its pictures follow one another
def _opened(archive: Path, *version: int) -> ZipFile:
    open_regular(archive).close()
    return ZipFile(archive)


def _inside(path: str, within: Sequence[Path]) -> Path:
    roots = [root.resolve() for root in within]
    found = (roots[0] / path).resolve() if roots else Path(path)
    if not any(found.is_relative_to(root) for root in roots):
        raise ValueError(
            f"the file {path!r}, which is outside the data set; expected a file of its own, or the picture's "
            "bytes"
        )
    return found


def paths_of(value: object) -> list[str]:
    """The pictures' names in a cell: a path, paths, or UniRL's ``media``, whose conditions are taken.

    Raises:
        ValueError: anything else; says what it is.
    """
    entries = value if isinstance(value, list) else [value]
    found = [_path_of(each) for each in entries]
    if not found or not all(found):
        raise ValueError(f"is {str(value)[:60]!r}; expected a path of a picture, or a list of them")
    return found


def _path_of(entry: object) -> str:
    if isinstance(entry, str):
        path = entry
    elif isinstance(entry, Mapping) and isinstance(entry.get("uri"), str):
        kind = entry.get("modality"), entry.get("role")
        if kind != _CONDITION:
            raise ValueError(f"has an entry of modality and role {kind}; expected {_CONDITION}: leave it out")
        path = str(entry["uri"])
    else:
        raise ValueError(
            f"holds {type(entry).__name__}; expected a path, or an object with 'modality', 'role' and 'uri'"
        )
    if "://" in path:
        raise ValueError(f"has {path[:60]!r}; expected a file: download it")
    return path
