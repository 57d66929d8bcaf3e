"""Choose the settings that fit a GPU: savings are made in order, each as far as a phase that is too large
needs it; then those that others made unnecessary are let go. Pure: sizes come in as a function.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from spotlight.config.schema import RunConfig
from spotlight.dry_run.fitting import Memory
from spotlight.dry_run.memory_plan import Phase, phase_bytes
from spotlight_plan.commands.fit.savings import SAVINGS, Saving


@dataclass(frozen=True, slots=True)
class Adjustment:
    """A key that was changed.

    Attributes:
        phase: the one that was too large.
        before_bytes, after_bytes: its peak without this change and with it, all others as they are.
    """

    saving: Saving
    was: object
    value: object
    phase: Phase
    before_bytes: float
    after_bytes: float


@dataclass(frozen=True, slots=True)
class Fit:
    """The configuration that fits, or the smallest that there is.

    Attributes:
        peaks: of ``config``, by phase.
    """

    config: RunConfig
    changes: tuple[Adjustment, ...]
    peaks: Mapping[Phase, float]
    usable_bytes: float

    @property
    def fits(self) -> bool:
        return max(self.peaks.values()) <= self.usable_bytes

    @property
    def largest(self) -> Phase:
        return max(self.peaks, key=lambda phase: self.peaks[phase])

    @property
    def overrides(self) -> list[str]:
        """Arguments of a command that change the configuration so."""
        return [change.saving.override(self.config) for change in self.changes]


def fit(config: RunConfig, memory: Memory, usable_bytes: float) -> Fit:
    """Adjustment ``config`` as little as it takes; see :attr:`Fit.fits` for whether that is enough."""
    made: dict[str, Phase] = {}
    smaller = config
    while (step := _next_step(smaller, memory, usable_bytes)) is not None:
        saving, phase, smaller = step
        made.setdefault(saving.key, phase)
    smaller = _let_go(config, smaller, memory, usable_bytes)
    peaks = phase_bytes(memory(smaller))
    changes = (
        _change(saving, made[saving.key], config, smaller, memory)
        for saving in SAVINGS
        if saving.value(config) != saving.value(smaller)
    )
    return Fit(smaller, tuple(changes), peaks, usable_bytes)


def _next_step(
    config: RunConfig, memory: Memory, usable_bytes: float
) -> tuple[Saving, Phase, RunConfig] | None:
    peaks = phase_bytes(memory(config))
    over = [phase for phase, peak in peaks.items() if peak > usable_bytes]
    for saving in SAVINGS:
        for value in saving.values(config)[:1]:
            changed = saving.applied(config, value)
            lowered = phase_bytes(memory(changed))
            for phase in over:
                if phase in saving.phases and lowered[phase] < peaks[phase]:
                    return saving, phase, changed
    return None


def _let_go(config: RunConfig, smaller: RunConfig, memory: Memory, usable_bytes: float) -> RunConfig:
    """``smaller`` with each saving, the dearest first, at its first value that fits beside the others."""
    for saving in reversed(SAVINGS):
        for value in (saving.value(config), *saving.values(config)):
            tried = saving.applied(smaller, value)
            if max(phase_bytes(memory(tried)).values()) <= usable_bytes:
                smaller = tried
                break
    return smaller


def _change(
    saving: Saving, phase: Phase, config: RunConfig, smaller: RunConfig, memory: Memory
) -> Adjustment:
    was, value = saving.value(config), saving.value(smaller)
    before, after = (phase_bytes(memory(each))[phase] for each in (saving.applied(smaller, was), smaller))
    return Adjustment(saving, was, value, phase, before, after)
