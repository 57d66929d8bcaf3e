"""How much to explore: a fixed arm, or a planner that chooses one per iteration.

    decide ──► previews ──► observe (window length) ──► groups regenerated ──► learn ──► decide ...

Invariants
    1. Pure: equal calls give equal decisions; a restored policy decides like the original.
    2. An arm is judged by regenerated rewards, never by preview rewards.
    3. Every decision carries its explanation.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from spotlight.scheduler.policies.exploration.bandit import Arm, ArmEstimate, DiscountedUCB
from spotlight.scheduler.policies.exploration.budget import Capacity, Forecast, IterationSeconds, WindowSeen
from spotlight.scheduler.policies.exploration.contrast import Contrast
from spotlight.scheduler.policies.exploration.decayed_mean import DecayedMean
from spotlight_rewards.base.typed_json import section

_NO_CONTRAST = 1e-12
"""Gains are not divided by a random contrast below this."""


@dataclass(frozen=True, slots=True)
class Decision:
    """An arm, or None for random seeds; ``metrics`` is a JSON-able explanation."""

    arm: Arm | None
    metrics: Mapping[str, object]


def fixed(arm: Arm, iteration: int) -> Decision:
    """Without a planner, the only arm there is."""
    return Decision(arm, {"iteration": iteration, "chosen": arm.name, "why": "the only arm"})


@dataclass(slots=True)
class Planner:
    """The arm with the largest upper confidence bound among the arms that fit the window.

    An arm's reward is the mean gain (:mod:`.contrast`) over the prompts
    explored, 0 for those left with random seeds. Its unit is the random groups' contrast in earlier
    iterations: this makes easy and hard phases comparable and, being fixed before the reward is seen, does
    not bias it.

    A window may open before the previous one's groups are regenerated; its reward then arrives late.

    With ``seconds``, previews are waited for, and what is maximised is contrast per second: (1 + gain) over
    the seconds of an iteration, in units of random groups' contrast. Random seeds have gain 0 and no window:
    they are an arm too. That contrast is worth its square in deviations, not less, is measured
    (``docs/howto/explore-seeds.md``): what needs n iterations with random groups needs about n / (1 + gain).

    Attributes:
        limited: windows end with training; otherwise previews are waited for and every arm fits.
        seconds: of iterations; None: every second is free.
        _awaited: the last arm played, until its reward arrives.
    """

    bandit: DiscountedUCB
    forecast: Forecast
    limited: bool = True
    seconds: IterationSeconds | None = None
    _unit: DecayedMean = field(default_factory=DecayedMean)
    _awaited: Arm | None = None

    def decide(self, iteration: int, prompts: int, workers: int) -> Decision:
        """Choose the arm of a window that opens now.

        Args:
            prompts: number of prompts to explore.
            workers: number of workers that could explore now.
        """
        capacity, costs = self.forecast.capacity(workers), self.forecast.costs
        work_s = {arm: costs.work_s(arm.steps, prompts * arm.seeds_per_prompt) for arm in self.bandit.arms}
        fits = {arm for arm in self.bandit.arms if self._fits(work_s[arm], capacity)}
        estimates = self.bandit.estimates()
        rates = self._rates(prompts, workers, estimates)
        cheapest = min(self.bandit.arms, key=lambda arm: (work_s[arm], arm))
        arm: Arm | None
        if self.limited and capacity.cautious_s is None:
            arm, why = cheapest, "no window was timed yet: the cheapest arm"
        elif not fits:
            arm, why = cheapest, "no arm fits the window: the cheapest, for as many prompts as it lasts"
        else:
            arm = self.bandit.choose(self._worth_trying(fits, estimates), estimates)
            tried = estimates[arm].mean is not None
            why = "the largest index of those that fit" if tried else "fits, and was not tried yet"
            if tried and rates:
                arm, why = None, "random seeds: no previews pay for their time"
                best = max(self.bandit.arms, key=lambda one: (rates[one], one))
                if rates[best] > rates[None]:
                    arm, why = best, "the most contrast per second"
        arms = {
            one.name: self._explain(work_s[one], one in fits, estimates[one])
            | ({"per_s": rates[one]} if math.isfinite(rates.get(one, math.inf)) else {})
            for one in self.bandit.arms
        }
        self._awaited = arm
        metrics: dict[str, object] = {"iteration": iteration, "chosen": arm and arm.name, "why": why}
        metrics |= {"random_per_s": rates[None]} if rates else {}
        return Decision(arm, metrics | {"capacity": capacity.as_metrics(), "arms": arms})

    def observe(self, seen: WindowSeen) -> None:
        """Learn from a window's length and throughput."""
        self.forecast.observe(seen)
        if self.seconds is not None:
            self.seconds.learn_window(seen)

    def learn_rest(self, arm: Arm | None, rest_s: float) -> None:
        """Learn how long an iteration took after the window of ``arm``."""
        if self.seconds is not None:
            self.seconds.learn_rest(arm, rest_s)

    def learn(self, arm: Arm | None, contrast: Contrast | None, chosen: int, prompts: int) -> None:
        """Learn from the regenerated groups, once per iteration.

        Args:
            arm: None: none was played.
            contrast: None: not measurable.
            chosen: groups, out of ``prompts`` explored, whose seeds were selected by previews.
        """
        if arm is None:
            if self.seconds is not None:
                self.bandit.forget()  # so that what did not pay is tried again
            return
        self._awaited = None if self._awaited == arm else self._awaited
        if contrast is None:
            self.bandit.learn(arm, 0.0)
            return
        unit = contrast.random if self._unit.mean is None else self._unit.mean
        if contrast.random > _NO_CONTRAST:
            self._unit.forget(self.bandit.discount)
            self._unit.add(contrast.random)
        # Groups that lost samples count like the others: that is not the arm's fault.
        share = chosen / prompts
        self.bandit.learn(arm, share * contrast.gain / unit if unit > _NO_CONTRAST else 0.0)

    def snapshot(self) -> dict[str, object]:
        """JSON-able state."""
        return {
            "bandit": self.bandit.snapshot(),
            "forecast": self.forecast.snapshot(),
            "unit": self._unit.to_list(),
            "awaited": self._awaited and self._awaited.name,
            "seconds": {} if self.seconds is None else self.seconds.snapshot(),
        }

    def load(self, state: Mapping[str, object]) -> None:
        """Restore a snapshot. Raises ValueError if it is malformed."""
        self.bandit.load(section(state, "bandit"))
        self.forecast.load(section(state, "forecast"))
        self._unit = DecayedMean.read(state, "unit")
        if self.seconds is not None:
            self.seconds.load(section(state, "seconds") if "seconds" in state else {})
        awaited = state.get("awaited")
        arm = None if awaited is None else Arm.parse(str(awaited))
        self._awaited = arm if arm in self.bandit.arms else None  # the configured grid may have changed

    def _rates(
        self, prompts: int, workers: int, estimates: Mapping[Arm, ArmEstimate]
    ) -> dict[Arm | None, float]:
        """Contrast per second by arm, None for random seeds; empty where seconds are free or not known."""
        if self.seconds is None:
            return {}
        arms: tuple[Arm | None, ...] = (None, *self.bandit.arms)
        seconds = {arm: self.seconds.of(arm, prompts, workers) for arm in arms}
        brings = {arm: 1.0 if arm is None else max(0.0, 1 + estimates[arm].index) for arm in arms}
        known = {arm: brings[arm] / taken for arm, taken in seconds.items() if taken}
        return known if len(known) == len(arms) else {}

    def _worth_trying(self, arms: set[Arm], estimates: Mapping[Arm, ArmEstimate]) -> set[Arm]:
        """Skip an untried arm whose reward is pending: a second play would not inform sooner."""
        first = self._awaited is not None and estimates[self._awaited].mean is None
        return arms - {self._awaited} or arms if first else arms

    def _fits(self, work_s: float, capacity: Capacity) -> bool:
        if not self.limited:
            return True
        return capacity.cautious_s is not None and work_s <= capacity.cautious_s

    def _explain(self, work_s: float, fits: bool, estimate: ArmEstimate) -> dict[str, object]:
        return {
            "work_s": work_s,
            "fits": fits,
            "plays": estimate.plays,
            "mean": estimate.mean,
            "bonus": estimate.bonus if math.isfinite(estimate.bonus) else None,
            "index": estimate.index if math.isfinite(estimate.index) else None,
        }
