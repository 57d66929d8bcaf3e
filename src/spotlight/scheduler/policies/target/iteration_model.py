"""How long an iteration takes with so many workers. Pure.

``t(workers) = fixed_s + work_s / workers``: what no worker shortens (training, publishing, waiting for the
last rollout) and worker-seconds of rolling out. A run fits both to its own iterations
(:class:`IterationModel`); ``spotlight plan`` computes them from a cost profile.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations

WINDOW = 20
"""Newest iterations that count: a run changes (evaluations, lengths of rollouts, other GPUs)."""
MEASURED_MIN = 3
"""Fewer say nothing about the rest."""
_SPREAD_MIN = 0.03
_TAIL = 1.645
"""Ranges hold nine of ten outcomes: 5 % on either side of a normal distribution."""
_UNTRIED = 0.25
"""Relative error of ``work_s`` that ranges allow for at sizes that were not measured: what rollouts took
says neither how evenly they divide among more workers nor how other nodes compare.
"""
_DRIFT = 0.04
"""Relative error that no number of iterations averages out: the market changes, evaluations are rare."""
_END = 0.5
"""Iterations that the end of a run may take besides: its evaluation, the export."""


@dataclass(frozen=True, slots=True)
class MeasuredIteration:
    """What was measured of an iteration.

    Attributes:
        seconds: from the previous publication to its own.
        workers: mean number that could roll out.
        work_s: worker-seconds of rolling out.
        spot_nodes: mean number that worked.
        asked: spot nodes asked for; None if that changed, or had not taken effect yet.
    """

    seconds: float
    workers: float
    work_s: float
    spot_nodes: float
    asked: int | None


@dataclass(frozen=True, slots=True)
class AmdahlTime:
    """See the module's docstring."""

    fixed_s: float
    work_s: float

    def seconds(self, workers: float) -> float:
        """Expected seconds of an iteration; infinite without workers."""
        return self.fixed_s + self.work_s / workers if workers > 0 else math.inf


@dataclass(frozen=True, slots=True)
class IterationModel(AmdahlTime):
    """A fit.

    Attributes:
        spread: relative standard deviation of measured seconds around it.
        measured: iterations behind it.
        tried: mean of their 1 / workers.
    """

    spread: float
    measured: int
    tried: float

    @classmethod
    def fitted(cls, iterations: Sequence[MeasuredIteration]) -> IterationModel | None:
        """Fit the newest of them; None: they are too few.

        ``work_s`` is the weighted median of the slopes between any two iterations (Theil and Sen: robust to a
        third of outliers), weighted by how far apart they are in 1 / workers, and of the work that was
        measured, as far apart as the mean and no iteration. So measured work decides while all iterations had
        equally many workers, and hardly when they did not. ``fixed_s`` is the mean of what remains: it counts
        evaluations and losses at the rate at which they occurred.
        """
        known = [each for each in iterations[-WINDOW:] if each.workers > 0 and each.seconds > 0]
        if len(known) < MEASURED_MIN:
            return None
        shares = [1 / each.workers for each in known]
        tried = statistics.fmean(shares)
        seconds = [each.seconds for each in known]
        slopes = [(statistics.fmean(each.work_s for each in known), tried)]
        for one, other in combinations(range(len(known)), 2):
            if (apart := shares[one] - shares[other]) != 0:
                slopes.append(((seconds[one] - seconds[other]) / apart, abs(apart)))
        mean_s = statistics.fmean(seconds)
        work_s = min(max(0.0, _weighted_median(slopes)), mean_s / tried)
        fixed_s = max(0.0, mean_s - work_s * tried)
        errors = [each / (fixed_s + work_s * share) - 1 for each, share in zip(seconds, shares, strict=True)]
        # Not `statistics.pstdev`, whose exact fractions take most of a fit.
        spread = math.dist(errors, [statistics.fmean(errors)] * len(errors)) / math.sqrt(len(errors))
        return cls(fixed_s, work_s, max(_SPREAD_MIN, spread), len(known), tried)

    def spread_of(self, iterations: float, workers: float) -> float:
        """Relative half-width of the range of the mean of so many iterations to come."""
        if iterations <= 0 or workers <= 0:
            return 0.0
        chance = _TAIL * self.spread * math.sqrt(1 / iterations + 1 / self.measured)
        untried = _UNTRIED * self.work_s * abs(1 / workers - self.tried) / self.seconds(workers)
        return math.hypot(chance, untried, _DRIFT, _END / iterations)


def _weighted_median(values: Sequence[tuple[float, float]]) -> float:
    half, passed = sum(weight for _, weight in values) / 2, 0.0
    ordered = sorted(values)
    for value, weight in ordered:
        passed += weight
        if passed >= half:
            return value
    return ordered[-1][0]
