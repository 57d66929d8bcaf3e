"""Discounted UCB over arms whose worth drifts (Garivier and Moulines 2011, arXiv 0805.3415).

    index(a) = mean(a) + alpha * B * sqrt(log(1 + n) / n(a))

with discounted numbers of plays n(a), their sum n, and discounted means. B is the standard deviation of all
rewards remembered, so ``alpha`` has no unit. Arms may share evidence with their neighbours on the grid: then
n(a) and mean(a) count a play of arm b as ``sharing ** distance(a, b)`` plays of a, which is biased by the
difference of the two and needs fewer plays.

Deterministic: no draws; ties fall to the arm that comes first in ``arms``.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from spotlight.scheduler.exploration.decayed_mean import DecayedMean


@dataclass(frozen=True, slots=True, order=True)
class Arm:
    """How much to explore: previews of each prompt, and denoising steps of each."""

    seeds_per_prompt: int
    steps: int

    @property
    def name(self) -> str:
        """In metrics and checkpoints: 32x6 is 32 seeds of 6 steps."""
        return f"{self.seeds_per_prompt}x{self.steps}"

    @classmethod
    def parse(cls, name: str) -> Arm:
        """The arm of a name. Raises ValueError for anything else."""
        seeds, _, steps = name.partition("x")
        if not (seeds.isdecimal() and steps.isdecimal()):
            raise ValueError(f"{name!r} names no exploration arm; expected one like 32x6 (seeds x steps)")
        return cls(int(seeds), int(steps))


def arm_grid(seed_counts: Sequence[int], step_counts: Sequence[int]) -> tuple[Arm, ...]:
    """Every combination, ascending."""
    return tuple(sorted({Arm(seeds, steps) for seeds in seed_counts for steps in step_counts}))


_UNTRIED = 0.05
"""An arm with evidence of fewer plays than this counts as never tried."""


@dataclass(frozen=True, slots=True)
class ArmEstimate:
    """What is believed of an arm.

    Attributes:
        plays: discounted number of plays, shared ones included.
        mean: discounted mean reward; None if never tried.
        bonus: for what is not known; infinite if never tried.
    """

    plays: float
    mean: float | None
    bonus: float

    @property
    def index(self) -> float:
        """Upper confidence bound."""
        return math.inf if self.mean is None else self.mean + self.bonus


@dataclass(slots=True)
class DiscountedUCB:
    """See the module's docstring.

    Attributes:
        arms: in the order in which untried ones are tried.
        alpha: weight of exploration; 0 always takes the best mean.
        discount: of a play, by every later one.
        sharing: evidence that a play gives of a neighbour on the grid: 0 none, towards 1 nearly all.
    """

    arms: Sequence[Arm]
    alpha: float = 1.0
    discount: float = 0.95
    sharing: float = 0.0
    _memory: dict[Arm, DecayedMean] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not self.arms:
            raise ValueError("a bandit needs at least one arm")
        if not (self.alpha >= 0 and 0 < self.discount <= 1 and 0 <= self.sharing < 1):
            raise ValueError(
                f"bandit with alpha {self.alpha}, discount {self.discount}, sharing {self.sharing}; expected "
                "alpha >= 0, 0 < discount <= 1 and 0 <= sharing < 1"
            )
        self._memory = {arm: self._memory.get(arm, DecayedMean()) for arm in self.arms}

    def estimates(self) -> dict[Arm, ArmEstimate]:
        """Of every arm."""
        plays = math.fsum(memory.weight for memory in self._memory.values())
        scale = self._scale()
        return {arm: self._estimate(arm, plays, scale) for arm in self.arms}

    def choose(self, among: Collection[Arm], estimates: Mapping[Arm, ArmEstimate]) -> Arm:
        """The arm with the largest index. Raises ValueError if there is none to choose among."""
        wanted = set(among)
        candidates = [arm for arm in self.arms if arm in wanted]
        if not candidates:
            raise ValueError(f"none of the arms {sorted(wanted)} is an arm of this bandit")
        return max(candidates, key=lambda arm: estimates[arm].index)  # the first of the largest

    def learn(self, arm: Arm, reward: float) -> None:
        """An arm was played, and brought a reward; one that is no arm (any more) only lets time pass."""
        for memory in self._memory.values():
            memory.forget(self.discount)
        if arm in self._memory:
            self._memory[arm].add(reward)

    def snapshot(self) -> dict[str, object]:
        """JSON-able state."""
        return {arm.name: memory.to_list() for arm, memory in self._memory.items() if memory.weight}

    def load(self, state: Mapping[str, object]) -> None:
        """Stand where a snapshot was taken; arms that the grid has no more are forgotten."""
        known = {Arm.parse(name): DecayedMean.from_list(value) for name, value in state.items()}
        self._memory = {arm: known.get(arm, DecayedMean()) for arm in self.arms}

    def _estimate(self, arm: Arm, plays: float, scale: float) -> ArmEstimate:
        weight = total = 0.0
        for other, memory in self._memory.items():
            share = (
                1.0 if other == arm else self.sharing ** self._distance(arm, other) if self.sharing else 0.0
            )
            weight += share * memory.weight
            total += share * memory.total
        if weight < _UNTRIED:
            return ArmEstimate(weight, None, math.inf)
        return ArmEstimate(weight, total / weight, self.alpha * scale * math.sqrt(math.log1p(plays) / weight))

    def _scale(self) -> float:
        together = DecayedMean()
        for memory in self._memory.values():
            together.weight += memory.weight
            together.total += memory.total
            together.squares += memory.squares
        return together.deviation

    def _distance(self, one: Arm, other: Arm) -> int:
        """Steps on the grid between two arms."""
        seeds = sorted({arm.seeds_per_prompt for arm in self.arms})
        steps = sorted({arm.steps for arm in self.arms})
        return abs(seeds.index(one.seeds_per_prompt) - seeds.index(other.seeds_per_prompt)) + abs(
            steps.index(one.steps) - steps.index(other.steps)
        )
