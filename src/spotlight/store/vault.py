"""Values that outlive whoever made them: bounded memory, the rest on disk.

A value has a kind, a name, a mark and a step. Of one (kind, name, mark) the latest step counts: an earlier or
equal one is refused, whoever brings it. Different marks do not touch each other.

Invariants
    1. The bytes in memory never exceed the bound; the values used longest ago are on disk instead.
    2. What was put and not replaced or dropped can be read again, unless its file was damaged: that is found
       by its checksum, logged, and the value counts as absent.
    3. A put that fails (a full disk) changes nothing.

A vault's directory lives as long as the vault: what a dead process left in it is removed.
"""

from __future__ import annotations

import fcntl
import hashlib
import logging
import os
import shutil
import threading
from collections import OrderedDict
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Self, TypeAlias

from spotlight.store.errors import StoreError, storage_error
from spotlight.store.files import write_atomically

_CHECKSUM_BYTES = 32
_LOCK = "lock"
_log = logging.getLogger(__name__)

Key: TypeAlias = tuple[str, str, str]
"""Kind, name, mark."""


@dataclass(frozen=True, slots=True)
class Kept:
    """A value, and its step."""

    step: int
    data: bytes


@dataclass(frozen=True, slots=True)
class Usage:
    """What a vault holds.

    Attributes:
        spills: values written to disk since it was opened.
    """

    values: int
    memory_bytes: int
    disk_bytes: int
    spills: int


@dataclass(slots=True)
class _Entry:
    """A value in memory (``data``) or on disk (``path``)."""

    step: int
    size: int
    data: bytes | None
    path: Path | None = None


class Vault:
    """See the module's docstring. May be used from several threads.

    Args:
        directory: for what does not fit into memory; made if it is missing, of this vault alone.
        memory_bytes: bound of the values' bytes in memory.

    Raises:
        StoreError: the directory cannot be used, or another vault uses it.
    """

    def __init__(self, directory: Path, memory_bytes: int) -> None:
        if memory_bytes < 0:
            raise ValueError(f"memory_bytes is {memory_bytes}; expected at least 0")
        self._directory, self._bound = directory, memory_bytes
        self._lock_file = _claimed(directory)
        self._entries: OrderedDict[Key, _Entry] = OrderedDict()
        self._names: dict[str, dict[str, set[str]]] = {}
        self._lock = threading.RLock()
        self._numbers = count()
        self._memory = self._disk = self._spills = 0

    def put(self, kind: str, name: str, data: bytes, *, mark: str = "", step: int = 0) -> bool:
        """Keep a value. Returns False when an equal or later step is there already.

        Raises:
            StoreError: it fits neither into memory nor on the disk; everything is as before.
        """
        key = (kind, name, mark)
        with self._lock:
            there = self._entries.get(key)
            if there is not None and there.step >= step:
                return False
            entry = _Entry(step, len(data), data)
            if len(data) > self._bound:
                self._write(key, entry)
            else:
                self._make_room(len(data) - (there.size if there and there.data is not None else 0), but=key)
            if there is not None:
                self._remove(key)
            self._entries[key] = entry
            self._names.setdefault(kind, {}).setdefault(name, set()).add(mark)
            if entry.path is None:
                self._memory += entry.size
            else:
                self._disk += entry.size
            return True

    def get(self, kind: str, name: str, mark: str = "") -> Kept | None:
        """A value; None when it is not there."""
        key = (kind, name, mark)
        with self._lock:
            entry = self._entries.get(key)
            if entry is None:
                return None
            if entry.data is not None:
                self._entries.move_to_end(key)
                return Kept(entry.step, entry.data)
            assert entry.path is not None
            data = _read(entry.path)
            if data is None:
                self._remove(key)
                return None
            return Kept(entry.step, data)

    def step_of(self, kind: str, name: str, mark: str = "") -> int | None:
        """The step of a value; None when it is not there."""
        with self._lock:
            entry = self._entries.get((kind, name, mark))
            return None if entry is None else entry.step

    def drop(self, kind: str, names: Iterable[str]) -> None:
        """Forget values, whatever their marks."""
        with self._lock:
            for name in names:
                for mark in list(self._names.get(kind, {}).get(name, ())):
                    self._remove((kind, name, mark))

    def keep_only(self, kind: str, names: Collection[str]) -> int:
        """Forget all other values of a kind; returns how many."""
        wanted = set(names)
        with self._lock:
            others = [
                (kind, name, mark)
                for name, marks in self._names.get(kind, {}).items()
                if name not in wanted
                for mark in marks
            ]
            for key in others:
                self._remove(key)
            return len(others)

    def names(self, kind: str) -> set[str]:
        """Of the values of a kind."""
        with self._lock:
            return set(self._names.get(kind, {}))

    def usage(self) -> Usage:
        """What is held now."""
        with self._lock:
            return Usage(len(self._entries), self._memory, self._disk, self._spills)

    def close(self) -> None:
        """Forget everything and remove the directory."""
        with self._lock:
            self._entries.clear()
            self._names.clear()
            self._memory = self._disk = 0
            if self._lock_file >= 0:
                shutil.rmtree(self._directory, ignore_errors=True)
                os.close(self._lock_file)
                self._lock_file = -1

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # -- inside ----------------------------------------------------------------------------------------

    def _make_room(self, size: int, *, but: Key) -> None:
        """Until ``size`` more bytes fit into memory, write what was used longest ago to disk."""
        for key in self._oldest_in_memory(but):
            if self._memory + size <= self._bound:
                return
            entry = self._entries[key]
            self._write(key, entry)
            self._memory -= entry.size
            self._disk += entry.size

    def _oldest_in_memory(self, but: Key) -> Iterator[Key]:
        yield from [key for key, entry in self._entries.items() if entry.data is not None and key != but]

    def _write(self, key: Key, entry: _Entry) -> None:
        assert entry.data is not None
        path = self._directory / f"{next(self._numbers)}.value"
        try:
            write_atomically(path, hashlib.sha256(entry.data).digest() + entry.data)
        except OSError as error:
            what = f"a {key[0]} of {entry.size} bytes does not fit into memory, and cannot be written"
            raise storage_error(what, path, error) from error
        entry.data, entry.path = None, path
        self._spills += 1

    def _remove(self, key: Key) -> None:
        entry = self._entries.pop(key)
        kind, name, mark = key
        marks = self._names[kind][name]
        marks.discard(mark)
        if not marks:
            del self._names[kind][name]
        if entry.path is None:
            self._memory -= entry.size
        else:
            self._disk -= entry.size
            entry.path.unlink(missing_ok=True)


def _read(path: Path) -> bytes | None:
    try:
        content = path.read_bytes()
    except OSError as error:
        _log.warning("%s: a value cannot be read back and is given up: %s", path, error)
        return None
    checksum, data = content[:_CHECKSUM_BYTES], content[_CHECKSUM_BYTES:]
    if hashlib.sha256(data).digest() != checksum:
        _log.warning("%s: a value is damaged and is given up", path)
        return None
    return data


def _claimed(directory: Path) -> int:
    """Take a directory for this vault alone, and empty it; returns the descriptor of its lock."""
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        lock = os.open(directory / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(lock)
            raise StoreError(
                f"{directory}: another process keeps its values here; give every run a directory of its own"
            ) from None
        for left in directory.iterdir():
            if left.name != _LOCK:
                left.unlink()
    except OSError as error:
        raise storage_error("cannot use the directory for values", directory, error) from error
    return lock
