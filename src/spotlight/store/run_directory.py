"""The directory of one run, locked by one process.

    runs/<name>/
        config.yaml         the resolved configuration; what of it may change, runtime/resuming/course.py says
        ledger.sqlite       store/ledger/sqlite_ledger.py
        metrics.jsonl       store/metrics.py       tensorboard/
        images/             store/images.py
        checkpoints/        store/checkpoints.py
        attempts/001.log    log of each process that worked on the run
        votes/              spotlight_rewards/ballots.py, where a reward is ``vote``
        profile/            traces of ``spotlight train --profile N``
        estimate.json       store/run_estimate.py
        summary.json        store/run_summary.py
        wandb/, wandb-id, wandb-logged, trackio-id    where W&B or Trackio is configured
        lock                locked while a process works here

Invariant: while a :class:`RunDirectory` is open, no other process can open the run.
"""

from __future__ import annotations

import errno
import fcntl
import os
import socket
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Protocol, Self, TypeAlias

import yaml

from spotlight.store.store_errors import OtherConfigurationError, RunInUseError
from spotlight_rewards.base.errors import ConfigError
from spotlight_rewards.base.file_errors import StoreError, storage_error, storage_errors
from spotlight_rewards.base.files import fsync_path, open_regular, write_atomically
from spotlight_rewards.base.yaml_tree import parse_yaml

Leaf: TypeAlias = object
ABSENT = "(absent)"
"""Stands for the value of a key that one of two configurations lacks."""
_SHOWN_DIFFERENCES = 5
_NAME_BYTES_MAX = 255
_FOLDERS = ("tensorboard", "images", "checkpoints", "attempts")

_held_locks: set[int] = set()
"""Descriptors of locks held by this process. Forked children close their copies: an inherited lock would
outlive this process."""


def _forget_locks() -> None:
    for descriptor in _held_locks:
        os.close(descriptor)
    _held_locks.clear()


os.register_at_fork(after_in_child=_forget_locks)


_CONFIDENTIAL = (
    *(
        "rewards.*.params",
        "fleet.address",
        "fleet.notices.endpoint",
        "fleet.on_demand.start",
        "fleet.on_demand.stop",
    ),
    *("fleet.target.params", "metrics.sinks", "policies"),
)
"""Keys of addresses, shell commands, and whatever rewards, providers, trackers and policies are given."""


