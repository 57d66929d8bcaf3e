"""Folders of this machine for runs of a bucket: the working copy of a head, and copies that are only read.

<cache>/bucket/<scheme>/<bucket>/<prefix>/work/<name>/     a runs_dir: what the run works in
                                         work/.<name>.copy    lock and id of that
                                         read/<name>/      what audit, dashboard, export and runs read
"""

from __future__ import annotations

import fcntl
import json
import os
import re
import shutil
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from spotlight.store.checkpoints import LATEST, CheckpointStore
from spotlight.store.manifest import MANIFEST
from spotlight.store.run_directory import RunPaths, hold, let_go
from spotlight.store.store_errors import RunInUseError
from spotlight_bucket.bucket_objects import BucketError, Objects
from spotlight_bucket.receiving import MissingChunkError, receive
from spotlight_bucket.run_files import serial_of
from spotlight_bucket.snapshots import RunSnapshot, StoredFile, is_plain, newest_snapshot
from spotlight_rewards.base.file_errors import size, storage_errors
from spotlight_rewards.base.files import TEMPORARY_PREFIX, write_atomically

READ = "read"
_PART = re.compile(r"(?!\.{1,2}$)[A-Za-z0-9!_.*'()-]{1,200}")
_SCHEME = re.compile(r"[a-z][a-z0-9]{0,9}")
_BUNDLED = ("checkpoints", "images", "lora", "merged", "profile", "tensorboard", "card", "votes")
"""Folders that a reader takes only if it needs them."""
_LOOKS_MAX = 5


def folder_of(address: str, cache: Path) -> Path:
    """Where this machine keeps what it has of an address. Raises BucketError for one that is none."""
    scheme, _, rest = address.partition("://")
    parts = rest.rstrip("/").split("/")
    if not (_SCHEME.fullmatch(scheme) and all(_PART.fullmatch(part) for part in parts)):
        raise BucketError(
            f"runs_dir: {address!r} is not the address of a bucket; expected s3://BUCKET/PREFIX of letters, "
            "digits and ! _ . * ' ( ) - between slashes."
        )
    return cache.joinpath("bucket", scheme, *parts)


@dataclass(frozen=True, slots=True)
class WorkingCopy:
    """A run directory's place on this machine, held by this process."""

    runs_dir: Path
    name: str
    id: str

    @property
    def run(self) -> Path:
        return self.runs_dir / self.name

    @property
    def backup(self) -> Path:
        return self.runs_dir / f".{self.name}.ledger"


