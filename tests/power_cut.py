"""What a power cut leaves of a folder, at every moment, without cutting the power.

:class:`Disk` watches this process's writes to a folder, and knows what was forced to the disk. Before every
operation it keeps what a cut would leave now, in the two worst ways:

- entries are lost: a folder holds what it held when it was synced last
- contents are lost: entries are as they are, but files hold only what was synced: those that never were are
  empty, and of what was appended since the first half is zeros, as a page that did not get there

SQLite syncs its files out of sight: they are kept as they are.
"""

from __future__ import annotations

import itertools
import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

_REMOVES = {"os.rename": 1, "os.remove": 0, "os.rmdir": 0}
"""Which argument names what is no more after the event."""
_CHANGES = {*_REMOVES, "os.mkdir", "os.link", "open"}
_SQLITE = "ledger.sqlite"

Tree = Mapping[str, bytes | None]
"""Contents by path; None: a folder."""


class Disk:
    """Watches ``root``; ``left``: what cuts would leave, each tree once, with its last moment's number."""

    def __init__(self, root: Path) -> None:
        self.root, self.left, self.moments = root, dict[frozenset[tuple[str, bytes | None]], int](), 0
        self._numbers, self._of = itertools.count(), dict[int, int]()
        self._contents: dict[int, bytes] = {}
        self._entries: dict[int, dict[str, int]] = {}
        self._folders = set[int]()
        self._id(root)
        self._busy = False

    def hear(self, event: str, arguments: tuple[object, ...]) -> None:
        """Before an operation of this process."""
        if self._busy or event not in _CHANGES:
            return
        if event == "open" and not (isinstance(arguments[2], int) and arguments[2] & os.O_CREAT):
            return
        self.moment()
        if event in _REMOVES:
            folder, path = arguments[-1], Path(os.fsdecode(arguments[_REMOVES[event]]))  # type: ignore[arg-type]
            if isinstance(folder, int) and folder >= 0:
                path = Path(f"/proc/self/fd/{folder}").readlink() / path
            if path.exists() and path.is_relative_to(self.root):
                self._of.pop(path.stat().st_ino, None)  # another file may get it

    def synced(self, descriptor: int) -> None:
        """After a file, or a folder, was synced."""
        path = Path(f"/proc/self/fd/{descriptor}").readlink()
        if not path.is_relative_to(self.root):
            return
        if path.is_dir():
            self._entries[self._id(path)] = {each.name: self._id(each) for each in path.iterdir()}
        else:
            self._contents[self._id(path)] = path.read_bytes()

    def moment(self) -> None:
        """Keep what a cut now would leave."""
        self._busy = True
        self.moments += 1
        for tree in (self._without_entries(self.root, self._id(self.root)), self._without_contents()):
            self.left[frozenset(tree)] = self.moments
        self._busy = False

    def _id(self, path: Path) -> int:
        number = path.stat().st_ino
        if number not in self._of:
            self._of[number] = next(self._numbers)
        if path.is_dir():
            self._folders.add(self._of[number])
        return self._of[number]

    def _without_contents(self) -> Iterator[tuple[str, bytes | None]]:
        for path in self.root.rglob("*"):
            name, held = str(path.relative_to(self.root)), self._contents.get(self._id(path))
            if path.is_dir():
                yield name, None
            elif path.name.startswith(_SQLITE):
                yield name, path.read_bytes()
            else:
                yield name, b"" if held is None else _without_a_page(held, path.read_bytes())

    def _without_entries(self, folder: Path, number: int) -> Iterator[tuple[str, bytes | None]]:
        for name, child in self._entries.get(number, {}).items():
            path = folder / name
            if child in self._folders:
                yield str(path.relative_to(self.root)), None
                yield from self._without_entries(path, child)
            elif not name.startswith(_SQLITE):
                yield str(path.relative_to(self.root)), self._contents.get(child, b"")
        if folder.is_dir():
            for path in folder.glob(f"{_SQLITE}*"):
                yield str(path.relative_to(self.root)), path.read_bytes()


def _without_a_page(held: bytes, now: bytes) -> bytes:
    lost = (len(now) - len(held) + 1) // 2
    return now if lost <= 0 else held + bytes(lost) + now[len(held) + lost :]


_watching: list[Disk] = []
_hooked: list[bool] = []


def _hear(event: str, arguments: tuple[object, ...]) -> None:
    for disk in _watching:
        disk.hear(event, arguments)


@contextmanager
def watched(root: Path) -> Iterator[Disk]:
    """Watch a folder that exists."""
    if not _hooked:  # a hook stays
        sys.addaudithook(_hear)
        _hooked.append(True)
    disk, sync = Disk(root.resolve()), os.fsync

    def synced(descriptor: int) -> None:
        disk.moment()
        sync(descriptor)
        disk.synced(descriptor)

    _watching.append(disk)
    os.fsync = synced  # type: ignore[assignment]
    try:
        yield disk
        disk.moment()
    finally:
        os.fsync = sync
        _watching.remove(disk)


def write_tree(tree: frozenset[tuple[str, bytes | None]], folder: Path) -> Path:
    """Make a folder of what a cut left."""
    folder.mkdir()
    for name, content in sorted(tree):
        if content is None:
            (folder / name).mkdir(parents=True, exist_ok=True)
        else:
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_bytes(content)
    return folder
