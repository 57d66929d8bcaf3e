"""Forecast of a window's capacity, in worker-seconds as profiled:

    capacity = window_s * workers now * yield

The yield is the work recent windows delivered per worker-second at opening. It absorbs workers lost or
joined, weight pulls, regrouping, sequence parallelism and profiling error. Both factors are discounted means;
the cautious capacity lowers each by ``caution`` standard deviations.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from spotlight.config.sections.exploration import PreviewCostsConfig
from spotlight.scheduler.exploration.bandit import Arm
from spotlight.scheduler.exploration.decayed_mean import DecayedMean


@dataclass(frozen=True, slots=True)
class WindowSeen:
    """A finished window.

    Attributes:
        open_s: seconds from opening to end.
        busy_s: seconds until all previews were scored, at most ``open_s``.
        workers: number that could explore when it opened.
        scored: number of previews scored.
    """

    arm: Arm
    open_s: float
    busy_s: float
    workers: int
    scored: int


@dataclass(frozen=True, slots=True)
class Capacity:
    """Forecast capacity in worker-seconds and its factors; None: unknown."""

    expected_s: float | None
    cautious_s: float | None
    window_s: float | None
    window_deviation_s: float
    workers: int
    yields: float
    yield_deviation: float

    def as_metrics(self) -> dict[str, object]:
        """JSON-able, for the explanation of a decision."""
        return {
            "expected_s": self.expected_s,
            "cautious_s": self.cautious_s,
            "window_s": self.window_s,
            "window_deviation_s": self.window_deviation_s,
            "workers": self.workers,
            "yield": self.yields,
            "yield_deviation": self.yield_deviation,
        }


@dataclass(slots=True)
class Forecast:
    """See the module's docstring.

    Attributes:
        caution: standard deviations by which each factor is lowered.
        discount: weight of an observation decays by this factor per later one.
    """

    costs: PreviewCostsConfig
    caution: float = 1.0
    discount: float = 0.9
    _window_s: DecayedMean = field(default_factory=DecayedMean)
    _yield: DecayedMean = field(default_factory=DecayedMean)

    def capacity(self, workers: int) -> Capacity:
        """Capacity of a window that opens now."""
        window_s = self._window_s.mean if self._window_s.weight else self.costs.window_s
        yields = 1.0 if self._yield.mean is None else self._yield.mean
        slack_s, loose = self._window_s.deviation, self._yield.deviation
        expected = cautious = None
        if window_s is not None:
            expected = workers * yields * max(0.0, window_s - self.costs.reward_s)
            surely_s = max(0.0, window_s - self.caution * slack_s - self.costs.reward_s)
            cautious = workers * max(0.0, yields - self.caution * loose) * surely_s
        return Capacity(expected, cautious, window_s, slack_s, workers, yields, loose)

    def observe(self, seen: WindowSeen) -> None:
        """Update both factors from a finished window."""
        self._window_s.forget(self.discount)
        self._window_s.add(seen.open_s)
        available_s = seen.workers * max(0.0, seen.busy_s - self.costs.reward_s)
        if available_s > 0:
            self._yield.forget(self.discount)
            self._yield.add(self.costs.work_s(seen.arm.steps, seen.scored) / available_s)

    def snapshot(self) -> dict[str, object]:
        """JSON-able state."""
        return {"window_s": self._window_s.to_list(), "yield": self._yield.to_list()}

    def load(self, state: Mapping[str, object]) -> None:
        """Restore a snapshot."""
        self._window_s = DecayedMean.from_list(state.get("window_s"))
        self._yield = DecayedMean.from_list(state.get("yield"))
