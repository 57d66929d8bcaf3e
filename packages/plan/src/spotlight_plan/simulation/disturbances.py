"""Random disturbances: noise on durations, and message faults between controller and workers.

Invariant: noise depends only on the scenario's seed and the subject's name, so subjects do not affect each
other's.
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass, field
from statistics import NormalDist


@dataclass(slots=True)
class Network:
    """Injects message faults.

    Attributes:
        lost: share of messages lost.
        doubled: share delivered twice.
        late_s: maximum delay per message; delayed messages may be overtaken.
    """

    random: random.Random
    lost: float = 0.0
    doubled: float = 0.0
    late_s: float = 0.0
    counts: dict[str, int] = field(default_factory=lambda: {"lost": 0, "doubled": 0, "late": 0})

    @property
    def faultless(self) -> bool:
        """Whether every message arrives exactly once, without delay."""
        return not (self.lost or self.doubled or self.late_s)

    def delays(self) -> list[float]:
        """Delay of each copy of a message; empty if lost."""
        if self.random.random() < self.lost:
            self.counts["lost"] += 1
            return []
        copies = 1
        if self.random.random() < self.doubled:
            self.counts["doubled"] += 1
            copies = 2
        self.counts["late"] += self.late_s > 0
        return [self.random.random() * self.late_s for _ in range(copies)]


_NORMAL = NormalDist()
_BELOW_ONE = math.nextafter(1.0, 0.0)


class TimingNoise:
    """Noise factors of one subject.

    Args:
        deviation: standard deviation of a factor's logarithm; 0 makes all factors 1.
    """

    def __init__(self, seed: int, subject: str, deviation: float) -> None:
        self._random = random.Random(f"{seed} {subject}")
        self._deviation = deviation

    def slowest(self, count: int) -> float:
        """Largest of ``count`` factors, from a single draw.

        The largest of n uniform draws is distributed as the n-th root of one (order statistics).
        """
        if not self._deviation:
            return 1.0
        # inv_cdf needs a value strictly between 0 and 1.
        uniform = max(self._random.random(), 1e-300) ** (1 / count)
        return math.exp(self._deviation * _NORMAL.inv_cdf(min(uniform, _BELOW_ONE)))
