"""Nodes that a run has started and not ended yet, noted in its directory: a killed head forgets none."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from spotlight_rewards.base.file_errors import StoreError
from spotlight_rewards.base.files import write_atomically


@dataclass(frozen=True, slots=True)
class NodeNotes:
    """The names of such nodes in a file."""

    path: Path

    def read(self) -> list[str]:
        """The names that were written last. Raises StoreError for anything else."""
        try:
            names: object = json.loads(self.path.read_text(encoding="utf-8")) if self.path.exists() else []
        except (OSError, ValueError, RecursionError) as error:
            names = error
        if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
            raise StoreError(
                f"{self.path}: found {names!r:.80}; expected a list of the nodes that this run has started. "
                "End those that are there by hand, and delete the file."
            )
        return names

    def write(self, names: Iterable[str]) -> None:
        """Replace the names, atomically. Raises OSError."""
        write_atomically(self.path, json.dumps([*names]).encode())

    def report(self, setting: str, note: Callable[[str], None]) -> None:
        """Report nodes that nobody will end, where ``setting``, which an earlier attempt had, is gone."""
        if names := self.read():
            note(
                f"{self.path}: found {', '.join(names)}, nodes of an attempt that was killed; expected none "
                f"without {setting}. Set it again, which ends them with the run, or end them by hand and "
                "delete the file."
            )
