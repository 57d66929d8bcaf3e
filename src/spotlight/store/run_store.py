"""Runs that live elsewhere than in a folder: ``runs_dir`` is an address such as ``s3://bucket/prefix``.

An installed package keeps them (:data:`spotlight.registry.RUN_STORES`). A run works in a folder of this
machine as always; the package brings that here and away.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from enum import Enum
from pathlib import Path
from typing import NamedTuple, Protocol, TypeAlias

from spotlight.registry import RUN_STORES
from spotlight.store.run_directory import RunPaths
from spotlight_rewards.base.file_errors import StoreError
from spotlight_rewards.base.files import default_cache

_ADDRESS = re.compile(r"([a-z][a-z0-9]+):/+(.+)")
Tell: TypeAlias = Callable[[str], object]


class Wanted(Enum):
    """What of a run is read: all but checkpoints, pictures and exports; these and the pictures; these and the
    exported LoRA; these and the newest checkpoint; all."""

    LIGHT = "light"
    PICTURES = "pictures"
    LORA = "lora"
    CHECKPOINT = "checkpoint"
    ALL = "all"


class RunStore(Protocol):
    """Keeps runs below addresses. Methods raise :class:`StoreError`."""

    def work(
        self, address: str, name: str, cache: Path, note: Callable[[str], None], cluster: str = ""
    ) -> AbstractContextManager[Path]:
        """A folder of this machine that is ``runs_dir`` within the block, with what is kept of the run.

        What the run writes there is brought away behind it, and all of it when the block is left. Should
        another process take the run over, this one gets a SIGTERM, and leaving the block is a StoreError.

        Args:
            cluster: address of the Ray cluster to which others find the way from here; empty: of none.
        """

    def read(self, address: str, name: str, cache: Path, wanted: Wanted) -> Path:
        """A copy of a run's directory, as new as the address has it; no folder, if it has no such run."""

    def read_all(self, address: str, cache: Path, wanted: Wanted, tell: Tell) -> Path | None:
        """The folder with copies of all runs that are there, and of no other; None: there are none.

        Args:
            tell: is told why one cannot be read; of all, it is raised.
        """

    def names(self, address: str) -> list[str]:
        """The runs that are there."""

    def costs(self, checkpoint_bytes: float, kept_bytes: float) -> Iterator[tuple[str, str, str]]:
        """For a plan: what, how much, and why."""


class StoredRuns(NamedTuple):
    """An address of runs, and what keeps them."""

    store: RunStore
    address: str


def stored_runs(place: Path) -> StoredRuns | None:
    """What keeps the runs at a place; None: it is a folder.

    Raises:
        StoreError: no installed package keeps runs at such an address.
        RegistryError: the one that does cannot be used.
    """
    if (match := _ADDRESS.fullmatch(str(place))) is None:
        return None
    scheme, rest = match.groups()
    if scheme not in RUN_STORES:
        known = ", ".join(f"{each}://" for each in RUN_STORES) or "none, without the package spotlight-bucket"
        raise StoreError(
            f"runs_dir is {scheme}://{rest}; expected a folder, or an address of a kind that an installed "
            f"package keeps: {known}. pip install 'spotlight-rl[bucket]', or name a folder."
        )
    return StoredRuns(RUN_STORES.load(scheme), f"{scheme}://{rest}")


def stored_run(text: str, wanted: Wanted) -> Path | None:
    """A copy of the run at an address; None: the text is none.

    Raises:
        StoreError: no such run is there; what keeps it does not answer.
        RegistryError: see :func:`stored_runs`.
    """
    name = Path(text).name
    if (found := stored_runs(Path(text).parent)) is None:
        return None
    run = found.store.read(found.address, name, default_cache(), wanted)
    if not RunPaths(run).config.is_file():
        # The name itself may be held by a head that has written nothing.
        there = ", ".join(sorted({*found.store.names(found.address)} - {name})) or "none"
        raise StoreError(f"{text}: no run {name!r} is in {found.address}; the runs there: {there}.")
    return run


def local_folder(place: Path, tell: Tell, wanted: Wanted = Wanted.LIGHT) -> Path:
    """The folder at a place; of an address, one with copies of the runs there, or of the run that it is.

    Args:
        tell: see :meth:`RunStore.read_all`.

    Raises as :func:`stored_run`.
    """
    if (found := stored_runs(place)) is None:
        return place
    cache = default_cache()
    if (above := stored_runs(place.parent)) is not None:
        run = above.store.read(above.address, place.name, cache, wanted)
        if RunPaths(run).config.is_file():
            return run
    if (folder := found.store.read_all(found.address, cache, wanted, tell)) is None:
        raise StoreError(f"{found.address}: no runs are there. Start one: spotlight train runs_dir=ADDRESS.")
    return folder
