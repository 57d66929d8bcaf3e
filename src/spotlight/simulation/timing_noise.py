"""Noise on durations: log-normal factors, a stream of draws for each subject.

Invariant: a subject's draws depend on the scenario's seed and the subject's name only, so what one subject
does more often or at other times changes no other's.
"""

from __future__ import annotations

import math
import random
from statistics import NormalDist

_NORMAL = NormalDist()
_BELOW_ONE = math.nextafter(1.0, 0.0)


class Noise:
    """Factors for one subject.

    Args:
        deviation: standard deviation of a factor's logarithm; 0 makes all factors 1.
    """

    def __init__(self, seed: int, subject: str, deviation: float) -> None:
        self._random = random.Random(f"{seed} {subject}")
        self._deviation = deviation

    def slowest(self, count: int) -> float:
        """The largest factor of ``count`` that work together: one draw, whatever their number.

        The largest of n uniform draws is distributed as the n-th root of one (order statistics).
        """
        if not self._deviation:
            return 1.0
        uniform = max(self._random.random(), 1e-300) ** (1 / count)
        return math.exp(self._deviation * _NORMAL.inv_cdf(min(uniform, _BELOW_ONE)))
