"""The files of a run directory that go to a bucket, as one consistent state beside a running head.

What is consistent with what: the newest checkpoint is chosen first, and its files are opened before others
are looked at; the ledger is copied after that, so that it holds all that the checkpoint counts. Curves,
pictures and votes may be newer than the ledger, as after a kill.
"""

from __future__ import annotations

import os
import re
import sqlite3
import stat
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from spotlight.store.checkpoints import LATEST
from spotlight.store.run_directory import RunPaths
from spotlight_bucket.snapshots import is_plain
from spotlight_rewards.ballots import OPEN_FOLDER, VOTES_FOLDER
from spotlight_rewards.base.file_errors import StoreError
from spotlight_rewards.base.files import TEMPORARY_PREFIX, open_regular

_LOOKS_MAX = 20
_CHECKPOINT = re.compile(r"(\d{6,})-iteration-\d+")
_LEFT_OUT = {"lock", "in-flight", "storage-token", "wandb"}
"""At the top: of this machine and process, or a tracker's own copy of what it has sent."""
_OPEN_BALLOTS = (VOTES_FOLDER, OPEN_FOLDER)


@dataclass(frozen=True, slots=True)
class OpenFile:
    """A file to be read up to ``size_bytes``; ``stamp`` changes when its content does."""

    path: str
    file: BinaryIO
    size_bytes: int
    stamp: tuple[int, int, int]


def pointer_of(run: Path) -> bytes:
    """What names the newest checkpoint; empty: there is none."""
    try:
        with open_regular(RunPaths(run).checkpoints / LATEST) as file:
            return file.read()
    except FileNotFoundError:
        return b""


@contextmanager
def consistent_files(run: Path, backup: Path) -> Iterator[Iterator[OpenFile]]:
    """The files of a run; those that vanish meanwhile and are of no checkpoint are left out.

    Args:
        backup: where a copy of the ledger is written.

    Raises:
        StoreError: the disk, or checkpoints that are replaced faster than they can be opened.
    """
    ledger = RunPaths(run).ledger

    def every() -> Iterator[OpenFile]:
        yield from checkpoints
        if has_ledger:
            with open_regular(backup) as file:
                yield _described(ledger.name, file)
        for path in _others(run):
            with suppress(FileNotFoundError, NotADirectoryError), open_regular(path) as file:
                yield _described(path.relative_to(run).as_posix(), file)

    try:
        with ExitStack() as stack:
            checkpoints = _opened_checkpoints(run, stack)
            if has_ledger := ledger.is_file():  # or else a copy may be of another run of this name
                copy_ledger(ledger, backup)
            yield every()
    except OSError as error:
        raise StoreError(
            f"{run}: cannot be read for the bucket: {error}. Check the disk, then run the same command again."
        ) from error


def run_bytes(run: Path) -> int:
    """About how much a bucket holds of a run."""
    ledger, total = RunPaths(run).ledger.name, 0
    for top in run.iterdir():
        if top.name not in _LEFT_OUT and not top.name.startswith(f"{ledger}-"):
            for path in _regular(top):
                with suppress(FileNotFoundError):
                    total += path.lstat().st_size
    return total


def copy_ledger(ledger: Path, backup: Path) -> None:
    """A consistent copy beside a writer, page by page, so that pages that are equal stay in their places."""
    backup.unlink(missing_ok=True)
    try:
        with (
            closing(sqlite3.connect(f"{ledger.absolute().as_uri()}?mode=ro", uri=True)) as source,
            closing(sqlite3.connect(backup)) as target,
        ):
            source.backup(target)
            target.execute("PRAGMA journal_mode = DELETE")  # else a reader would make files beside it
    except sqlite3.Error as error:
        raise StoreError(f"{ledger}: cannot be copied for the bucket: {error}.") from error


def _opened_checkpoints(run: Path, stack: ExitStack) -> list[OpenFile]:
    """All files of the committed checkpoints, and the pointer, as they were at one moment."""
    folder = RunPaths(run).checkpoints
    for _ in range(_LOOKS_MAX):
        pointer = pointer_of(run)
        newest = serial_of(pointer.decode("utf-8", "replace").partition(" ")[0])
        with ExitStack() as opened:
            try:
                found = [_opened(path, run, opened) for path in _committed(folder, newest)]
                if newest:
                    found.append(_opened(folder / LATEST, run, opened))
            except FileNotFoundError:
                continue
            if pointer_of(run) == pointer:
                stack.push(opened.pop_all())
                return found
    raise StoreError(f"{folder}: checkpoints were replaced {_LOOKS_MAX} times while they were opened.")


def _committed(folder: Path, newest: int) -> Iterator[Path]:
    for each in sorted(folder.iterdir()) if newest and folder.is_dir() else ():
        if 0 < serial_of(each.name) <= newest:
            yield from (path for path in sorted(each.rglob("*")) if path.is_file())


def serial_of(name: str) -> int:
    """Of a checkpoint; 0: it is none."""
    match = _CHECKPOINT.fullmatch(name)
    return int(match[1]) if match else 0


def _opened(path: Path, run: Path, stack: ExitStack) -> OpenFile:
    return _described(path.relative_to(run).as_posix(), stack.enter_context(open_regular(path)))


def _described(path: str, file: BinaryIO) -> OpenFile:
    found = os.fstat(file.fileno())
    return OpenFile(path, file, found.st_size, (found.st_ino, found.st_size, found.st_mtime_ns))


def _others(run: Path) -> Iterator[Path]:
    ledger = RunPaths(run).ledger.name
    for top in sorted(run.iterdir()):
        if top.name in _LEFT_OUT or top.name == "checkpoints" or top.name.startswith(ledger):
            continue
        # A vote is awaited where the run works: on a copy of the question it would be lost.
        yield from sorted(path for path in _regular(top) if path.parts[len(run.parts) :][:2] != _OPEN_BALLOTS)


def _regular(path: Path) -> Iterator[Path]:
    if path.name.startswith(TEMPORARY_PREFIX) or not is_plain(path.name):
        return
    try:
        kind = path.lstat().st_mode
        if stat.S_ISDIR(kind):
            for each in path.iterdir():
                yield from _regular(each)
        elif stat.S_ISREG(kind):
            yield path
    except FileNotFoundError:
        return