class RunPaths:
    """Paths in a run directory; opens nothing."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.config = path / "config.yaml"
        self.ledger = path / "ledger.sqlite"
        self.metrics = path / "metrics.jsonl"
        self.tensorboard = path / "tensorboard"
        self.images = path / "images"
        self.checkpoints = path / "checkpoints"
        self.attempts = path / "attempts"
        self.profile = path / "profile"
        self.in_flight = path / "in-flight"
        self.estimate = path / "estimate.json"
        self.summary = path / "summary.json"
        self.lock = path / "lock"

    def require_run(self) -> None:
        """Raise StoreError if it is no run directory."""
        if not self.config.is_file():
            raise StoreError(
                f"{self.path}: not a run directory (no {self.config.name}); see `spotlight runs`."
            )

    def attempt_log(self, attempt: int) -> Path:
        return self.attempts / f"{attempt:03d}.log"


class Terms(Protocol):
    """Which other configuration a run may go on with."""

    def complete(self, text: str) -> str:
        """Add keys that a stored configuration lacks because an older version wrote it.

        Raises:
            ConfigError: with the options that are set in it and no longer exist.
        """

    def refused(self, paths: RunPaths, changed: Iterable[str]) -> list[str]:
        """Those of the changed keys, dotted, with which the run cannot go on."""

    def remedy(self, paths: RunPaths, refused: Mapping[str, Leaf]) -> str:
        """What to do instead, by key with its new value."""


def check_run_directory(root: Path, name: str, config_text: str, terms: Terms | None = None) -> None:
    """Raise what :meth:`RunDirectory.open` would, without changes.

    Raises:
        RunInUseError: another process works on it.
        OtherConfigurationError: it belongs to another configuration.
        StoreError: it cannot be written, or is not a run directory.
    """
    paths = RunPaths(root / name)
    _require_plain(name)
    if not _is_there_or_can_be_made(paths.path):
        return
    with storage_errors("cannot use the run directory", paths.path):
        _require_run_or_nothing(paths)
        require_unused(paths.lock)
    if paths.config.exists():
        _require_configuration(paths, config_text, terms)
    if not os.access(paths.path, os.W_OK | os.X_OK):
        denied = OSError(errno.EACCES, os.strerror(errno.EACCES), str(paths.path))
        raise storage_error("cannot use the run directory", paths.path, denied)


class RunDirectory(RunPaths):
    """An open, locked run directory. Use as a context manager, or :meth:`close` it.

    Attributes:
        config_text: the configuration that the run is opened with, which :meth:`adopt` writes.
    """

    def __init__(self, path: Path, lock: int, config_text: str) -> None:
        super().__init__(path)
        self._lock, self.config_text = lock, config_text

    @classmethod
    def open(
        cls,
        root: Path,
        name: str,
        config_text: str,
        terms: Terms | None = None,
    ) -> Self:
        """Create or reopen the run's directory, and lock it. One that has a configuration keeps it at first.

        Args:
            terms: on which the run may go on with another configuration; None: with none.

        Raises:
            RunInUseError: another process works on it.
            OtherConfigurationError: it belongs to another configuration.
            StoreError: it cannot be written, or is not a run directory.
        """
        _require_plain(name)
        paths = RunPaths(root / name)
        with storage_errors("cannot use the run directory", paths.path):
            _require_run_or_nothing(paths)
            for folder in _FOLDERS:
                (paths.path / folder).mkdir(parents=True, exist_ok=True)
            lock = _lock(paths.lock)
            for parent in (paths.path, root):  # what is synced in a folder that a power cut takes is lost
                fsync_path(parent)
        run = cls(paths.path, lock, config_text)
        try:
            if run.config.exists():
                _require_configuration(run, config_text, terms)
            else:
                run.adopt()
        except BaseException:
            run.close()
            raise
        return run

    def adopt(self) -> None:
        """Write the configuration that the run was opened with, once what changes is recorded."""
        with storage_errors("cannot write the configuration", self.config):
            write_atomically(self.config, self.config_text.encode(), _mode(self.config_text))

    def close(self) -> None:
        let_go(self._lock)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _require_plain(name: str) -> None:
    if name in {"", ".", ".."} or Path(name).name != name:
        raise StoreError(f"run name {name!r}: expected a plain folder name such as 'demo'.")
    if (size_bytes := len(os.fsencode(name))) > _NAME_BYTES_MAX:
        raise StoreError(
            f"run name {name[:20]!r}... has {size_bytes} bytes: expected at most {_NAME_BYTES_MAX}, as many "
            "as a folder's name may have. Choose a shorter one."
        )


def _is_there_or_can_be_made(path: Path) -> bool:
    try:
        if path.exists():
            return True
        existing = next(parent for parent in path.absolute().parents if parent.exists())
        # Permission bits are not enough: root passes them everywhere, and still cannot create files in /proc.
        with TemporaryDirectory(prefix=".spotlight-", dir=existing):
            return False
    except OSError as error:
        raise StoreError(
            f"runs_dir: the run directory {path} cannot be made: {error.strerror}; "
            "expected a place where this user can make folders. Set runs_dir to one, or fix this one."
        ) from error


def _require_run_or_nothing(paths: RunPaths) -> None:
    if paths.path.exists() and not paths.path.is_dir():
        raise StoreError(
            f"{paths.path}: a file is in the way of the run directory; remove it or use another run name."
        )
    if not paths.path.is_dir() or paths.config.exists():
        return
    known = {*_FOLDERS, paths.lock.name}
    foreign = sorted(
        entry.name for entry in paths.path.iterdir() if entry.name not in known and entry.name[0] != "."
    )
    if foreign:
        raise StoreError(
            f"{paths.path}: not a run directory: it has no {paths.config.name}, but it has {foreign[0]!r}. "
            "Use another run name, or remove the folder."
        )


def require_unused(lock: Path) -> None:
    """Raise RunInUseError if another process works on the run that has this lock."""
    with suppress(FileNotFoundError), open_regular(lock) as file:
        # Shared, because all ranks look at once.
        _flock(file.fileno(), lock, fcntl.LOCK_SH)


def _lock(path: Path) -> int:
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        _flock(descriptor, path, fcntl.LOCK_EX)
    except BaseException:
        os.close(descriptor)
        raise
    os.ftruncate(descriptor, 0)
    os.pwrite(descriptor, f"process {os.getpid()} on {socket.gethostname()}\n".encode(), 0)
    hold(descriptor)
    return descriptor


def hold(descriptor: int) -> None:
    """A lock that is this process's alone, until :func:`let_go`."""
    _held_locks.add(descriptor)


