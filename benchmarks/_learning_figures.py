"""From learning curves to how much less they cost: pure functions of plain values.

How long a score takes is read off the mean curve over run seeds (``_exploration_curves``), on any axis that
iterations have: samples, CPU seconds, simulated seconds and dollars. A gain is the baseline's cost over a
case's. Intervals are of resampled run seeds, the same for both; of few seeds they are too narrow (of five, by
a tenth at least). Since several cases are compared with one baseline, each gain has a second interval that
holds for all of them at once (Bonferroni).
"""

from __future__ import annotations

import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from benchmarks._exploration_curves import Curve, iterations_to, mean_curve, seconds_at
from benchmarks._exploration_figures import finite
from benchmarks._record import Tree

_LEVEL = 0.9


@dataclass(frozen=True, slots=True)
class LearningRun:
    """One run.

    Attributes:
        scores: held-out ones by iteration.
        spent: by axis, what is spent at the end of each iteration.
    """

    scores: Curve
    spent: Mapping[str, Sequence[float]]


Runs = Mapping[int, LearningRun]
"""By run seed."""


def target_of(target: float | None, baseline: Sequence[LearningRun]) -> float:
    """A score to reach; None: the end of the baseline's mean curve."""
    if target is not None:
        return target
    curve = mean_curve([run.scores for run in baseline])
    return curve[max(curve)]


def costs_of(target: float, runs: Sequence[LearningRun]) -> dict[str, float]:
    """By axis, what the mean run has spent when it reaches the target for good; inf: it ends below."""
    iterations = iterations_to(target, mean_curve([run.scores for run in runs]))
    found = {}
    for axis in runs[0].spent:
        mean = [sum(values) / len(runs) for values in zip(*(run.spent[axis] for run in runs), strict=True)]
        at = None if iterations is None else seconds_at(iterations, mean)
        found[axis] = math.inf if at is None else at
    return found


def ratio(baseline: float, case: float) -> float | None:
    """How many times less the case costs; None: neither reaches the target, or both have it at the start."""
    if math.isinf(baseline) and math.isinf(case):
        return None
    if case == 0.0:
        return None if baseline == 0.0 else math.inf
    return 0.0 if math.isinf(case) else baseline / case


def gains(
    target: float | None, baseline: Runs, case: Runs, compared: int, resamples: int = 2000
) -> dict[str, Tree]:
    """By axis, the ratio of costs to a target, with its intervals.

    Args:
        target: None: where the baseline ends, in each resample its own.
        compared: cases that the simultaneous interval holds for.

    Returns:
        For each axis ``cost``, what the case takes; ``ratio``; ``low`` and ``high`` of 90 %, ``low_all`` and
        ``high_all`` of 90 % for all cases at once; and ``undecided``, the share of resamples in which neither
        reaches the target. Null: not reached (of a high end also: the baseline does not reach it).
    """
    seeds = sorted(set(baseline) & set(case))

    def ratios(drawn: Sequence[int]) -> tuple[dict[str, float], dict[str, float | None]]:
        those = [[runs[seed] for seed in drawn] for runs in (baseline, case)]
        before, after = (costs_of(target_of(target, those[0]), each) for each in those)
        return after, {axis: ratio(before[axis], cost) for axis, cost in after.items()}

    draw = random.Random(0)
    resampled = [ratios(draw.choices(seeds, k=len(seeds)))[1] for _ in range(resamples)]
    costs, here = ratios(seeds)
    gains: dict[str, Tree] = {}
    for axis, value in here.items():
        known = [each for found in resampled if (each := found[axis]) is not None]
        gains[axis] = {"cost": finite(costs[axis]), "ratio": None if value is None else finite(value)}
        for ends, level in (("", _LEVEL), ("_all", 1 - (1 - _LEVEL) / max(1, compared))):
            low, high = quantiles(known, level)
            gains[axis] |= {f"low{ends}": finite(low), f"high{ends}": finite(high)}
        gains[axis]["undecided"] = 1 - len(known) / resamples
    return gains


def quantiles(values: Sequence[float], level: float) -> tuple[float, float]:
    """Ends of the central interval; NaN without values."""
    if not values:
        return math.nan, math.nan
    ordered, tail = sorted(values), (1 - level) / 2
    last = len(ordered) - 1
    return ordered[math.floor(tail * last)], ordered[math.ceil((1 - tail) * last)]


def best_rate(heights: Mapping[float, float]) -> float:
    """The learning rate whose curve is highest on the average; of equals, the lowest."""
    return min(heights, key=lambda rate: (-heights[rate], rate))
