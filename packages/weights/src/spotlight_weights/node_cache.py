"""One download of a policy version per node: the first process fetches it, the others map it.

Files lie in shared memory, in a per-run directory private to this user:

- ``DIGEST.safetensors``: a bundle, renamed into place and so never half written.
- ``DIGEST.hashed``: which file that was, and when it was last written, when its content was last hashed.
- ``fetch.lock``: flock held during a fetch; released by the kernel if its holder dies.
- ``DIGEST.part``: being written; the next lock holder removes what a dead process left.
- ``alive``: every cache holds a shared lock on it. Without one the run is dead, and the next cache opened on
  the node removes the directory.

Invariant: what :meth:`NodeCache.get` returns was hashed in place, by this process or another of the node
since the file was last written, and matches its manifest.
"""

from __future__ import annotations

import logging
import os
import shutil
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Self

from spotlight_weights.bundle import Bundle, WeightsManifest, open_bundle
from spotlight_weights.locks import held, lock_until, private_directory, try_lock
from spotlight_weights.weight_errors import NoSpaceError, WeightsError

SHARED_MEMORY = Path("/dev/shm")
_ENDING = ".safetensors"
_HASHED = ".hashed"
_CLOCK_NS = 20_000_000
"""Times of files are those of the kernel's clock, which may be that old."""
_OPEN_S = 10.0
"""Long enough for another process to remove a dead run's files."""
_log = logging.getLogger(__name__)


def cache_directory(run: str, parent: Path = SHARED_MEMORY) -> Path:
    """Directory of a run's versions."""
    return parent / f"{_prefix()}{run}"


def _prefix() -> str:
    return f"spotlight-{os.getuid()}-"


