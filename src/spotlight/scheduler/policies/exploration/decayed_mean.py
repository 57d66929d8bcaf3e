"""Exponentially decayed statistics of a drifting quantity."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

_FORGOTTEN = 1e-6
"""Evidence below this weight is reset to none."""


@dataclass(slots=True)
class DecayedMean:
    """Observations that weigh ``discount ** n`` after n calls of :meth:`forget`.

    Attributes:
        weight: sum of weights; the effective memory is 1 / (1 - discount) calls.
        total, squares: weighted sums of the observations and of their squares.
    """

    weight: float = 0.0
    total: float = 0.0
    squares: float = 0.0

    def forget(self, discount: float) -> None:
        """Multiply all weights by ``discount``."""
        self.weight, self.total, self.squares = (
            discount * part for part in (self.weight, self.total, self.squares)
        )
        if self.weight < _FORGOTTEN:
            self.weight = self.total = self.squares = 0.0

    def add(self, value: float, weight: float = 1.0) -> None:
        """Add an observation. Raises ValueError unless it is finite."""
        if not math.isfinite(value):
            raise ValueError(f"observed {value}; expected a finite number")
        self.weight += weight
        self.total += weight * value
        self.squares += weight * value * value

    @property
    def mean(self) -> float | None:
        """None without evidence."""
        return self.total / self.weight if self.weight else None

    @property
    def deviation(self) -> float:
        """Standard deviation; 0 without evidence."""
        if not self.weight:
            return 0.0
        mean = self.total / self.weight
        return math.sqrt(max(0.0, self.squares / self.weight - mean * mean))

    def to_list(self) -> list[float]:
        """JSON-able, for :meth:`from_list`."""
        return [self.weight, self.total, self.squares]

    @classmethod
    def from_list(cls, value: object) -> DecayedMean:
        """Inverse of :meth:`to_list`. Raises ValueError for anything else."""
        if not (
            isinstance(value, list)
            and len(value) == 3
            and all(isinstance(part, int | float) and math.isfinite(part) for part in value)
        ):
            raise ValueError(f"{value!r} is no discounted sum; expected three finite numbers")
        return cls(*(float(part) for part in value))


def section(state: Mapping[str, object], key: str) -> Mapping[str, object]:
    """A mapping within a snapshot. Raises ValueError if it is not one."""
    value = state.get(key)
    if not isinstance(value, Mapping):
        raise ValueError(f"planner snapshot[{key!r}] is {value!r}, expected a mapping")
    return value
