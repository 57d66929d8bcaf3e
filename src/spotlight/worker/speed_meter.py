"""How fast this worker makes training rollouts, reported as they finish.

Measured are the steps that it takes alone or leads, from denoising to the packing of what is stored: all that
a GPU still computes is waited for in there. Steps shared with rollouts of other purposes do not count.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from spotlight.models.shared.flop_count import Work
from spotlight.scheduler.types import Purpose
from spotlight.worker.group_role import GroupRole
from spotlight.worker.reports import RolloutSpeed

if TYPE_CHECKING:
    from spotlight.rollout.engine import Engine


class SpeedMeter:
    """Not thread-safe.

    Args:
        report: is given what was measured since the last time, whenever rollouts end.
    """

    def __init__(self, engine: Engine, report: Callable[[RolloutSpeed], None]) -> None:
        self._engine, self._report = engine, report
        self._work, self._seconds = Work(0.0, 0.0), 0.0

    @contextmanager
    def step(self, role: GroupRole, ranks: int) -> Iterator[None]:
        """One step of the role's rollouts.

        Args:
            ranks: that make each forward together; this device's share of it is counted.
        """
        states, began = role.leases.states, time.perf_counter()
        self._engine.forwards.clear()  # of steps that do not count
        yield
        if role.lost or any(state.rollout.purpose is not Purpose.TRAIN for state in states):
            return
        self._work += self._engine.take_work() * (1 / ranks)
        self._seconds += time.perf_counter() - began
        if len(role.leases) < len(states):
            work, peak_flop_s = self._work, self._engine.peak_flop_s
            self._report(RolloutSpeed(work.tokens, work.flops, self._seconds, peak_flop_s))
            self._work, self._seconds = Work(0.0, 0.0), 0.0
