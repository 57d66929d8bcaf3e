"""Errors that users see; of a configuration they name key, value found, value expected and remedy."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass


class UserError(Exception):
    """What the user can mend: commands print it without a traceback. Names what was found and the remedy."""


@dataclass(frozen=True, slots=True)
class Problem:
    """One thing wrong with a configuration."""

    key: str
    found: str
    expected: str
    remedy: str

    def __str__(self) -> str:
        return f"{self.key}: found {self.found}; expected {self.expected}. {self.remedy}"


def did_you_mean(found: str, known: Iterable[str], otherwise: str) -> str:
    """The remedy for an unknown name: the nearest known one, or ``otherwise``."""
    close = difflib.get_close_matches(found, list(known), n=1)
    return f"Did you mean {close[0]!r}?" if close else otherwise


class ConfigError(UserError, ValueError):
    """A configuration with one or more ``problems``."""

    def __init__(self, source: str, problems: Sequence[Problem]) -> None:
        self.source = source
        self.problems = tuple(problems)
        super().__init__("\n".join([f"Cannot use {source}:", *(f"  - {problem}" for problem in problems)]))

    def __reduce__(self) -> tuple[type[ConfigError], tuple[str, tuple[Problem, ...]]]:
        return ConfigError, (self.source, self.problems)
