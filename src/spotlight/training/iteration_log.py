"""An iteration's row of metrics, collected while it runs."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field

from spotlight.models.shared.flop_count import Work, rates
from spotlight.scheduler.records import REWARD
from spotlight.scheduler.types import Purpose, Rollout, RolloutId


@dataclass(slots=True)
class IterationLog:
    """Collects the current iteration's row of metrics."""

    _sums: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))
    _counts: defaultdict[str, int] = field(default_factory=lambda: defaultdict(int))
    _once: dict[str, float] = field(default_factory=dict)
    _scores: dict[RolloutId, tuple[int, Mapping[str, float]]] = field(default_factory=dict)
    _work: dict[str, tuple[Work, float, float | None]] = field(default_factory=dict)  # and most operations

    def add(self, name: str, value: float) -> None:
        """Add a value to a curve; the row holds the mean."""
        self._sums[name] += value
        self._counts[name] += 1

    def extend(self, row: Mapping[str, float]) -> None:
        """Add a value to several curves."""
        for name, value in row.items():
            self.add(name, value)

    def scored(self, rollout: Rollout, scores: Mapping[str, float]) -> None:
        """Record rewards of a train sample, of this iteration or early for the next; the last call counts."""
        if rollout.purpose is Purpose.TRAIN:
            self._scores[rollout.id] = rollout.iteration, scores

    def worked(self, what: str, work: Work, seconds: float, peak_flop_s: float | None) -> None:
        """Add what a device did in ``seconds``; the row holds all of it over all seconds (:func:`rates`)."""
        before, spent, most = self._work.get(what, (Work(0.0, 0.0), 0.0, 0.0))
        known = peak_flop_s is not None and most is not None
        most = (most or 0.0) + seconds * (peak_flop_s or 0.0) if known else None
        self._work[what] = before + work, spent + seconds, most

    def put(self, row: Mapping[str, float]) -> None:
        """Set values that occur once per iteration, replacing those of an earlier attempt at it."""
        self._once.update(row)

    def take(self, iteration: int | None = None) -> dict[str, float]:
        """Means, single values and rates since the last call.

        Args:
            iteration: rewards of later iterations stay for their own rows; None takes all.
        """
        for name, (of, scores) in list(self._scores.items()):
            if iteration is None or of <= iteration:
                del self._scores[name]
                for reward, value in scores.items():
                    self.add("rollout/reward" if reward == REWARD else f"rollout/{reward}", value)
        row = {name: total / self._counts[name] for name, total in self._sums.items()} | self._once
        for what, (work, seconds, most) in self._work.items():
            row |= rates(what, work, seconds, None if most is None else most / seconds)
        self._work.clear()
        self._sums.clear()
        self._counts.clear()
        self._once.clear()
        return row
