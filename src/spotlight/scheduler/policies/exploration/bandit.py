"""Discounted UCB for arms with drifting rewards (Garivier and Moulines 2011, arXiv 0805.3415).

    index(a) = mean(a) + alpha * B * sqrt(log(1 + n) / n(a))

n(a) is the discounted number of plays, n their sum, mean(a) the discounted mean. B is the standard deviation
of all remembered rewards, so ``alpha`` is dimensionless. With ``sharing``, a play of arm b counts as
``sharing ** distance(a, b)`` plays of a: fewer plays are needed, as not every arm of a grid has to be tried,
at the cost of bias.

Deterministic; ties go to the arm first in ``arms``.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from spotlight.scheduler.policies.exploration.decayed_mean import DecayedMean


@dataclass(frozen=True, slots=True, order=True)
class Arm:
    """How much to explore: previews per prompt, and denoising steps per preview."""

    seeds_per_prompt: int
    steps: int

    @property
    def name(self) -> str:
        """For metrics and checkpoints: 32x6 is 32 seeds of 6 steps."""
        return f"{self.seeds_per_prompt}x{self.steps}"

    @classmethod
    def parse(cls, name: str) -> Arm:
        """Inverse of :attr:`name`. Raises ValueError for anything else."""
        seeds, _, steps = name.partition("x")
        if not (seeds.isdecimal() and steps.isdecimal()):
            raise ValueError(f"{name!r} names no exploration arm; expected one like 32x6 (seeds x steps)")
        return cls(int(seeds), int(steps))


def arm_grid(seed_counts: Sequence[int], step_counts: Sequence[int]) -> tuple[Arm, ...]:
    """All combinations, ascending."""
    return tuple(sorted({Arm(seeds, steps) for seeds in seed_counts for steps in step_counts}))


_UNTRIED = 0.05
"""Arms with less evidence than this, in plays, shared ones included, count as untried."""


@dataclass(frozen=True, slots=True)
class ArmEstimate:
    """Current estimate of an arm.

    Attributes:
        plays: discounted plays, shared ones included.
        mean: discounted mean reward; None if untried.
        bonus: for uncertainty; infinite if untried.
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
    """See the module's docstring. Raises ValueError for parameters out of range.

    Attributes:
        arms: in the order in which untried ones are tried.
        alpha: weight of the bonus; 0 is greedy.
        discount: decay of a play per later play.
        sharing: evidence shared with a grid neighbour, 0 to below 1.
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
        """Estimates of all arms."""
        plays = math.fsum(memory.weight for memory in self._memory.values())
        scale = self._scale()
        return {arm: self._estimate(arm, plays, scale) for arm in self.arms}

    def choose(self, among: Collection[Arm], estimates: Mapping[Arm, ArmEstimate]) -> Arm:
        """The arm with the largest index. Raises ValueError without candidates."""
        wanted = set(among)
        candidates = [arm for arm in self.arms if arm in wanted]
        if not candidates:
            raise ValueError(f"none of the arms {sorted(wanted)} is an arm of this bandit")
        return max(candidates, key=lambda arm: estimates[arm].index)  # the first of the largest

    def forget(self) -> None:
        """Decay all evidence, as a play of another arm would."""
        for memory in self._memory.values():
            memory.forget(self.discount)

    def learn(self, arm: Arm, reward: float) -> None:
        """Add a play. An arm not on the grid only decays the others."""
        self.forget()
        if arm in self._memory:
            self._memory[arm].add(reward)

    def snapshot(self) -> dict[str, object]:
        """JSON-able state."""
        return {arm.name: memory.to_list() for arm, memory in self._memory.items() if memory.weight}

    def load(self, state: Mapping[str, object]) -> None:
        """Restore a snapshot; arms no longer on the grid are dropped."""
        known = {Arm.parse(name): DecayedMean.read(state, name) for name in state}
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
        seeds = sorted({arm.seeds_per_prompt for arm in self.arms})
        steps = sorted({arm.steps for arm in self.arms})
        return abs(seeds.index(one.seeds_per_prompt) - seeds.index(other.seeds_per_prompt)) + abs(
            steps.index(one.steps) - steps.index(other.steps)
        )
