"""Atomic directory checkpoints: weights, optimizer, controller and ledger position, all or nothing.

A checkpoint is written to a temporary directory, forced to disk, renamed, and only then named by ``latest``:

    .writing-000007-iteration-000030/  ─fsync, manifest─►  rename  ─►  000007-iteration-000030/  ─►  latest

Whenever the process or machine dies, :meth:`CheckpointStore.newest_valid` finds the previous or the new
checkpoint, intact. Names start with an increasing serial number, so nothing is ever overwritten: a damaged
checkpoint is skipped in favour of the one before it, and removed at the next commit.

Invariants: ``latest`` names a checkpoint that was intact when it was named; checkpoints with a higher serial
were never committed; an intact checkpoint named by ``latest`` is never removed.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from spotlight.store.manifest import (
    MANIFEST,
    CheckpointHeader,
    Damage,
    make_manifest,
    read_manifest,
    render,
    sha256_of,
    verify,
)
from spotlight.store.store_errors import DamagedCheckpointError
from spotlight_rewards.base.file_errors import StoreError, is_out_of_space, storage_error, storage_errors
from spotlight_rewards.base.files import (
    TEMPORARY_PREFIX,
    fsync_path,
    fsync_tree,
    read_regular,
    write_atomically,
)

T = TypeVar("T")
LATEST = "latest"
_LOOKS_MAX = 10
_POINTER_BYTES_MAX = 1 << 16
_NAME = re.compile(r"(\d{6,})-iteration-(\d+)")
_POINTER = re.compile(r"(\d{6,}-iteration-\d+) ([0-9a-f]{64})\n")


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A verified checkpoint; ``damages`` lists damage found in newer ones or the pointer."""

    directory: Path
    header: CheckpointHeader
    damages: tuple[Damage, ...]


