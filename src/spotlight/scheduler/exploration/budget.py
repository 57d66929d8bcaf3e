"""What the next window can hold: how long training will take, and how much of the fleet will explore.

Work is counted in worker-seconds as profiled. A window delivers

    window_s * workers now * yield

of them, where the yield is what recent windows delivered for each worker there when they opened: it takes in
workers that were lost or joined meanwhile, time to pull weights and to re-form groups, sequence parallelism,
and a profile that is off. Both factors are discounted means with their deviations; the cautious figure takes
each ``caution`` deviations lower.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from spotlight.config.exploration import PreviewCostsConfig
from spotlight.scheduler.exploration.bandit import Arm
from spotlight.scheduler.exploration.decayed_mean import DecayedMean


@dataclass(frozen=True, slots=True)
class WindowSeen:
    """What a window turned out to be.

    Attributes:
        open_s: from its opening to its end.
        busy_s: until all its previews were scored; else ``open_s``.
        workers: that could explore when it opened.
        scored: previews that were scored, those that deepened pools included.
    """

    arm: Arm
    open_s: float
    busy_s: float
    workers: int
    scored: int


@dataclass(frozen=True, slots=True)
class Capacity:
    """Worker-seconds that a window can hold, and what that was made of; None: unknown."""

    expected_s: float | None
    cautious_s: float | None
    window_s: float | None
    window_deviation_s: float
    workers: int
    yields: float
    yield_deviation: float

    def as_metrics(self) -> dict[str, object]:
        """For the explanation of a decision."""
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
        caution: deviations by which each factor is taken lower.
        discount: of an observation, by every later one.
    """

    costs: PreviewCostsConfig
    caution: float = 1.0
    discount: float = 0.9
    _window_s: DecayedMean = field(default_factory=DecayedMean)
    _yield: DecayedMean = field(default_factory=DecayedMean)

    def capacity(self, workers: int) -> Capacity:
        """Of a window that opens now."""
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
        """A window has ended."""
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
        """Stand where a snapshot was taken."""
        self._window_s = DecayedMean.from_list(state.get("window_s"))
        self._yield = DecayedMean.from_list(state.get("yield"))
