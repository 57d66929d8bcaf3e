"""Numbers on their way to the page: finite or null, and never more points than a screen has."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal, TypeAlias

Json: TypeAlias = dict[str, object]
Axis: TypeAlias = Literal["iteration", "samples", "hours", "usd"]
"""What curves stand over."""


def finite(value: object) -> float | None:
    """The number; None if it is none, or not finite: JSON has no such numbers."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        number = float(value)
    except OverflowError:  # a whole number of JSON or YAML has no end
        return None
    return number if math.isfinite(number) else None


def thinned(values: Sequence[float], points_max: int) -> list[int]:
    """Which of ``values`` to draw: first and last, and the least and the greatest of each equal stretch.

    So a spike is seen however long the run is. Values that are not finite count as least.
    """
    count = len(values)
    if count <= points_max:
        return list(range(count))
    stretches = max(1, (points_max - 2) // 2)
    kept = {0, count - 1}
    for stretch in range(stretches):
        indices = range(stretch * count // stretches, (stretch + 1) * count // stretches)
        known = [index for index in indices if math.isfinite(values[index])]
        if known:
            kept.add(min(known, key=values.__getitem__))
            kept.add(max(known, key=values.__getitem__))
        else:
            kept.add(indices[0])  # a gap stays a gap
    return sorted(kept)