class NodeCache:
    """The versions in shared memory on this node; one object per process.

    Args:
        run: separates runs on the node.
        parent: a directory in memory.
        keep: versions kept, newest first. A removed one's memory is freed once no process maps it.
        deadline_s: longest wait for another process's fetch.

    Raises:
        WeightsError: the directory cannot be created, or belongs to another user.
    """

    def __init__(
        self, run: str, *, parent: Path = SHARED_MEMORY, keep: int = 2, deadline_s: float = 600.0
    ) -> None:
        if keep < 1:
            raise WeightsError(f"keep is {keep}; expected at least 1 version")
        if not run or "/" in run:
            raise WeightsError(f"name of the run is {run!r}; expected one without '/'")
        self.directory = cache_directory(run, parent)
        self.keep, self.deadline_s = keep, deadline_s
        _remove_dead(parent, _prefix(), but=self.directory)
        self._alive = _enter(self.directory)

    def get(self, manifest: WeightsManifest, fetch: Callable[[], bytes | bytearray]) -> Bundle:
        """The bundle of a version, fetched by at most one process per node.

        Args:
            fetch: returns the bytes, called if no process has them. Needs its own deadline. Its errors are
                raised here, and the next process tries.

        Raises:
            WeightsError: the bytes do not match ``manifest``, or another process's fetch missed the deadline.
            NoSpaceError: shared memory is too small.
        """
        found = self._look(manifest)
        if found is not None:
            return found
        with held(self.directory / "fetch.lock", self.deadline_s):
            found = self._look(manifest)  # fetched by another process while this one waited?
            if found is not None:
                return found
            for left in self.directory.glob("*.part"):
                left.unlink(missing_ok=True)  # its writer is dead: we hold the lock
            data = fetch()
            self._evict(manifest)
            return self._write(manifest, data)

    def close(self) -> None:
        """Release this process's claim on the run's directory; existing mappings stay valid."""
        if self._alive >= 0:
            os.close(self._alive)
            self._alive = -1

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _path(self, manifest: WeightsManifest) -> Path:
        return self.directory / f"{manifest.digest}{_ENDING}"

    def _look(self, manifest: WeightsManifest) -> Bundle | None:
        path = self._path(manifest)
        try:
            writing = _writing(path)
            hashed = _is_hashed(path)
            bundle = open_bundle(manifest, path, hashed=hashed)
            if not hashed:
                _mark_hashed(path, writing)
            return bundle
        except FileNotFoundError:
            return None
        except WeightsError as error:
            _log.warning("%s is damaged and is fetched again: %s", path, error)
            path.unlink(missing_ok=True)
            return None

    def _evict(self, coming: WeightsManifest) -> None:
        there = [path for path in self.directory.glob(f"*{_ENDING}") if path != self._path(coming)]
        for path in sorted(there, key=_time_made)[: max(0, len(there) - self.keep + 1)]:
            path.unlink(missing_ok=True)
            for mark in self.directory.glob(f"{path.stem}{_HASHED}*"):  # also one that was never renamed
                mark.unlink(missing_ok=True)

    def _write(self, manifest: WeightsManifest, data: bytes | bytearray) -> Bundle:
        part = self.directory / f"{manifest.digest}.part"
        try:
            descriptor = os.open(part, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
            try:
                os.posix_fallocate(descriptor, 0, len(data))  # reserve all space now, or fail now
                rest = memoryview(data)
                while rest:
                    rest = rest[os.write(descriptor, rest) :]
            finally:
                os.close(descriptor)
            writing = _writing(part)
            bundle = open_bundle(manifest, part)  # checked before it becomes visible
            _mark_hashed(part.rename(self._path(manifest)), writing)
        except WeightsError:
            part.unlink(missing_ok=True)
            raise
        except OSError as error:
            with suppress(OSError):
                part.unlink(missing_ok=True)
            disk = shutil.disk_usage(self.directory)
            raise NoSpaceError(
                f"{self.directory}: cannot store weights of {manifest}: {error.strerror}; {len(data)} bytes "
                f"are needed, {disk.free} of {disk.total} are free (up to {self.keep} versions are kept). "
                "Enlarge shared memory: `mount -o remount,size=SIZE /dev/shm`, docker `--shm-size`, "
                "Kubernetes an emptyDir with medium Memory on /dev/shm; and look at `ulimit -f`"
            ) from error
        return bundle


def _is_hashed(path: Path) -> bool:
    """Whether the file has not been written since its content was hashed; False where times cannot tell."""
    mark = path.with_suffix(_HASHED)
    try:
        written, marked_ns = mark.read_text(encoding="utf-8"), mark.stat().st_mtime_ns
    except FileNotFoundError:
        return False
    return written == _writing(path) and marked_ns - path.stat().st_mtime_ns > _CLOCK_NS


def _mark_hashed(path: Path, writing: str) -> None:
    """Call it after the content was hashed, with what was last written before: later writing differs."""
    with suppress(OSError):  # of no consequence: others hash it themselves
        own = path.with_suffix(f"{_HASHED}-{os.getpid()}")
        own.write_text(writing, encoding="utf-8")
        own.rename(path.with_suffix(_HASHED))


def _writing(path: Path) -> str:
    stat = path.stat()
    return f"{stat.st_ino} {stat.st_size} {stat.st_mtime_ns}"


def _time_made(path: Path) -> int:
    try:
        return path.stat().st_mtime_ns
    except FileNotFoundError:  # another process was faster
        return 0


def _enter(directory: Path) -> int:
    end_s = time.monotonic() + _OPEN_S
    while True:
        private_directory(directory)
        descriptor = -1
        with suppress(FileNotFoundError):  # removed meanwhile as a dead run's
            descriptor = os.open(directory / "alive", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            if lock_until(descriptor, end_s, shared=True) and _is_there(descriptor, directory):
                return descriptor
        if descriptor >= 0:
            os.close(descriptor)
        if time.monotonic() >= end_s:
            raise WeightsError(
                f"{directory}/alive has been locked by another process for {_OPEN_S:g} s: no process holds "
                "it longer than it takes to remove the directory; end the one that does (see `fuser`)"
            )


def _remove_dead(parent: Path, prefix: str, but: Path) -> None:
    for directory in parent.glob(f"{prefix}*"):
        try:
            if directory == but or directory.lstat().st_uid != os.getuid():
                continue
            descriptor = os.open(directory / "alive", os.O_RDWR | os.O_CLOEXEC)
        except OSError:  # not a cache, or one being created or removed
            continue
        try:
            if try_lock(descriptor) and _is_there(descriptor, directory):
                _remove(directory)
        finally:
            os.close(descriptor)


def _is_there(descriptor: int, directory: Path) -> bool:
    """Whether it is the directory's ``alive``: others may have removed and made it again before the lock."""
    try:
        return (directory / "alive").stat().st_ino == os.fstat(descriptor).st_ino
    except FileNotFoundError:
        return False


def _remove(directory: Path) -> None:
    """``alive`` goes last, so that an interrupted removal is found again."""
    for path in directory.iterdir():
        if path.is_dir() and not path.is_symlink():  # not ours
            shutil.rmtree(path)
        elif path.name != "alive":
            path.unlink(missing_ok=True)
    (directory / "alive").unlink(missing_ok=True)
    with suppress(OSError):  # a process has just entered it
        directory.rmdir()