class CheckpointStore:
    """The checkpoints of one run."""

    def __init__(self, directory: Path, keep: int) -> None:
        """Use the existing ``directory``; retain the newest ``keep`` checkpoints."""
        if keep < 1:
            raise ValueError(f"keep is {keep}: at least one checkpoint must be kept to resume from")
        self._directory = directory
        self._keep = keep
        self._known_damaged: set[str] = set()

    @contextmanager
    def writer(self, header: CheckpointHeader, best: Sequence[int] = ()) -> Iterator[Path]:
        """Yield a directory to write into; leaving the block commits it as the newest checkpoint.

        Args:
            best: iterations, the best first: the first that has a checkpoint keeps it, however old it is.

        If the body raises, nothing is committed. Failing to remove an old checkpoint raises after the commit.

        Raises:
            StoreError: the disk is full or not writable; older checkpoints are intact.
        """
        serial = max(map(_serial, self._names()), default=0) + 1
        name = f"{serial:06d}-iteration-{header.iteration:06d}"
        temporary = self._directory / (TEMPORARY_PREFIX + name)
        try:
            self._remove_uncommitted()
            temporary.mkdir()
            yield temporary
            self._commit(temporary, name, header)
            self._remove_old(name, best)
        except BaseException as error:
            # Before cleaning up, which frees space.
            is_storage = isinstance(error, OSError) or (
                isinstance(error, Exception)
                and not isinstance(error, StoreError)
                and is_out_of_space(error, self._directory)
            )
            translated = storage_error(f"cannot write checkpoint {name}", self._directory, error)
            shutil.rmtree(temporary, ignore_errors=True)
            if is_storage:
                raise translated from error
            raise

    def _commit(self, temporary: Path, name: str, header: CheckpointHeader) -> None:
        manifest = render(make_manifest(temporary, header))
        (temporary / MANIFEST).write_bytes(manifest)
        fsync_tree(temporary)
        final = temporary.rename(self._directory / name)
        fsync_path(self._directory)
        for damaged in self._known_damaged:
            self._discard(damaged)
        self._known_damaged.clear()
        write_atomically(self._directory / LATEST, f"{name} {sha256_of(final / MANIFEST)}\n".encode())

    def newest_valid(self) -> Checkpoint | None:
        """The newest intact committed checkpoint; None if there never was one. Modifies nothing.

        Raises:
            DamagedCheckpointError: checkpoints exist, but all are damaged.
        """
        names, damages = self._committed()
        for name in names:
            manifest, found = verify(self._directory / name)
            if manifest is not None and not found:
                return Checkpoint(self._directory / name, manifest.header, tuple(damages))
            self._known_damaged.add(name)
            damages.extend(found)
        if damages:
            listed = "\n  ".join(str(damage) for damage in damages)
            raise DamagedCheckpointError(
                f"{self._directory}: no checkpoint is whole:\n  {listed}\n"
                "Restore one from a copy, or delete the run directory to start again."
            )
        return None

    def newest_header(self) -> CheckpointHeader | None:
        """Of the newest checkpoint whose manifest is intact; its files are not read. None: there is none."""
        found = (read_manifest(self._directory / name) for name in self._committed()[0])
        return next((each.header for each in found if not isinstance(each, Damage)), None)

    @property
    def iterations(self) -> list[int]:
        """Iterations trained at each committed checkpoint, ascending."""
        return sorted({int(name.rpartition("-")[2]) for name in self._committed()[0]})

    def made_after(self, iteration: int) -> Checkpoint | None:
        """The checkpoint with so many iterations trained; None: it is not kept.

        Raises:
            DamagedCheckpointError: its files have changed.
        """
        if (name := _made_after(self._committed()[0], iteration)) is None:
            return None
        manifest, damages = verify(self._directory / name)
        if manifest is None or damages:
            raise DamagedCheckpointError(f"{self._directory}: {damages[0]}. Restore a copy, or take another.")
        return Checkpoint(self._directory / name, manifest.header, ())

    @property
    def any_committed(self) -> bool:
        """Whether a checkpoint was ever named the newest; it may be damaged."""
        return self._pointer() is not None or bool(self._names())

    def read_newest(self, read: Callable[[Checkpoint], T]) -> T | None:
        """``read`` of the newest intact checkpoint, while a run may write the next and remove this one.

        Then it is read again. None if there never was one.

        Raises:
            StoreError: it was replaced each time.
            DamagedCheckpointError, or what ``read`` raises: the checkpoint was not replaced meanwhile.
        """
        for _ in range(_LOOKS_MAX):
            before = self._pointer()
            try:
                newest = self.newest_valid()
                found = None if newest is None else read(newest)
            except Exception:
                if self._pointer() == before:
                    raise
            else:
                # Only what is no longer the newest is removed, so what is missing may be that.
                if newest is None or not newest.damages or self._pointer() == before:
                    return found
        raise StoreError(
            f"{self._directory}: the run replaced its checkpoint {_LOOKS_MAX} times while it was being read. "
            "Raise checkpoint.keep, or try again when the run has ended."
        )

    def _pointer(self) -> bytes | None:
        """What names the newest checkpoint; None before the first. Raises StoreError."""
        path = self._directory / LATEST
        with storage_errors("cannot read what names the newest checkpoint", path):
            return read_regular(path, _POINTER_BYTES_MAX) if path.exists() else None

    def _committed(self) -> tuple[list[str], list[Damage]]:
        names = self._names()
        if (content := self._pointer()) is None:
            return names, []
        match = _POINTER.fullmatch(content.decode("utf-8", "replace"))
        if match is None:
            return names, [_pointer_damage("a checkpoint's name and hash", f"{content[:120]!r}")]
        name, expected = match.groups()
        if name not in names:
            return names, [_pointer_damage("the name of a checkpoint", name)]
        directory = self._directory / name
        if not isinstance(read_manifest(directory), Damage):
            found = sha256_of(directory / MANIFEST)
            if found != expected:
                return names, [_pointer_damage(f"sha256 {found} of {name}/{MANIFEST}", f"sha256 {expected}")]
        return [older for older in names if _serial(older) <= _serial(name)], []

    def _names(self) -> list[str]:
        there = self._directory.iterdir() if self._directory.is_dir() else ()
        found = (path.name for path in there if _NAME.fullmatch(path.name))
        return sorted(found, key=_serial, reverse=True)

    def _remove_uncommitted(self) -> None:
        """Remove partial files and checkpoints newer than ``latest``, left by a crash.

        Their work was redone, so resuming from them would contradict the ledger.
        """
        committed, _ = self._committed()
        for name in set(self._names()).difference(committed):
            self._discard(name)
        for path in self._directory.glob(f"{TEMPORARY_PREFIX}*"):
            if path.is_dir():
                shutil.rmtree(path)
            else:
                path.unlink()

    def _remove_old(self, newest: str, best: Sequence[int]) -> None:
        names = self._names()
        others = [name for name in names if name != newest]
        spared = next((found for iteration in best if (found := _made_after(names, iteration))), None)
        for name in others[self._keep - 1 :]:
            if name != spared:
                self._discard(name)

    def _discard(self, name: str) -> None:
        doomed = (self._directory / name).rename(self._directory / (TEMPORARY_PREFIX + name))
        shutil.rmtree(doomed)


def _made_after(names: Sequence[str], iteration: int) -> str | None:
    """The newest checkpoint with so many iterations trained; ``names`` are sorted, the newest first."""
    return next((name for name in names if int(name.rpartition("-")[2]) == iteration), None)


def _serial(name: str) -> int:
    return int(name.split("-", 1)[0])


def _pointer_damage(expected: str, found: str) -> Damage:
    return Damage(".", LATEST, expected, found)
