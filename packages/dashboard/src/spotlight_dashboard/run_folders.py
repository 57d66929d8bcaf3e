"""The run directories that the dashboard shows, and which of their files it may read.

Of these files none is written; only votes are, see ``voting.py``. A file is read only if it lies within its
run's directory once links are followed.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import yaml

from spotlight.store.run_directory import RunPaths
from spotlight.store.store_errors import LedgerError
from spotlight_dashboard.figures import finite
from spotlight_rewards.ballots import VOTES_FOLDER

LOG_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*\.log")
CONFIG_BYTES_MAX = 1 << 20


@dataclass(frozen=True, slots=True)
class RunFolder:
    """One run: its name on the page, and its directory with links followed."""

    name: str
    path: Path

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

    def settings(self) -> Settings:
        """The configuration; empty if there is none to read."""
        path = self.readable(self.paths.config)
        if path is None or path.stat().st_size > CONFIG_BYTES_MAX:
            return Settings({})
        try:
            found = yaml.safe_load(path.read_text(encoding="utf-8"))
        except (OSError, ValueError, yaml.YAMLError, RecursionError):
            return Settings({})
        return Settings(found if isinstance(found, dict) else {})

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

    def has(self, key: str) -> bool:
        """Whether the key is set, to something other than null or an empty section."""
        return bool(self._at(key))

    def _at(self, key: str) -> object:
        value: object = self.tree
        for part in key.split("."):
            value = value.get(part) if isinstance(value, dict) else None
        return value


def find_runs(places: Sequence[Path]) -> dict[str, RunFolder]:
    """The runs at ``places``, each a run directory or a folder of them, by name.

    A link in a folder of runs is not followed out of it: name its target instead. Of several runs of one
    name, the later are called ``name~2``, ``name~3``.
    """
    found: dict[str, RunFolder] = {}
    met: set[Path] = set()
    for path in (path for place in places for path in _runs_at(place)):
        if path in met:
            continue
        met.add(path)
        # A folder's name may hold bytes that are no UTF-8, which no address or answer can.
        first = name = path.name.encode("utf-8", "backslashreplace").decode()
        number = 1
        while name in found:
            number += 1
            name = f"{first}~{number}"
        found[name] = RunFolder(name, path)
    return found


def _runs_at(place: Path) -> Iterator[Path]:
    try:
        root = place.resolve()
        if RunPaths(root).config.is_file():
            yield root
            return
        configs = sorted(root.glob("*/config.yaml"))
    except (OSError, RuntimeError):
        return
    for config in configs:
        real = config.parent.resolve()
        if real.is_relative_to(root):
            yield real


def _stamp(path: Path) -> str:
    try:
        status = path.stat()
    except OSError:
        return "-"
    return f"{status.st_ino}.{status.st_size}.{status.st_mtime_ns}"
