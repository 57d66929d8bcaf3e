"""What exploration brought: the contrast of the groups trained on, beyond that of random groups.

Contrast is the unbiased variance of a group's REGENERATED rewards. The gain of a group is its contrast minus
the one its prompt's random groups have, estimated from the same group (see
:mod:`spotlight.scheduler.exploration.evidence`): a
prompt whose rewards differ much whatever the seeds gives no gain by that, so noise in prompts does not look
like the worth of an arm. By slope, the gain comes to

    (b² without bias) * (variance of the chosen previews - variance of the pool's previews).

A group drawn at random as a whole (the control, or from a pool without contrast) has gain 0 by design.

Every group explored counts, also one with little gain; so do groups of which some seeds were drawn, and
groups whose chosen previews are all equal, of which the gain is negative. Of these the slope is the mean of
the other groups'. Choices by max_variance and top_and_bottom have contrast where the pool has, so nothing is
borrowed; for top and proportional the gain is unbiased if the prompts share their slope, and unknown in an
iteration in which no group has one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from spotlight.scheduler.exploration.evidence import GroupEvidence, fit_lines, sampled_variance
from spotlight.scheduler.exploration.selection import sample_variance


@dataclass(frozen=True, slots=True)
class Contrast:
    """Means over the groups of an iteration.

    Attributes:
        groups: explored ones that the figures are of.
        realised: variance of their regenerated rewards.
        random: what random groups of the same prompts would have had, by slope.
        gain: ``realised - random``.
        random_sampled: the same by design, over ``sampled`` groups with drawn seeds; None without any.
        random_of_sampled: by slope, over the same groups: the two differ by what the line misses, and noise;
            None if no group has a line.
    """

    groups: int
    realised: float
    random: float
    sampled: int = 0
    random_sampled: float | None = None
    random_of_sampled: float | None = None

    @property
    def gain(self) -> float:
        """See the class."""
        return self.realised - self.random

    def as_metrics(self) -> Mapping[str, float]:
        """What is known, by name."""
        named = {
            "groups": float(self.groups),
            "realised": self.realised,
            "random": self.random,
            "gain": self.gain,
            "sampled": float(self.sampled),
            "random_sampled": self.random_sampled,
            "random_of_sampled": self.random_of_sampled,
        }
        return {name: value for name, value in named.items() if value is not None}


def contrast(groups: Sequence[GroupEvidence]) -> Contrast | None:
    """Of an iteration's explored groups; None if nothing can be said: no groups, or none with a line."""
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
