"""SDE windows: which denoising steps of a rollout are stochastic, and therefore stored and trained.

Pure functions of seed and iteration, so a resumed or replayed rollout finds the same window. Invariants:
non-empty, contiguous, of one size per configuration, within [0, T - 2]: the last of T steps is always ODE
(it ends at x̂0 exactly).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import Protocol

from spotlight.diffusion.noise import Stream, uniform


class SdeWindow(Protocol):
    """The stochastic steps of a rollout."""

    def steps(self, total_steps: int, seed: int, iteration: int) -> range:
        """Indices of the stochastic steps. Raises ValueError if the window does not fit."""

    def kept(self, total_steps: int) -> int:
        """Their number: the S of a trajectory. Raises ValueError if the window does not fit."""


@dataclass(frozen=True, slots=True)
class AllSteps:
    """Every step but the last (Flow-GRPO)."""

    def steps(self, total_steps: int, seed: int, iteration: int) -> range:
        """[0, T - 1)."""
        return range(self.kept(total_steps))

    def kept(self, total_steps: int) -> int:
        if total_steps < 2:
            raise ValueError(
                f"a rollout of {total_steps} step(s) has no stochastic step, as its last one is ODE; "
                "use at least 2 steps"
            )
        return total_steps - 1


@dataclass(frozen=True, slots=True)
class RandomWindow:
    """``size`` contiguous steps within [low, high), placed by the rollout's seed (Flow-GRPO-Fast), or by its
    iteration.

    Attributes:
        size: number of stochastic steps, >= 1.
        low: first step the window may contain.
        high: exclusive; None: half of the steps (or more if ``size`` needs it).
        shared_seed: places one window per iteration, the same for all its rollouts; None: one per rollout.
    """

    size: int
    low: int = 0
    high: int | None = None
    shared_seed: int | None = None

    def __post_init__(self) -> None:
        _check_window(self.size, self.low, self.high)

    def steps(self, total_steps: int, seed: int, iteration: int) -> range:
        """A rollout's, the same in every iteration; or an iteration's, the same for every rollout."""
        positions = self._positions(total_steps)
        key = (seed, 0) if self.shared_seed is None else (self.shared_seed, 1 + iteration)
        choice = int(uniform(key[0], Stream.SDE_WINDOW, key[1], 1)[0] * len(positions))
        return range(positions[choice], positions[choice] + self.size)

    def kept(self, total_steps: int) -> int:
        self._positions(total_steps)
        return self.size

    def _positions(self, total_steps: int) -> range:
        half = min(max(self.low + self.size, total_steps // 2), total_steps - 1)
        return _positions(self.size, self.low, half if self.high is None else self.high, total_steps)


@dataclass(frozen=True, slots=True)
class SlidingWindow:
    """MixGRPO's window (arXiv 2507.21802): slides from noisy to clean steps, then back to ``low``.

    It stays at position l for ``every * exp(-decay * max(l - T/2, 0))`` iterations (rounded, at least 1), so
    with ``decay`` > 0 the clean half gets less time.

    Attributes:
        size: number of stochastic steps, >= 1.
        every: iterations per position, >= 1.
        low: first step the window may contain.
        high: end of the range, exclusive; None: T - 1, the maximum.
        decay: the paper's rate k >= 0.
    """

    size: int = 4
    every: int = 25
    low: int = 0
    high: int | None = None
    decay: float = 0.0

    def __post_init__(self) -> None:
        _check_window(self.size, self.low, self.high)
        if self.every < 1:
            raise ValueError(f"sliding SDE window: every is {self.every}; expected at least 1")
        if not 0 <= self.decay < math.inf:
            raise ValueError(f"sliding SDE window: decay is {self.decay}; expected a number >= 0")

    def steps(self, total_steps: int, seed: int, iteration: int) -> range:
        """The iteration's window, the same for every seed."""
        if iteration < 0:
            raise ValueError(f"sliding SDE window: iteration is {iteration}; expected one >= 0")
        cycle = _cycle(self, total_steps)
        start = cycle[iteration % len(cycle)]
        return range(start, start + self.size)

    def kept(self, total_steps: int) -> int:
        _positions(self.size, self.low, self.high, total_steps)
        return self.size


@lru_cache(maxsize=64)
def _cycle(window: SlidingWindow, total_steps: int) -> tuple[int, ...]:
    """Start of the window in each iteration of one pass from ``low`` to the end."""
    decay_from = (total_steps + 1) // 2
    cycle: list[int] = []
    for start in _positions(window.size, window.low, window.high, total_steps):
        stay = window.every * math.exp(-window.decay * max(start - decay_from, 0))
        cycle += [start] * max(1, round(stay))
    return tuple(cycle)


def _positions(size: int, low: int, high: int | None, total_steps: int) -> range:
    end = total_steps - 1 if high is None else high
    if end > total_steps - 1:
        raise ValueError(
            f"SDE window: high is {high}, but the last of {total_steps} steps is always ODE; "
            f"use high <= {total_steps - 1} or more steps"
        )
    if low + size > end:
        raise ValueError(
            f"SDE window: {size} step(s) do not fit within [{low}, {end}) of {total_steps} steps; "
            f"use a size of at most {max(end - low, 0)}, a lower low, or more steps"
        )
    return range(low, end - size + 1)


def _check_window(size: int, low: int, high: int | None) -> None:
    if size < 1:
        raise ValueError(f"SDE window: size is {size}; expected at least 1 (an empty window trains nothing)")
    if low < 0:
        raise ValueError(f"SDE window: low is {low}; expected at least 0")
    if high is not None and low + size > high:
        raise ValueError(f"SDE window: size {size} does not fit within [{low}, {high})")
