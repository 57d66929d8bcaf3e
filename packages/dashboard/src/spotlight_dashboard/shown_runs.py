"""Which runs there are, looked for so that none that does not answer hides the others."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

from spotlight.store.ledger.ledger_queries import ran_out_of_time
from spotlight_dashboard.run_folders import RunFolder, folders_at, named, run_at
from spotlight_dashboard.run_threads import ASKED_S, Read, RunThreads

LOOKS_EVERY_S = 1.0
K = TypeVar("K", bound=Hashable)
T = TypeVar("T")


class SilentRunError(Exception):
    """A run's files were waited for in vain."""

    def __init__(self, name: str) -> None:
        super().__init__(
            f"{name[:100]} does not answer: its disk, or what is in its files, takes too long. "
            "It is asked again as soon as it does."
        )


@dataclass(slots=True)
class ShownRuns:
    """The runs at ``places``, looked for at most once in :data:`LOOKS_EVERY_S`, however many ask.

    Belongs to one event loop; ``threads`` may be of several.
    """

    places: Sequence[Path]
    threads: RunThreads = field(default_factory=RunThreads)
    _folders: dict[Path, list[Path]] = field(default_factory=dict)
    _found: dict[Path, tuple[Path, str] | None] = field(default_factory=dict)
    _runs: dict[str, RunFolder] = field(default_factory=dict)
    _signatures: dict[str, str] = field(default_factory=dict)
    _silent: frozenset[str] = frozenset()
    _looked: float = -LOOKS_EVERY_S
    _looking: asyncio.Lock = field(default_factory=asyncio.Lock)

    async def look(self) -> dict[str, RunFolder]:
        """The runs by name, those among them that do not answer."""
        async with self._looking:
            if time.monotonic() - self._looked >= LOOKS_EVERY_S:
                await self._look()
                self._looked = time.monotonic()
        return self._runs

    async def signatures(self) -> dict[str, str]:
        """By run; another one when its files have changed."""
        await self.look()
        return self._signatures

    async def each(self, kind: str, work: Callable[[RunFolder], T]) -> dict[str, T | None]:
        """What ``work`` finds of each run, by name; None of those that do not answer. Raises its errors."""
        runs = await self.look()
        asked = [run for name, run in runs.items() if name not in self._silent]
        read = await self.threads.each(kind, asked, work)
        return {name: read[run].get() if run in read else None for name, run in runs.items()}

    async def ask(
        self, run: RunFolder, kind: str, work: Callable[[RunFolder], T], limit_s: float = ASKED_S
    ) -> T:
        """What ``work`` finds of one run. Raises its errors, and SilentRunError, also of a slow ledger."""
        if run.name not in self._silent:
            read = await self.threads.one(kind, run, work, limit_s)
            if read is not None and not (read.error and ran_out_of_time(read.error)):
                return read.get()
        raise SilentRunError(run.name)

    async def find(self, name: str, kind: str, work: Callable[[RunFolder], T]) -> T | None:
        """As :meth:`ask`, of the run of that name; None if there is none."""
        run = (await self.look()).get(name)
        return None if run is None else await self.ask(run, kind, work)

    async def _look(self) -> None:
        self._folders |= _told(await self.threads.each("places", self.places, folders_at))
        folders = [each for place in self.places for each in self._folders.get(place, [])]
        answered = await self.threads.each("look", list(dict.fromkeys(folders)), _look_at)
        looked = _told(answered)
        before, self._found = self._found, {}
        for folder in folders:
            # One that has never answered may be a run: it is shown as such.
            unknown = before.get(folder) or (None if folder in answered else (folder, ""))
            self._found[folder] = looked.get(folder, unknown)
        self._runs = named(each[0] for each in self._found.values() if each is not None)
        by_path = {each[0]: each[1] for each in self._found.values() if each is not None}
        silent = {folder for folder in folders if folder not in looked}
        silent_paths = {each[0] for folder in silent if (each := self._found[folder]) is not None}
        self._signatures = {name: by_path[run.path] for name, run in self._runs.items()}
        self._silent = frozenset(name for name, run in self._runs.items() if run.path in silent_paths)


def _told(read: Mapping[K, Read[T]]) -> dict[K, T]:
    """What was found; an error of the disk says nothing of what is there. Raises all other errors."""
    return {item: each.get() for item, each in read.items() if not isinstance(each.error, OSError)}


def _look_at(folder: Path) -> tuple[Path, str] | None:
    path = run_at(folder)
    return None if path is None else (path, RunFolder("", path).signature())