@contextmanager
def working_copy(folder: Path, name: str) -> Iterator[WorkingCopy]:
    """Hold the working copy of a run within the block.

    Raises:
        RunInUseError: another process of this machine holds it.
        StoreError: the disk.
    """
    runs_dir, cannot = folder / "work", "cannot make the working copy of a run in a bucket"
    with storage_errors(cannot, runs_dir):
        runs_dir.mkdir(parents=True, exist_ok=True)
        lock = os.open(runs_dir / f".{name}.copy", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    hold(lock)
    try:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise RunInUseError(
                f"{runs_dir / name}: in use by another process of this machine. Wait for it or stop it, or "
                "start this run under another name."
            ) from None
        with storage_errors(cannot, runs_dir):
            found = os.pread(lock, 64, 0).decode("ascii", "replace")
            if not re.fullmatch(r"[0-9a-f]{32}", found):
                found = uuid.uuid4().hex
                os.ftruncate(lock, 0)
                os.pwrite(lock, found.encode(), 0)
                os.fsync(lock)
        yield WorkingCopy(runs_dir, name, found)
    finally:
        let_go(lock)


def bring_to_work(
    copy: WorkingCopy, base: RunSnapshot, objects: Objects, note: Callable[[str], None]
) -> None:
    """Make the working copy what the run goes on from: as it is, where the bucket's state came from it and it
    has its newest checkpoint. A disk that was restored has not.

    Raises StoreError, of the bucket or the disk.
    """
    is_here = RunPaths(copy.run).config.is_file()
    if not base.files or (is_here and base.copy == copy.id and not _is_behind(copy.run, base.files)):
        return
    if is_here:
        note(f"{copy.run} is older than {objects.address}, where the run went on: it is replaced")
    note(f"bringing {size(base.size_bytes)} from {objects.address} to {copy.run}")
    fresh = copy.runs_dir / f"{TEMPORARY_PREFIX}{copy.name}"
    with storage_errors("cannot replace the working copy", copy.run):
        _remove_others(fresh, base.files)
        receive(objects, base.files, fresh)
        shutil.rmtree(copy.run, ignore_errors=True)
        fresh.rename(copy.run)


def _is_behind(run: Path, files: Mapping[str, StoredFile]) -> bool:
    checkpoints = RunPaths(run).checkpoints
    names = (PurePosixPath(path).parts[1] for path in files if path.startswith(f"{checkpoints.name}/"))
    here = (path.name for path in checkpoints.glob("*"))
    return max(map(serial_of, names), default=0) > max(map(serial_of, here), default=0)


class ReadCopy:
    """A copy of a run that is only read, renewed on demand."""

    def __init__(self, folder: Path, name: str, objects: Objects) -> None:
        self.run = folder / READ / name
        self._objects = objects

    def renew(self, wanted: Callable[[str], bool]) -> bool:
        """Bring the newest state of the files that are wanted, and drop what the run has dropped.

        Returns False if the bucket holds no such run (any more): then nothing is here, either.

        Raises StoreError, of the bucket or the disk.
        """
        with storage_errors("cannot write", self.run.parent), self._held():
            for _ in range(_LOOKS_MAX - 1):
                with suppress(MissingChunkError):  # the head has replaced the snapshot
                    return self._renew(wanted)
            return self._renew(wanted)

    @contextmanager
    def _held(self) -> Iterator[None]:
        """Until other readers of this machine, such as a dashboard, have renewed it."""
        self.run.parent.mkdir(parents=True, exist_ok=True)
        lock = self.run.with_name(f".{self.run.name}.lock")
        descriptor = os.open(lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            yield
        finally:
            os.close(descriptor)

    def _renew(self, wanted: Callable[[str], bool]) -> bool:
        snapshot = newest_snapshot(self._objects)
        if snapshot is None or "config.yaml" not in snapshot.files:
            self._index.unlink(missing_ok=True)
            shutil.rmtree(self.run, ignore_errors=True)
            return False
        known = self._known()
        chosen = {path: file for path, file in snapshot.files.items() if wanted(path)}
        changed = {path: file for path, file in chosen.items() if known.get(path) != file.chunks}
        for path in known.keys() - snapshot.files.keys():  # first: a folder may be where a file was
            (self.run / path).unlink(missing_ok=True)
            with suppress(OSError):  # a folder is left only where something is in it
                os.removedirs((self.run / path).parent)
        receive(self._objects, changed, self.run)
        kept = {path: chunks for path, chunks in known.items() if path in snapshot.files}
        kept |= {path: file.chunks for path, file in chosen.items()}
        write_atomically(self._index, json.dumps(kept).encode())
        return True

    @property
    def _index(self) -> Path:
        return self.run.with_name(f".{self.run.name}.files")

    def _known(self) -> dict[str, tuple[str, ...]]:
        """Of a damaged index nothing: then all files are brought again."""
        try:
            found = json.loads(self._index.read_bytes())
            there = ((path, chunks) for path, chunks in found.items() if is_plain(path))
            return {path: tuple(chunks) for path, chunks in there if (self.run / path).is_file()}
        except (OSError, ValueError, TypeError, AttributeError, RecursionError):
            return {}


def is_light(path: str) -> bool:
    """Whether every reader takes the file: all but checkpoints, pictures and exports; of checkpoints the
    manifests."""
    top, _, rest = path.partition("/")
    of_checkpoints = top == "checkpoints" and (rest == LATEST or rest.endswith(f"/{MANIFEST}"))
    return top not in _BUNDLED or of_checkpoints


def newest_checkpoint_of(run: Path) -> str | None:
    """The folder of the newest checkpoint whose manifest is here."""
    store = CheckpointStore(RunPaths(run).checkpoints, keep=1)
    header = store.newest_header()
    found = sorted(RunPaths(run).checkpoints.glob(f"*-iteration-{header.iteration:06d}")) if header else []
    return f"checkpoints/{found[-1].name}/" if found else None


def _remove_others(folder: Path, files: Mapping[str, StoredFile]) -> None:
    """Of an earlier try that was cut off, keep what is still wanted."""
    for path in sorted(folder.rglob("*"), reverse=True):
        if path.is_symlink() or not path.is_dir():
            if path.is_symlink() or path.relative_to(folder).as_posix() not in files:
                path.unlink()
        elif not any(path.iterdir()):
            path.rmdir()
