"""How long members of a group wait for each other, from the steps they took before. Pure.

A limit that a healthy step exceeds breaks its group, and every group after it; one that is too long leaves a
dead member unnoticed. What a step takes is known only once one is done, so a limit that ran out is doubled
until then.
"""

from __future__ import annotations

from collections import deque

SLOWER_MAX = 4.0
"""A step may take so many times as long as the slowest of the last did, for its size."""
DOUBLED_MAX = 16.0
"""Limits that run out grow to so many times the configured one."""
_REMEMBERED = 32


class StepLimit:
    """The steps of one process, over all of its groups."""

    def __init__(self) -> None:
        self._steps: deque[tuple[float, float]] = deque(maxlen=_REMEMBERED)
        self._after_loss_s = 0.0

    def limit_s(self, work: float, least_s: float) -> float:
        """Longest wait within a step of size ``work`` (0: between two), ``least_s`` or longer."""
        per_work = max((seconds / size for size, seconds in self._steps), default=0.0)
        longest_s = max((seconds for _, seconds in self._steps), default=0.0)
        usual_s = per_work * work if work else longest_s
        return max(least_s, SLOWER_MAX * usual_s, self._after_loss_s)

    def took(self, work: float, seconds: float) -> None:
        """A step was finished; 0 work: something else was, which tells nothing."""
        if work > 0:
            self._steps.append((work, seconds))
            self._after_loss_s = 0.0

    def lost(self, waited_s: float, least_s: float) -> None:
        """The group was lost after ``waited_s``: to the limit, unless it was sooner than any limit."""
        if waited_s >= least_s:
            self._after_loss_s = min(2 * waited_s, DOUBLED_MAX * least_s)