def let_go(descriptor: int) -> None:
    """Close the lock's file, unless it is the one of the process that this one was forked from."""
    if descriptor in _held_locks:
        _held_locks.remove(descriptor)
        os.close(descriptor)


def _flock(descriptor: int, path: Path, kind: int) -> None:
    """Lock without waiting."""
    try:
        fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        holder = os.read(descriptor, 200).decode("utf-8", "replace").strip()
        raise RunInUseError(
            f"{path.parent}: in use by {holder or 'a process that is just starting'}. "
            "Wait for it or stop it, or start this run under another name."
        ) from None


def _require_configuration(paths: RunPaths, config_text: str, terms: Terms | None) -> None:
    changed = changes_of(stored_leaves(paths, terms), flatten(parse_yaml(config_text)))
    refused = terms.refused(paths, changed) if terms and changed else list(changed)
    if not refused:
        return
    lines = [
        f"  {key}: {changed[key][0]!r} in the run, {changed[key][1]!r} now"
        for key in refused[:_SHOWN_DIFFERENCES]
    ]
    if len(refused) > _SHOWN_DIFFERENCES:
        lines.append(f"  and {len(refused) - _SHOWN_DIFFERENCES} more")
    remedy = f"Start a run of another name, delete {paths.path} to start it again, or undo the change."
    if terms:
        remedy = terms.remedy(paths, {key: changed[key][1] for key in refused})
        remedy += f"\nTo start again: choose another name, or delete {paths.path}."
    raise OtherConfigurationError(
        f"{paths.path}: this run was started with another configuration:\n" + "\n".join(lines) + f"\n{remedy}"
    )


def stored_leaves(paths: RunPaths, terms: Terms | None = None) -> dict[str, Leaf]:
    """The keys of a run's stored configuration.

    Raises:
        OtherConfigurationError: it sets what no longer exists.
        StoreError: it is damaged.
    """
    remedy = (
        "Restore it from a copy, or with what `spotlight config` prints for the arguments that the run was "
        "started with."
    )
    try:
        with open_regular(paths.config) as file:
            text = file.read().decode()
        stored = parse_yaml(terms.complete(text) if terms else text)
    except ConfigError as error:
        retired = "".join(f"  {problem.key}: {problem.found}\n" for problem in error.problems)
        raise OtherConfigurationError(
            f"{paths.path}: this run was started with what no longer exists:\n{retired}"
            "It can be read, but not resumed: start a run of another name."
        ) from None
    except (OSError, yaml.YAMLError, UnicodeDecodeError) as error:
        raise StoreError(f"{paths.config}: cannot be read as YAML ({error}). {remedy}") from error
    if not isinstance(stored, Mapping) or not stored:
        found = "nothing" if not stored else repr(stored)[:60]
        raise StoreError(
            f"{paths.config}: damaged: found {found}, expected the keys of a configuration. {remedy}"
        )
    return flatten(stored)


def changes_of(old: Mapping[str, Leaf], new: Mapping[str, Leaf]) -> dict[str, tuple[Leaf, Leaf]]:
    """Old and new values of the keys that differ."""
    both = {key: (old.get(key, ABSENT), new.get(key, ABSENT)) for key in sorted(old.keys() | new.keys())}
    return {key: (was, now) for key, (was, now) in both.items() if was != now}


def _mode(config_text: str) -> int:
    """For the owner alone where a configuration says what others must not know."""
    said = [key for key, value in flatten(parse_yaml(config_text)).items() if value not in (None, {}, ())]
    return 0o600 if any(map(is_confidential, said)) else 0o666


def is_confidential(key: str) -> bool:
    """Whether others must not know the value of a key."""
    return any(covers(each, key) for each in _CONFIDENTIAL)


def covers(pattern: str, key: str) -> bool:
    """Whether a key is this one or within it; ``*`` stands for one part."""
    wanted, parts = pattern.split("."), key.split(".")
    return len(wanted) <= len(parts) and all(a in ("*", k) for a, k in zip(wanted, parts, strict=False))


def flatten(tree: object, prefix: str = "") -> dict[str, Leaf]:
    """Leaves of nested mappings by dotted key; of lists of mappings by number. Other lists are leaves."""
    if isinstance(tree, list) and tree and all(isinstance(item, Mapping) for item in tree):
        tree = dict(enumerate(tree))
    if not isinstance(tree, Mapping) or (not tree and prefix):
        return {prefix: tree}
    leaves: dict[str, Leaf] = {}
    for key, value in tree.items():
        leaves |= flatten(value, f"{prefix}.{key}" if prefix else str(key))
    return leaves
