"""Gain of exploration: the contrast of trained groups beyond that of random groups.

Contrast is the unbiased variance of a group's regenerated rewards. A group's gain is its contrast minus that
of random groups of the same prompt, estimated from the same group
(:mod:`.evidence`), so spread-out prompts do not inflate an arm's value. By
slope the gain is

    (unbiased b²) * (variance of the chosen previews - variance of the pool's previews).

A fully random group (the control, or from a pool without contrast) has gain 0 by design.

All explored groups count, also with equal chosen previews (negative gain, by the other groups' mean slope;
never with max_variance and top_and_bottom). For top the gain is unbiased if prompts share their slope,
and unknown in an iteration without any line.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass

from spotlight.scheduler.policies.exploration.evidence import GroupEvidence, fit_lines, sampled_variance
from spotlight.scheduler.policies.selection import sample_variance


@dataclass(frozen=True, slots=True)
class Contrast:
    """Means over an iteration's explored groups.

    Attributes:
        groups: number measured.
        realised: variance of regenerated rewards.
        random: estimate for random groups of the same prompts, by slope.
        sampled: number of groups with drawn seeds.
        random_sampled: estimate for random groups by design, over the sampled groups.
        random_of_sampled: the same by slope; the difference is noise and what a line cannot fit.
    """

    groups: int
    realised: float
    random: float
    sampled: int = 0
    random_sampled: float | None = None
    random_of_sampled: float | None = None

    @property
    def gain(self) -> float:
        """``realised - random``."""
        return self.realised - self.random

    def as_metrics(self) -> Mapping[str, float]:
        """Measured values by name."""
        named = asdict(self) | {"gain": self.gain}
        return {name: float(value) for name, value in named.items() if value is not None}


def contrast(groups: Sequence[GroupEvidence]) -> Contrast | None:
    """Contrast over an iteration's explored groups; None if none can be measured."""
    realised: list[float] = []
    random: list[float] = []
    by_design: list[float] = []
    by_slope: list[float] = []
    for group, line in zip(groups, fit_lines(groups), strict=True):
        if line is None and not group.random:
            continue
        variance = sample_variance(group.realised)
        chosen = sample_variance(group.previews)
        gain = 0.0 if line is None else line.squared * (chosen - group.pool_variance)
        realised.append(variance)
        random.append(variance if group.random else variance - gain)
        sampled = sampled_variance(group)
        if sampled is not None:
            by_design.append(sampled)
        if sampled is not None and line is not None:
            by_slope.append(variance - gain)
    if not realised:
        return None
    return Contrast(
        len(realised),
        _mean(realised),
        _mean(random),
        len(by_design),
        _mean(by_design) if by_design else None,
        _mean(by_slope) if by_slope else None,
    )


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
