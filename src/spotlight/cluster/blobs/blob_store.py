"""Blobs that outlive their producer: bounded memory, the rest on disk.

A blob is bytes under (kind, name, digest of the weights that made it) with a step; a later step replaces an
older one. The least recently used move to disk, one file per blob, and are read from there on every access.

Invariants:
- Blobs in memory, those being written to disk included, never exceed ``memory_bytes``. (References held by
  callers do not count.)
- :meth:`BlobStore.put` returns once the blob is stored. If it raises, nothing has changed.
- Damaged bytes are never returned: each file carries a checksum.
- A file is indexed only once complete, and deleted when it leaves the index.

Files are not fsynced: they need not survive a power cut. Each process locks its own folder while it lives;
the next process to start deletes unlocked ones.

Locks: ``_index_lock`` guards the index and is never held during file I/O. ``_room_lock`` serialises eviction,
so that no blob is moved twice; blobs that fit do not take it.
"""

from __future__ import annotations

import logging
import threading
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field
from operator import index
from pathlib import Path
from pickle import PickleBuffer
from typing import NamedTuple, SupportsIndex, TypeAlias

from spotlight.cluster.blobs.spill import Damaged, SpillFolder
from spotlight_rewards.base.file_errors import StoreError, storage_error

log = logging.getLogger("spotlight.store")

_LARGE_SHARE = 8
"""A blob above 1/n of memory goes straight to disk, lest it evict many others."""

_Key: TypeAlias = tuple[str, str, str]


class BlobAddress(NamedTuple):
    """Where a blob is, among those of its kind."""

    name: str
    weights_digest: str


@dataclass(frozen=True, slots=True)
class StoredBlob:
    """A blob and its step."""

    step: int
    data: bytes

    def __reduce_ex__(self, protocol: SupportsIndex) -> tuple[Callable[..., StoredBlob], tuple[object, ...]]:
        # Out-of-band pickling: the transport moves the bytes without a copy, in half the time.
        data = PickleBuffer(self.data) if index(protocol) >= 5 else self.data
        return _stored_blob, (self.step, data)


def _stored_blob(step: int, data: bytes | memoryview) -> StoredBlob:
    return StoredBlob(step, bytes(data))  # copied: a view would pin the transport's memory


@dataclass(slots=True, eq=False)
class _Entry:
    """An indexed blob, in memory (``data``) or on disk (``path``), never both.

    Attributes:
        moving: a thread is writing it to disk and will free its memory.
        put: how many puts there had been when it was last put.
    """

    key: _Key
    step: int
    size: int
    data: bytes | None = None
    path: Path | None = None
    moving: bool = False
    put: int = 0


@dataclass(slots=True)
class _Index:
    """Blobs by kind, name and weights digest; those in memory also by recency. Pure bookkeeping."""

    kinds: dict[str, dict[str, dict[str, _Entry]]] = field(default_factory=dict)
    recent: OrderedDict[_Key, _Entry] = field(default_factory=OrderedDict)
    memory_bytes: int = 0
    puts: int = 0

    def count_put(self, entry: _Entry) -> None:
        self.puts += 1
        entry.put = self.puts

    def find(self, key: _Key) -> _Entry | None:
        kind, name, weights_digest = key
        return self.kinds.get(kind, {}).get(name, {}).get(weights_digest)

    def add(self, entry: _Entry) -> None:
        self.count_put(entry)
        kind, name, weights_digest = entry.key
        self.kinds.setdefault(kind, {}).setdefault(name, {})[weights_digest] = entry
        if entry.path is None:
            self.recent[entry.key] = entry
            self.memory_bytes += entry.size

    def remove(self, entry: _Entry) -> None:
        """Remove a blob. If it is moving, the mover frees its memory."""
        kind, name, weights_digest = entry.key
        versions = self.kinds[kind][name]
        del versions[weights_digest]
        if not versions:
            del self.kinds[kind][name]
        if entry.path is None:
            del self.recent[entry.key]
            self.memory_bytes -= 0 if entry.moving else entry.size

    def move_to(self, entry: _Entry, path: Path) -> None:
        del self.recent[entry.key]
        entry.data, entry.path = None, path

    def remove_under(self, kind: str, names: Iterable[str], last_put: int | None) -> list[_Entry]:
        entries = [each for name in names for each in self.kinds.get(kind, {}).get(name, {}).values()]
        gone = [each for each in entries if last_put is None or each.put <= last_put]
        for entry in gone:
            self.remove(entry)
        return gone


