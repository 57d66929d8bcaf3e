"""Curves of several runs, seeds of one configuration together. Pure.

runs ──► groups of one configuration ──► means along an axis, and when a score is reached
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

CONFIDENCE = 0.9
OF_A_SEED = frozenset({"name", "run_seed", "runs_dir", "cache_dir", "iterations"})
"""Keys in which seeds of one configuration differ; and how long a run was made."""
COLUMNS = 5
DRAWN = 60
"""Points of a drawn mean."""


@dataclass(frozen=True, slots=True)
class CurveChange:
    """What changed in a run's configuration from an iteration on, and where on the axis; None: unknown."""

    iteration: int
    x: float | None
    words: Sequence[str]


@dataclass(frozen=True, slots=True)
class RunCurve:
    """One run's curve.

    Attributes:
        settings: by dotted key, what differs from the defaults.
        x: ascending; y: as many.
    """

    run: str
    settings: Mapping[str, object]
    x: Sequence[float]
    y: Sequence[float]
    changes: Sequence[CurveChange] = ()

    def at(self, x: float) -> float | None:
        """The last value at or before ``x``."""
        place = bisect_right(self.x, x)
        return self.y[place - 1] if place else None

    def reaches(self, target: float) -> float | None:
        """Where the curve first is at ``target`` or above, linear between its points; None: never."""
        before: tuple[float, float] | None = None
        for x, y in zip(self.x, self.y, strict=True):
            if y >= target:
                if before is None or y == before[1]:
                    return x
                return before[0] + (x - before[0]) * (target - before[1]) / (y - before[1])
            before = x, y
        return None


@dataclass(frozen=True, slots=True)
class Interval:
    """A mean over seeds, and half the width of its interval; NaN with one seed.

    Attributes:
        seeds: that have a value.
    """

    mean: float
    half: float
    seeds: int


@dataclass(frozen=True, slots=True)
class Seeds:
    """Runs of one configuration, the only differences being of :data:`OF_A_SEED`."""

    runs: tuple[RunCurve, ...]

    @property
    def name(self) -> str:
        """Of the first run, and how many more there are."""
        more = len(self.runs) - 1
        return self.runs[0].run + (f" +{more}" if more else "")

    @property
    def repeated(self) -> list[str]:
        """Runs that have the ``run_seed`` of one before: a copy of it, or the same run again."""
        seeds = [run.settings.get("run_seed") for run in self.runs]
        return [run.run for at, run in enumerate(self.runs) if seeds[at] in seeds[:at]]

    def at(self, x: float) -> Interval | None:
        """None: a seed has not come so far, or has no value yet: a mean of the others would mislead."""
        found = [run.at(x) if run.x and run.x[-1] >= x else None for run in self.runs]
        return interval([y for y in found if y is not None]) if None not in found else None

    @property
    def end(self) -> Interval | None:
        """Over the last values."""
        return interval([run.y[-1] for run in self.runs if run.y])

    def reaches(self, target: float) -> Interval | None:
        """When its seeds reach ``target``; None where one of them never does."""
        found = [run.reaches(target) for run in self.runs]
        return interval([each for each in found if each is not None]) if None not in found else None

    def line(self, points: Sequence[float]) -> Iterator[tuple[float, Interval]]:
        """The mean at each of the points that all seeds have come to."""
        for x in points:
            if (found := self.at(x)) is not None:
                yield x, found


def grouped(runs: Sequence[RunCurve]) -> list[Seeds]:
    """Runs by configuration, in the order of the first of each."""
    found: defaultdict[str, list[RunCurve]] = defaultdict(list)
    for run in runs:
        own = {key: value for key, value in run.settings.items() if key not in OF_A_SEED}
        found[repr(sorted(own.items(), key=lambda item: item[0]))].append(run)
    return [Seeds(tuple(each)) for each in found.values()]


def differences(groups: Sequence[Seeds]) -> dict[str, list[object]]:
    """By dotted key, the value of each group, of keys whose values differ; None: the default."""
    settings = [group.runs[0].settings for group in groups]
    keys = sorted({key for each in settings for key in each} - OF_A_SEED)
    rows = {key: [each.get(key) for each in settings] for key in keys}
    return {key: values for key, values in rows.items() if any(value != values[0] for value in values)}


def points(groups: Sequence[Seeds], count: int = COLUMNS) -> list[float]:
    """Points of the axis, evenly up to where every run has come; of iterations, whole ones.

    Empty: a run has no curve.
    """
    last = min((run.x[-1] if run.x else 0.0 for group in groups for run in group.runs), default=0.0)
    if last <= 0:
        return []
    whole = all(float(x).is_integer() for group in groups for run in group.runs for x in run.x)
    found = [*(last * part / count for part in range(1, count)), last]  # which all have come to, to the bit
    return sorted({float(round(each)) for each in found} - {0.0}) if whole else found


def interval(values: Sequence[float]) -> Interval | None:
    """Mean and Student's interval for :data:`CONFIDENCE`; None without a value."""
    known = [value for value in values if math.isfinite(value)]
    if not known:
        return None
    mean, count = math.fsum(known) / len(known), len(known)
    if count == 1:
        return Interval(mean, math.nan, 1)
    from scipy.stats import t as student  # slow to import, and not needed by every dashboard

    variance = math.fsum((value - mean) ** 2 for value in known) / (count - 1)
    quantile = float(student.ppf((1 + CONFIDENCE) / 2, count - 1))
    return Interval(mean, quantile * math.sqrt(variance / count), count)
