"""Whether a run learns, and learns what was meant, from its curves. Pure.

A trend is a least-squares line; its strength is the slope in standard errors (Student's t). Rewards of
neighbouring iterations are of different prompts, so their noise is taken as independent.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

TREND_OF = 30
"""Newest iterations that a trend is taken over; with fewer there is none."""
CLEAR = 3.0
"""Standard errors from which a trend is taken for one: by chance, one in 200 curves without any."""
HELD_OUT_WORSE = 3.0
"""Standard errors by which the newest validation must be below the best."""


@dataclass(frozen=True, slots=True)
class Trend:
    """A line through values at 0, 1, 2, ...

    Attributes:
        begin, end: of the line.
        strength: the slope in standard errors; infinite without noise, 0 for a constant.
    """

    begin: float
    end: float
    strength: float


@dataclass(frozen=True, slots=True)
class Validated:
    """One evaluation on held-out prompts: the score that the run is judged by."""

    iteration: int
    score: float
    stderr: float


def trend(values: Sequence[float]) -> Trend | None:
    """Of the newest :data:`TREND_OF` values; None if there are fewer."""
    newest = values[-TREND_OF:]
    count = len(newest)
    if count < TREND_OF:
        return None
    middle, mean = (count - 1) / 2, math.fsum(newest) / count
    spread = math.fsum((at - middle) ** 2 for at in range(count))
    slope = math.fsum((at - middle) * (value - mean) for at, value in enumerate(newest)) / spread
    rest = math.fsum((value - mean - slope * (at - middle)) ** 2 for at, value in enumerate(newest))
    error = math.sqrt(rest / (count - 2) / spread)
    # What rounding leaves of a constant is no trend.
    if abs(slope) * count <= 1e-9 * max(abs(mean), 1e-9):
        strength = 0.0
    else:
        strength = math.copysign(math.inf, slope) if error == 0 else slope / error
    return Trend(mean - slope * middle, mean + slope * middle, strength)


def falling_rewards(total: Sequence[float], parts: Mapping[str, Sequence[float]]) -> list[str]:
    """Rewards that clearly fall while their sum clearly rises."""
    whole = trend(total)
    if whole is None or whole.strength < CLEAR:
        return []
    found = {name: trend(values) for name, values in parts.items()}
    return [name for name, each in found.items() if each is not None and each.strength <= -CLEAR]


def is_worse_than_best(validations: Sequence[Validated]) -> Validated | None:
    """The best evaluation, if the newest is clearly below it."""
    known = [each for each in validations if math.isfinite(each.score)]
    if len(known) < 2:
        return None
    best, newest = max(known, key=lambda each: each.score), known[-1]
    error = math.hypot(*(each.stderr if math.isfinite(each.stderr) else 0.0 for each in (best, newest)))
    return best if error > 0 and best.score - newest.score > HELD_OUT_WORSE * error else None