class BlobStore:
    """Thread-safe.

    Args:
        directory: created if missing. Processes may share it.
        memory_bytes: limit of blobs in memory.

    Raises:
        StoreError: the directory is unusable.
    """

    def __init__(self, directory: Path, memory_bytes: int) -> None:
        if memory_bytes < 0:
            raise ValueError(f"memory_bytes is {memory_bytes}; expected 0 (everything on disk) or more")
        self._memory_bytes = memory_bytes
        self._index = _Index()
        self._index_lock, self._room_lock = threading.Lock(), threading.Lock()
        self._closed = False
        self._folder = SpillFolder.claim(directory)

    @property
    def puts(self) -> int:
        """Puts so far, those of what was stored already included."""
        return self._index.puts

    def put(self, kind: str, name: str, data: bytes, *, weights_digest: str = "", step: int = 0) -> bool:
        """Store a blob; False if this or a later step is stored already.

        Raises StoreError, with the store unchanged, if the disk is full or not writable.
        """
        entry = _Entry((kind, name, weights_digest), step, len(data), data)
        if len(data) * _LARGE_SHARE > self._memory_bytes:
            return self._put_on_disk(entry)
        with self._index_lock:
            if not self._wanted(entry):
                return False
            replaced = self._place(entry) if self._fits(entry) else None
        if replaced is None:
            with self._room_lock:
                replaced = self._make_room(entry)
        if replaced is not None:
            _delete(replaced)
        return replaced is not None

    def get(self, kind: str, name: str, weights_digest: str = "") -> StoredBlob | None:
        """The latest step of a blob; None if missing, or (logged) if its file is damaged."""
        key = (kind, name, weights_digest)
        while True:
            with self._index_lock:
                entry = self._index.find(key)
                if entry is None:
                    return None
                if entry.data is not None:
                    self._index.recent.move_to_end(key)
                    return StoredBlob(entry.step, entry.data)
                path = entry.path
            assert path is not None
            try:
                return StoredBlob(entry.step, self._folder.read(path, _label(entry)))
            except Damaged as damage:
                if self._lose(entry):
                    log.error("%s. The value is lost.", damage)
                    return None
                # Otherwise it was replaced or dropped during the read: look again.

    def drop(self, kind: str, names: Iterable[str], last_put: int | None = None) -> None:
        """Delete blobs under any weights digest; unknown names are ignored.

        Args:
            last_put: spares what was put, or put again, after so many :attr:`puts`; default: nothing.
        """
        with self._index_lock:
            gone = self._index.remove_under(kind, names, last_put)
        _delete(gone)

    def keep_only(self, kind: str, names: Collection[str], last_put: int | None = None) -> int:
        """Delete all blobs of a kind except ``names``; returns how many. See :meth:`drop`."""
        stay = frozenset(names)
        with self._index_lock:
            others = [name for name in self._index.kinds.get(kind, {}) if name not in stay]
            gone = self._index.remove_under(kind, others, last_put)
        _delete(gone)
        return len(gone)

    def close(self) -> None:
        """Delete everything, files included. A later put is an error."""
        with self._room_lock, self._index_lock:
            if not self._closed:
                self._closed, self._index = True, _Index()
                self._folder.release()

    # -- putting ---------------------------------------------------------------------------------------

    def _wanted(self, entry: _Entry) -> bool:
        """Whether to store it. If not, what is stored already counts as put again."""
        if self._closed:
            raise StoreError(f"{self._folder.path}: cannot keep {_label(entry)}: the blob store is closed")
        there = self._index.find(entry.key)
        if there is None or there.step < entry.step:
            return True
        self._index.count_put(there)
        return False

    def _fits(self, entry: _Entry) -> bool:
        there = self._index.find(entry.key)
        freed = there.size if there is not None and there.path is None and not there.moving else 0
        return self._index.memory_bytes - freed + entry.size <= self._memory_bytes

    def _place(self, entry: _Entry) -> list[_Entry]:
        """Index a blob; returns those it replaces."""
        there = self._index.find(entry.key)
        if there is not None:
            self._index.remove(there)
        self._index.add(entry)
        return [] if there is None else [there]

    def _make_room(self, entry: _Entry) -> list[_Entry] | None:
        """Spill until ``entry`` fits and index it; None if it is no longer wanted."""
        while True:
            with self._index_lock:
                if not self._wanted(entry):
                    return None
                if self._fits(entry):
                    return self._place(entry)
                victim = next(iter(self._index.recent.values()))
                victim.moving = True
            self._move_to_disk(victim, f"cannot keep {_label(entry)}: no room in memory")

    def _move_to_disk(self, victim: _Entry, purpose: str) -> None:
        path, data = None, victim.data
        assert data is not None
        try:
            path = self._write(victim, data, purpose)
        finally:
            with self._index_lock:
                victim.moving = False
                current = self._index.find(victim.key) is victim
                if path is not None and current:
                    self._index.move_to(victim, path)
                if path is not None or not current:
                    self._index.memory_bytes -= victim.size
            if path is not None and not current:
                _unlink(path)

    def _put_on_disk(self, entry: _Entry) -> bool:
        with self._index_lock:
            if not self._wanted(entry):
                return False
        assert entry.data is not None
        entry.path = self._write(entry, entry.data, f"cannot keep {_label(entry)}")
        entry.data = None
        with self._index_lock:
            wanted = not self._closed and self._wanted(entry)  # a later step may have arrived meanwhile
            gone = self._place(entry) if wanted else [entry]
        _delete(gone)
        return wanted

    def _write(self, entry: _Entry, data: bytes, purpose: str) -> Path:
        try:
            return self._folder.write(data, _label(entry))
        except OSError as error:
            raise storage_error(purpose, self._folder.path, error) from error

    # -- losing ----------------------------------------------------------------------------------------

    def _lose(self, entry: _Entry) -> bool:
        with self._index_lock:
            if self._index.find(entry.key) is not entry:
                return False
            self._index.remove(entry)
        _delete([entry])
        return True


def _delete(gone: Iterable[_Entry]) -> None:
    for entry in gone:
        if entry.path is not None:
            _unlink(entry.path)


def _unlink(path: Path) -> None:
    try:
        path.unlink(missing_ok=True)
    except OSError as error:
        # Harmless: the index has let go of the file, and it is deleted with its folder.
        log.warning("%s: cannot delete the file of a value that is not needed any more: %s", path, error)


def _label(entry: _Entry) -> str:
    kind, name, weights_digest = entry.key
    return f"{kind} of {name} at step {entry.step}" + (
        f" (weights {weights_digest[:12]})" if weights_digest else ""
    )
