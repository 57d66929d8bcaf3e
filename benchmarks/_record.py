"""A JSON file of measurements that is added to, so that an interrupted measurement goes on where it was."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Protocol

import torch

from benchmarks._measure import machine

Tree = dict[str, Any]
"""Part of the file."""


class Settings(Protocol):
    """What is measured: all that the results depend on."""

    def as_json(self) -> Tree:
        """As plain values."""


class Record:
    """The file: settings, and whatever is measured so far by kind and name.

    Raises SystemExit if the file was measured with other settings.
    """

    def __init__(
        self, path: Path, settings: Settings, kinds: Sequence[str] = ("pools", "curves", "simulated")
    ) -> None:
        self.path = path
        self.tree: Tree = {"settings": settings.as_json(), **{kind: {} for kind in kinds}}
        if path.exists():
            found = json.loads(path.read_text(encoding="utf-8"))
            differ = [key for key, value in self.tree["settings"].items() if found["settings"][key] != value]
            if differ:
                raise SystemExit(
                    f"{path} was measured with other settings ({', '.join(differ)}): name another --json file"
                )
            self.tree |= found

    def once(self, kind: str, name: str, make: Callable[[], Tree]) -> Tree:
        """What the file has under ``name``, made and written if there is nothing.

        ``cpu_s`` is what this process took, unless ``make`` says it."""
        kept: dict[str, Tree] = self.tree[kind]
        if name not in kept:
            started_s = time.process_time()
            made = make()
            kept[name] = {"cpu_s": time.process_time() - started_s} | made
            self.write()
        return kept[name]

    def write(self) -> None:
        """Whole or not at all."""
        self.tree["utc"] = datetime.now(UTC).isoformat(timespec="seconds")
        self.tree["machine"] = machine(torch.device("cpu"))
        self.path.parent.mkdir(parents=True, exist_ok=True)
        beside = self.path.with_suffix(".writing")
        beside.write_text(json.dumps(self.tree, indent=1) + "\n", encoding="utf-8")
        beside.replace(self.path)
