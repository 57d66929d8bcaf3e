"""Where one worker's time goes: a stopwatch that is always in exactly one phase.

Invariant: the seconds of all phases sum to the time since the clock began, so every billed second is
accounted for.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from spotlight.scheduler.types import Phase


def _now_s() -> float:
    # Billing is wall-clock: use a monotonic clock that keeps running while the machine is suspended.
    boot = getattr(time, "CLOCK_BOOTTIME", None)  # Linux only
    return time.monotonic() if boot is None else time.clock_gettime(boot)


_IMPORTED_S = _now_s()


def process_age_s() -> float:
    """Seconds since process start; without /proc, since this module's import."""
    try:
        fields = Path("/proc/self/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
        # starttime is field 22 of proc(5), in ticks since boot; the first two fields are cut off here.
        return max(0.0, _now_s() - int(fields[19]) / os.sysconf("SC_CLK_TCK"))
    except (OSError, ValueError, IndexError):
        return _now_s() - _IMPORTED_S


class PhaseClock:
    """Attributes wall-clock seconds to phases; time outside any ``phase`` block is idle.

    Args:
        spent_s: seconds that ``initial`` took before the clock was created.
        now_s: another clock, such as one of CPU seconds.
    """

    def __init__(
        self,
        initial: Phase = Phase.SETUP,
        spent_s: float = 0.0,
        now_s: Callable[[], float] | None = None,
    ) -> None:
        self._now_s = now_s or _now_s
        self._begun = self._mark = self._now_s() - spent_s
        self._phase = initial
        self._unclaimed: dict[Phase, float] = {}
        self._failed_in: Phase | None = None

    @property
    def elapsed_s(self) -> float:
        """Seconds since the clock began."""
        return self._now_s() - self._begun

    @property
    def failed_in(self) -> Phase:
        """The innermost phase that an exception left, else the current one."""
        return self._failed_in or self._phase

    @contextmanager
    def phase(self, phase: Phase) -> Iterator[None]:
        """Attribute the block's time to ``phase``; nested blocks take their own time out."""
        outer = self._switch(phase)
        try:
            yield
        except BaseException:
            self._failed_in = self._failed_in or phase
            raise
        finally:
            self._switch(outer)

    def ready(self) -> None:
        """End the set-up: from now on, time outside any block is idle."""
        self._switch(Phase.IDLE)

    def take(self) -> dict[Phase, float]:
        """Seconds by phase since the last call."""
        self._switch(self._phase)
        taken = {phase: seconds for phase, seconds in self._unclaimed.items() if seconds > 0}
        self._unclaimed.clear()
        return taken

    def _switch(self, phase: Phase) -> Phase:
        now = self._now_s()
        self._unclaimed[self._phase] = self._unclaimed.get(self._phase, 0.0) + now - self._mark
        previous, self._phase, self._mark = self._phase, phase, now
        return previous
