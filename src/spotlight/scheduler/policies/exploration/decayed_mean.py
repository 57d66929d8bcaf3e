"""Exponentially decayed statistics of a drifting quantity."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from pydantic import FiniteFloat, TypeAdapter

from spotlight_rewards.base.typed_json import typed

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
        self.weight *= discount
        self.total *= discount
        self.squares *= discount
        if self.weight < _FORGOTTEN:
            self.weight = self.total = self.squares = 0.0

    def add(self, value: float) -> None:
        """Add an observation. Raises ValueError unless it is finite."""
        if not math.isfinite(value):
            raise ValueError(f"observed {value}; expected a finite number")
        self.weight += 1.0
        self.total += value
        self.squares += value * value

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
        """JSON-able, for :meth:`read`."""
        return [self.weight, self.total, self.squares]

    @classmethod
    def read(cls, state: Mapping[str, object], key: str) -> DecayedMean:
        """Inverse of :meth:`to_list`, under a key. Raises ValueError for anything else."""
        return cls(*typed(_SUMS, state.get(key), key))


_SUMS = TypeAdapter(tuple[FiniteFloat, FiniteFloat, FiniteFloat])
