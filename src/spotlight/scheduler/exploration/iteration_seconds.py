"""Seconds of an iteration whose previews are waited for, by arm.

    seconds(arm) = its window + the rest of the iteration

A window's length is the mean of those measured with its arm, else its work over what workers deliver
(:mod:`.budget`). The rest is shorter where chosen previews are kept, by the time of the rollouts they are.
Pure: an iteration is measured from the opening of its window to that of the next.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from spotlight.scheduler.exploration.bandit import Arm
from spotlight.scheduler.exploration.budget import Forecast, WindowSeen
from spotlight.scheduler.exploration.decayed_mean import DecayedMean, section

_REST = {True: "kept", False: "made"}
"""Names in a snapshot: whether chosen previews are kept, or rollouts made."""


@dataclass(slots=True)
class IterationSeconds:
    """See the module's docstring.

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
        """Seconds of an iteration with ``arm``, or with random seeds; None: nothing was measured yet."""
        speed = workers * self.forecast.capacity(workers).yields
        if not self._rest or speed <= 0:
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

    def windowed(self, seen: WindowSeen) -> None:
        """Learn from a window that was waited for."""
        self._learn(self._windows.setdefault(seen.arm, DecayedMean()), seen.open_s)

    def rested(self, arm: Arm | None, rest_s: float) -> None:
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
        self._windows = {Arm.parse(name): DecayedMean.from_list(value) for name, value in windows.items()}
        self._rest = {kept: DecayedMean.from_list(rest[name]) for kept, name in _REST.items() if name in rest}

    def _kept(self, arm: Arm | None) -> bool:
        return self.keeps and arm is not None and arm.steps == self.rollout_steps

    def _work_s(self, steps: int, samples: int, speed: float) -> float:
        return self.forecast.costs.work_s(steps, samples) / speed

    def _learn(self, mean: DecayedMean, seconds: float) -> None:
        mean.forget(self.forecast.discount)
        mean.add(seconds)
