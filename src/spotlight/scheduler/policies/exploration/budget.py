"""Time of previews. A window's capacity is forecast in worker-seconds as profiled:

    capacity = window_s * workers now * yield

The yield is the work recent windows delivered per worker-second at opening. It absorbs workers lost or
joined, weight pulls, regrouping, sequence parallelism and profiling error. Both factors are discounted means;
the cautious capacity lowers each by ``caution`` standard deviations.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from spotlight.config.sections.exploration import PreviewCostsConfig
from spotlight.scheduler.policies.exploration.bandit import Arm
from spotlight.scheduler.policies.exploration.decayed_mean import DecayedMean
from spotlight_rewards.base.typed_json import section


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

    @property
    def corrects_costs(self) -> bool:
        """Whether a yield was measured. The profiled costs alone may be off by any factor."""
        return self._yield.mean is not None

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
        self._window_s = DecayedMean.read(state, "window_s")
        self._yield = DecayedMean.read(state, "yield")


_REST = {True: "kept", False: "made"}
"""Names in a snapshot: whether chosen previews are kept, or rollouts made."""


@dataclass(slots=True)
class IterationSeconds:
    """Seconds of an iteration whose previews are waited for, by arm.

    A window's length is the mean of those measured with its arm, else its work over what workers deliver. The
    rest of the iteration is shorter where chosen previews are kept, by the time of the rollouts they are. An
    iteration is measured from the opening of its window to that of the next.

    Attributes:
        forecast: of windows.
        rollout_steps: of a rollout.
        group_size: rollouts per prompt.
        keeps: previews of all of a rollout's steps are kept.
    """

    forecast: Forecast
    rollout_steps: int
    group_size: int
    keeps: bool
    _windows: dict[Arm, DecayedMean] = field(default_factory=dict)
    _rest: dict[bool, DecayedMean] = field(default_factory=dict)

    def of(self, arm: Arm | None, prompts: int, workers: int) -> float | None:
        """Seconds of an iteration with ``arm``, or with random seeds; None: not enough was measured yet."""
        speed = workers * self.forecast.capacity(workers).yields
        if not self._rest or not self.forecast.corrects_costs or speed <= 0:
            return None
        kept = self._kept(arm)
        if kept in self._rest:
            rest_s = self._rest[kept].mean or 0.0
        else:
            rollouts_s = self._work_s(self.rollout_steps, prompts * self.group_size, speed)
            rest_s = max(0.0, (self._rest[not kept].mean or 0.0) + (-rollouts_s if kept else rollouts_s))
        if arm is None:
            return rest_s
        known = self._windows.get(arm)
        if known is not None and known.mean is not None:
            return rest_s + known.mean
        costs = self.forecast.costs
        return rest_s + self._work_s(arm.steps, prompts * arm.seeds_per_prompt, speed) + costs.reward_s

    def learn_window(self, seen: WindowSeen) -> None:
        """Learn from a window that was waited for; not if it waited for workers, as a run's first may."""
        if seen.workers > 0:
            self._learn(self._windows.setdefault(seen.arm, DecayedMean()), seen.open_s)

    def learn_rest(self, arm: Arm | None, rest_s: float) -> None:
        """Learn from the rest of an iteration, after the window of ``arm``."""
        self._learn(self._rest.setdefault(self._kept(arm), DecayedMean()), rest_s)

    def snapshot(self) -> dict[str, object]:
        """JSON-able state; empty: nothing measured."""
        windows = {arm.name: mean.to_list() for arm, mean in self._windows.items()}
        rest = {_REST[kept]: mean.to_list() for kept, mean in self._rest.items()}
        return {"windows": windows, "rest": rest} if windows or rest else {}

    def load(self, state: Mapping[str, object]) -> None:
        """Restore a snapshot; empty: nothing measured."""
        windows, rest = (section(state, name) if state else {} for name in ("windows", "rest"))
        self._windows = {Arm.parse(name): DecayedMean.read(windows, name) for name in windows}
        self._rest = {kept: DecayedMean.read(rest, name) for kept, name in _REST.items() if name in rest}

    def _kept(self, arm: Arm | None) -> bool:
        return self.keeps and arm is not None and arm.steps == self.rollout_steps

    def _work_s(self, steps: int, samples: int, speed: float) -> float:
        return self.forecast.costs.work_s(steps, samples) / speed

    def _learn(self, mean: DecayedMean, seconds: float) -> None:
        mean.forget(self.forecast.discount)
        mean.add(seconds)
