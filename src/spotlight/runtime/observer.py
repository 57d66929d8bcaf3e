"""Progress reports of a run, for the command line and tests."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Mapping

from spotlight.scheduler.controller import Controller
from spotlight.scheduler.stages import Stage
from spotlight.scheduler.types import Phase


class Observer:
    """Receives a run's progress, in order, on the driver's thread; this one ignores it. Must not raise."""

    def note(self, text: str) -> None:
        """Show a message (resumed from, a damaged checkpoint, a dropped sample)."""

    def work(self, phase: Phase, done: float, total: int) -> None:
        """Report ``done`` of ``total`` samples of the phase, or micro-batches of an iteration.

        A half-denoised sample counts half.
        """

    def left_s(self) -> float:
        """Seconds that the phase of the last :meth:`work` still takes, as measured; NaN: unknown."""
        return math.nan

    def billed(self, cost_usd: float) -> None:
        """What the run has cost: when an attempt begins, and again where nodes come and go."""

    def evaluated(self, iteration: int, row: Mapping[str, float]) -> None:
        """A validation was recorded; ``row`` holds scores and standard errors."""

    def iterated(self, iteration: int, row: Mapping[str, float]) -> None:
        """An iteration was trained; ``row`` is its line in ``metrics.jsonl``."""


def tell_stop(observer: Observer, note: str, *, at_once: bool) -> None:
    """What a stop waits for, and how long, as far as that is measured."""
    left_s = observer.left_s()
    observer.note(note if at_once or math.isnan(left_s) else f"{note}: about {left_s:.0f} s")


def stop_note(controller: Controller) -> str:
    """What is left to do, and what is lost, when the run was asked to stop; iterations count from 1 here."""
    iteration = controller.iteration + 1
    if controller.stage is Stage.OVER:
        return f"a resumed run begins iteration {iteration} again"
    if not controller.stops_at_once:
        return f"iteration {iteration} is trained to its end first, since some of its updates are applied"
    return f"the checkpoint that iteration {iteration} begins with is written first"


class NotScored:
    """Samples of a call that a reward gave no score, told in one line for each reason."""

    def __init__(self) -> None:
        self._samples: defaultdict[str, list[str]] = defaultdict(list)

    def add(self, sample: str, why: str) -> None:
        """``why``: of several lines, as of a traceback, the first and the last are told."""
        first, *rest = why.splitlines()
        self._samples[f"{first} ... {rest[-1].strip()}" if rest else first].append(sample)

    def tell(self, note: Callable[[str], None]) -> None:
        for why, samples in self._samples.items():
            more = f" and {len(samples) - 1} more are" if len(samples) > 1 else " is"
            note(f"{samples[0]}{more} not scored: {why}")
