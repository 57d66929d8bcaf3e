"""Under which licence the weights of published models are, and whether it allows commercial use.

``licences.json`` is the table: what was read, where and when. It is no legal advice, and a licence
may have changed since.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

_TABLE = Path(__file__).with_suffix(".json")


@dataclass(frozen=True, slots=True)
class Licence:
    """A licence of weights, as it was read.

    Attributes:
        commercial: whether commercial use is allowed: yes, no, or within which limits.
        read: the day, ISO 8601.
        source: where; of what comes with Spotlight, itself.
    """

    name: str
    commercial: str
    read: str
    source: str

    def __str__(self) -> str:
        return f"{self.name}; commercial use: {self.commercial}"


def licence_of(model: str) -> Licence | None:
    """Of a published model by its hub id, or of a built-in one by its name; None: it was not read."""
    return _read().get(model)


def licence_line(path: str) -> tuple[str, str]:
    """The licence of ``model.path`` and where it was read, for people."""
    if (found := licence_of(path)) is None:
        return "not read", f"ask the publisher of {path}"
    return str(found), f"read on {found.read}: {found.source}"


@cache
def _read() -> Mapping[str, Licence]:
    return {
        model: Licence(each["name"], each["commercial"], each["read"], source)
        for each in json.loads(_TABLE.read_text(encoding="utf-8"))
        for source, models in each["sources"].items()
        for model in models
    }
