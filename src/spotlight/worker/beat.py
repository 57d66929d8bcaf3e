"""What a worker is doing, to be read from any thread at any time."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

from spotlight.scheduler.types import Phase, Purpose

PHASE_OF: Mapping[Purpose, Phase] = MappingProxyType(
    {Purpose.TRAIN: Phase.ROLLOUT, Purpose.EVAL: Phase.EVALUATION, Purpose.EXPLORE: Phase.EXPLORATION}
)


@dataclass(frozen=True, slots=True)
class Beat:
    """A sign of life.

    Attributes:
        phase: what the worker is doing.
        since_s: ``time.monotonic()`` when it began to.
        steps: denoising steps taken, whoever's lease it was.
        spent_s: seconds of each phase that is over; those of ``phase`` since ``since_s`` are not in it.
    """

    phase: Phase
    since_s: float
    steps: int = 0
    spent_s: Mapping[Phase, float] = field(default_factory=dict)


class Pulse:
    """Written by one thread; ``beat`` is a whole at any time, because it is replaced and never changed."""

    def __init__(self) -> None:
        self.beat = Beat(Phase.SETUP, time.monotonic())

    def doing(self, phase: Phase) -> None:
        """From now on the worker does this."""
        beat = self.beat
        if phase is beat.phase:
            return
        now = time.monotonic()
        spent = {**beat.spent_s, beat.phase: beat.spent_s.get(beat.phase, 0.0) + now - beat.since_s}
        self.beat = Beat(phase, now, beat.steps, spent)

    def stepped(self) -> None:
        """One more denoising step was taken."""
        beat = self.beat
        self.beat = Beat(beat.phase, beat.since_s, beat.steps + 1, beat.spent_s)
