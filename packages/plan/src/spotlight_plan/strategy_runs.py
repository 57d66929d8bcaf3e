"""One strategy from several starts of the trace: percentiles and ranges of its figures. Pure.

A percentile interpolates linearly between the ordered starts. A start that does not have a figure (it did not
finish, or too few previews were made) counts as infinitely slow and dear, so that percentiles never rest only
on the starts that went well.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from spotlight_plan.compare import SimulationOutcome, SimulationTask
from spotlight_plan.scenarios.prepared_scenario import Prepared, at_starts


@dataclass(frozen=True, slots=True)
class FigureRange:
    """A figure over all starts; NaN where a start without it decides."""

    least: float
    p50: float
    p90: float
    most: float


def known_or_inf(value: float) -> float:
    """A figure to be compared: infinite where there is none."""
    return math.inf if math.isnan(value) else value


def range_of(values: Iterable[float]) -> FigureRange:
    """The range of one or more values, of which NaN is the largest."""
    ordered = sorted(map(known_or_inf, values))

    def at(share: float) -> float:
        place = share * (len(ordered) - 1)
        below, above = ordered[math.floor(place)], ordered[math.ceil(place)]
        value = min(below + (place % 1) * (above - below), above) if below < above else below
        return value if math.isfinite(value) else math.nan

    return FigureRange(at(0), at(0.5), at(0.9), at(1))


@dataclass(frozen=True, slots=True)
class StrategyRuns:
    """A strategy's metrics from every start, the scenario's own first."""

    outcomes: tuple[SimulationOutcome, ...]

    @property
    def first(self) -> SimulationOutcome:
        """From the scenario's own start."""
        return self.outcomes[0]

    @property
    def strategy(self) -> str:
        """The strategy's name."""
        return self.first.strategy

    def figure(self, of: Callable[[SimulationOutcome], float]) -> FigureRange:
        """A figure's range."""
        return range_of(map(of, self.outcomes))

    @property
    def target_h(self) -> FigureRange:
        """Hours to target, with the stated iterations."""
        return self.figure(lambda one: one.target_h)

    @property
    def target_usd(self) -> FigureRange:
        """Dollars to target, with the stated iterations."""
        return self.figure(lambda one: one.target_usd)

    @property
    def ends_h(self) -> tuple[float, float]:
        """Least and most hours to target, over all starts and the interval of the iterations."""
        return self._ends(lambda one, iterations: one.hours_after(iterations))

    @property
    def ends_usd(self) -> tuple[float, float]:
        """Least and most dollars to target, likewise."""
        return self._ends(lambda one, iterations: one.usd_after(iterations))

    @property
    def iterations_to_target(self) -> FigureRange:
        """Iterations to target; least and most are of their interval."""
        middle = self.figure(lambda one: one.target.iterations if one.target else math.nan)
        least, most = self._ends(lambda one, iterations: iterations)
        return FigureRange(least, middle.p50, middle.p90, most)

    def _ends(self, of: Callable[[SimulationOutcome, int], float]) -> tuple[float, float]:
        def end(one: SimulationOutcome, number: int) -> float:
            return of(one, one.target.ends[number]) if one.target else math.nan

        return self.figure(lambda one: end(one, 0)).least, self.figure(lambda one: end(one, 1)).most


def tasks_from_starts(
    prepared: Prepared, strategies: Sequence[str], *, timelines: bool = False
) -> list[SimulationTask]:
    """Simulations of each strategy from all ``run.starts`` starts; timelines only from the first."""
    starts = at_starts(prepared)
    return [
        SimulationTask(start, strategy, timelines and not turn)
        for strategy in strategies
        for turn, start in enumerate(starts)
    ]


def grouped(outcomes: Sequence[SimulationOutcome], starts: int) -> tuple[StrategyRuns, ...]:
    """Outcomes of :func:`tasks_from_starts`, by strategy."""
    return tuple(
        StrategyRuns(tuple(outcomes[first : first + starts])) for first in range(0, len(outcomes), starts)
    )
