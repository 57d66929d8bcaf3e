"""The run directories that the dashboard shows, and which of their files it may read.

Of these files none is written; only votes are, see ``voting.py``. A file is read only if it lies within its
run's directory once links are followed.
"""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Iterable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from sqlite3 import Connection

import yaml

from spotlight.store.ledger.ledger_queries import consistent_reading, open_readonly
from spotlight.store.run_directory import RunPaths
from spotlight.store.store_errors import ODD_VALUES, LedgerError, told_odd
from spotlight_dashboard.figures import finite
from spotlight_rewards.ballots import VOTES_FOLDER
from spotlight_rewards.base.file_errors import StoreError
from spotlight_rewards.base.files import read_regular
from spotlight_rewards.base.yaml_tree import parse_yaml

LOG_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*\.log")
CONFIG_BYTES_MAX = 1 << 20
READ_S = 60.0
"""All queries of a ledger for one answer."""
_NOTHING = (FileNotFoundError, NotADirectoryError, RuntimeError)  # RuntimeError: links in a circle


@dataclass(frozen=True, slots=True)
class RunFolder:
    """One run: its name on the page, and its directory with links followed."""

    name: str
    path: Path

    @classmethod
    def of(cls, directory: Path) -> RunFolder:
        """A run that is named as its directory is."""
        path = directory.resolve()
        return cls(_as_text(path.name), path)

    @property
    def paths(self) -> RunPaths:
        """Where its files are."""
        return RunPaths(self.path)

    def readable(self, path: Path) -> Path | None:
        """The file with links followed; None if it is missing or lies outside the run."""
        try:
            real = path.resolve(strict=True)
        except (OSError, RuntimeError):  # RuntimeError: links in a circle
            return None
        return real if real.is_file() and real.is_relative_to(self.path) else None

    def ledger(self) -> Path:
        """The ledger's file. Raises :class:`LedgerError` if there is none within the run."""
        path = self.readable(self.paths.ledger)
        if path is None:
            raise LedgerError(f"{self.paths.ledger}: no ledger here yet, or only a link out of the run.")
        return path

    def open_ledger(self) -> Connection:
        """The ledger for :data:`READ_S`. Raises as :func:`open_readonly`."""
        return open_readonly(self.ledger(), READ_S)

    @contextmanager
    def reading_ledger(self) -> Iterator[Connection]:
        """The ledger, all of one state, as :meth:`open_ledger` opens it. Raises LedgerError."""
        with closing(self.open_ledger()) as connection, consistent_reading(connection):
            yield connection

    def file(self, path: Path, bytes_max: int) -> bytes | None:
        """What the file holds, as :meth:`readable` finds it. Raises OSError."""
        real = self.readable(path)
        return None if real is None else read_regular(real, bytes_max)

    def settings(self) -> Settings:
        """The configuration; empty if there is none to read."""
        path = self.readable(self.paths.config)
        return Settings({}) if path is None else _settings(path, _stamp(path))

    @contextmanager
    def values(self) -> Iterator[None]:
        """Turn what odd values in the run's files raise in the block into a StoreError."""
        try:
            yield
        except Exception as error:
            if type(error) not in ODD_VALUES:
                raise
            raise StoreError(told_odd(self.path, error)) from error

    def signature(self) -> str:
        """Changes when the run writes anything that the page shows."""
        paths = self.paths
        watched = (
            paths.config,
            paths.ledger,
            paths.ledger.with_name(f"{paths.ledger.name}-wal"),
            paths.metrics,
            paths.images / "tiles",
            paths.attempts,
            paths.path / VOTES_FOLDER,
            paths.path / VOTES_FOLDER / "open",
        )
        return "/".join(_stamp(path) for path in watched)


@dataclass(frozen=True, slots=True)
class Settings:
    """A run's configuration as YAML has it: runs of other versions and extensions are shown, too."""

    tree: dict[str, object]

    def number(self, key: str) -> float | None:
        """A finite number by dotted key; None if there is none."""
        return finite(self._at(key))

    def whole(self, key: str) -> int | None:
        """A whole number by dotted key."""
        number = self.number(key)
        return int(number) if number is not None and number == int(number) else None

    def text(self, key: str) -> str:
        """Text by dotted key; empty if there is none."""
        value = self._at(key)
        return value if isinstance(value, str) else ""

    def _at(self, key: str) -> object:
        value: object = self.tree
        for part in key.split("."):
            value = value.get(part) if isinstance(value, dict) else None
        return value


def named(paths: Iterable[Path]) -> dict[str, RunFolder]:
    """The runs by name. Of several of one name, the later are called ``name~2``, ``name~3``."""
    found: dict[str, RunFolder] = {}
    met: set[Path] = set()
    for path in paths:
        if path in met:
            continue
        met.add(path)
        first = name = _as_text(path.name)
        number = 1
        while name in found:
            number += 1
            name = f"{first}~{number}"
        found[name] = RunFolder(name, path)
    return found


def _as_text(name: str) -> str:
    """A folder's name may hold bytes that are no UTF-8, which no address, answer or file can."""
    return name.encode("utf-8", "backslashreplace").decode()


def folders_at(place: Path) -> list[Path]:
    """The folders at a place that may be runs: itself, or those in it. Asks nothing of these.

    Raises OSError if the place cannot be read now, which says nothing of what is there.
    """
    try:
        root = place.resolve()
        if _is_file(RunPaths(root).config):
            return [root]
        with os.scandir(root) as found:
            return [root / each.name for each in sorted(found, key=lambda each: each.name)]
    except _NOTHING:
        return []


def run_at(folder: Path) -> Path | None:
    """The run directory of this path; None if there is none.

    A link in a folder of runs is not followed out of it: name its target instead.
    Raises OSError if it cannot be read now.
    """
    try:
        real = folder.resolve()
        return real if real.is_relative_to(folder.parent) and _is_file(RunPaths(real).config) else None
    except _NOTHING:
        return None


def _is_file(path: Path) -> bool:
    """Raises OSError if that cannot be told, which Path.is_file does not in every version of Python."""
    try:
        return stat.S_ISREG(path.stat().st_mode)
    except _NOTHING:
        return False


@lru_cache(maxsize=1024)
def _settings(path: Path, stamp: str) -> Settings:
    try:
        found = parse_yaml(read_regular(path, CONFIG_BYTES_MAX).decode())
    except (OSError, ValueError, yaml.YAMLError, RecursionError):
        return Settings({})
    return Settings(found if isinstance(found, dict) else {})


def _stamp(path: Path) -> str:
    try:
        status = path.stat()
    except OSError:
        return "-"
    return f"{status.st_ino}.{status.st_size}.{status.st_mtime_ns}"
