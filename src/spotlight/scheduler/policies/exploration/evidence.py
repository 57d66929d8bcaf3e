"""Estimates about a whole pool of seeds from the group selected from it.

Selection looked at preview rewards x, not at regenerated rewards y. Both estimators rest on this alone.

By slope. Selection on x leaves the distribution of y given x unchanged, so the line y = a + b x fitted to the
group is unbiased, and the pool's variance is b² var(x) + var(y - a - b x), with var(x) over all previews
(Pearson-Lawley correction for selection). The squared slope is corrected by its variance, s²/Sxx. Unbiased if
y given x is linear and homoscedastic, which the group cannot show. A group whose chosen previews are all
equal has no line; leaving it out would be biased, so it uses the others' mean line, which is right if prompts
have similar lines.

By design. With seeds drawn at random from those left by rank, every pair of the pool has a known inclusion
probability, and sums over pairs are weighted by its inverse (Horvitz and Thompson 1952). Unbiased for any
distribution, but noisy.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

_LINE_POINTS = 3
"""Minimum points for a line and its residual variance."""


@dataclass(frozen=True, slots=True)
class GroupEvidence:
    """Preview and regenerated rewards of a group's surviving seeds.

    Attributes:
        pool: number of previews chosen from.
        pool_variance: unbiased variance of their rewards.
        previews, realised: by seed: chosen by rank first, drawn last.
        drawn: number of seeds, at the end, drawn at random from those left by rank.

    Raises:
        ValueError: the counts are inconsistent.
    """

    pool: int
    pool_variance: float
    previews: tuple[float, ...]
    realised: tuple[float, ...]
    drawn: int = 0

    def __post_init__(self) -> None:
        count = len(self.previews)
        if len(self.realised) != count or not 0 <= self.drawn <= count <= self.pool:
            raise ValueError(
                f"a group of {count} previews and {len(self.realised)} regenerated rewards, {self.drawn} of "
                f"them drawn, from a pool of {self.pool}; expected one of each a seed, and a pool no smaller"
            )

    @property
    def random(self) -> bool:
        """Whether the group is a random sample of its pool."""
        return self.drawn == len(self.previews) or self.pool_variance <= 0.0

    @property
    def by_design(self) -> bool:
        """Whether every pair of the pool could have been in the group."""
        ranked = len(self.previews) - self.drawn
        return self.drawn >= 2 or self.drawn == self.pool - ranked

    def pairs(self) -> Iterator[tuple[int, int, float]]:
        """Index pairs of the group, each with its inverse inclusion probability."""
        count = len(self.previews)
        ranked, left = count - self.drawn, self.pool - (count - self.drawn)
        once = left / self.drawn if self.drawn else 0.0
        both = once * (left - 1) / (self.drawn - 1) if self.drawn > 1 else 0.0
        for one in range(count):
            for other in range(one + 1, count):
                yield one, other, 1.0 if other < ranked else once if one < ranked else both


@dataclass(frozen=True, slots=True)
class FittedLine:
    """Regression of regenerated on preview rewards.

    Attributes:
        slope: b.
        squared: unbiased estimate of b²; may be negative.
        spread: residual variance.
        certainty: Sxx; the slope's variance is ``spread / certainty``.
    """

    slope: float
    squared: float
    spread: float
    certainty: float

    def pool_variance(self, group: GroupEvidence) -> float:
        """Estimated variance of regenerated rewards in a random group."""
        return self.squared * group.pool_variance + self.spread


def fit_lines(groups: Sequence[GroupEvidence]) -> list[FittedLine | None]:
    """A line per group, None where none can be estimated.

    Larger groups without contrast get the others' mean line; groups of two get none, since seeds are lost at
    random. If no group has three seeds, one line is fitted to all.
    """
    if all(len(group.previews) < _LINE_POINTS for group in groups):
        return [_fit(groups)] * len(groups)
    whole = [group if len(group.previews) >= _LINE_POINTS else None for group in groups]
    own = [None if group is None else _fit([group]) for group in whole]
    mean = _mean_line(own)
    return [line or (None if group is None else mean) for group, line in zip(whole, own, strict=True)]


def sampled_variance(group: GroupEvidence) -> float | None:
    """Estimated pool variance of regenerated rewards, by design; None for a choice by rank alone."""
    if not group.by_design or group.pool < 2:
        return None
    y = group.realised
    squares = sum(weight * (y[one] - y[other]) ** 2 for one, other, weight in group.pairs())
    return squares / (group.pool * (group.pool - 1))


def _fit(groups: Sequence[GroupEvidence]) -> FittedLine | None:
    sxx = sxy = syy = 0.0
    freedom = -1
    for group in groups:
        count = len(group.previews)
        if not count:
            continue
        x_mean, y_mean = sum(group.previews) / count, sum(group.realised) / count
        freedom += count - 1
        for x, y in zip(group.previews, group.realised, strict=True):
            sxx += (x - x_mean) ** 2
            sxy += (x - x_mean) * (y - y_mean)
            syy += (y - y_mean) ** 2
    if sxx <= 0.0 or freedom < 1:
        return None
    slope = sxy / sxx
    spread = max(0.0, syy - slope * sxy) / freedom
    return FittedLine(slope, slope * slope - spread / sxx, spread, sxx)


def _mean_line(lines: Sequence[FittedLine | None]) -> FittedLine | None:
    """Weighted by certainty. ``squared`` is averaged too: the squared mean slope would be too small."""
    known = [line for line in lines if line is not None]
    total = sum(line.certainty for line in known)
    if total <= 0.0:
        return None
    shares = [line.certainty / total for line in known]
    slope, squared, spread = (
        sum(share * value for share, value in zip(shares, values, strict=True))
        for values in zip(*((line.slope, line.squared, line.spread) for line in known), strict=True)
    )
    return FittedLine(slope, squared, spread, total)
