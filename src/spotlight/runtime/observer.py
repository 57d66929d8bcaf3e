"""What a run tells whoever watches it. The command line draws it; tests listen to it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from spotlight.scheduler.types import Phase


class Observer(Protocol):
    """Receives a run's progress, in order, on the driver's thread. Must not raise."""

    def note(self, text: str) -> None:
        """Something a person should know (resumed from, a damaged checkpoint, a dropped sample)."""

    def work(self, phase: Phase, done: float, total: int) -> None:
        """``done`` of ``total`` units of the current phase: samples, or the micro-batches of an iteration.

        A sample half denoised counts half.
        """

    def billed(self, cost_usd: float) -> None:
        """The run has cost so much until now, all attempts together: told where nodes come and go."""

    def evaluated(self, iteration: int, row: Mapping[str, float]) -> None:
        """A validation is written; ``row`` holds its scores and their standard errors."""

    def iterated(self, iteration: int, row: Mapping[str, float]) -> None:
        """An iteration is trained; ``row`` holds what went into ``metrics.jsonl``."""


class Silent:
    """An observer that watches nothing."""

    def note(self, text: str) -> None:
        """Ignore."""

    def work(self, phase: Phase, done: float, total: int) -> None:
        """Ignore."""

    def billed(self, cost_usd: float) -> None:
        """Ignore."""

    def evaluated(self, iteration: int, row: Mapping[str, float]) -> None:
        """Ignore."""

    def iterated(self, iteration: int, row: Mapping[str, float]) -> None:
        """Ignore."""
