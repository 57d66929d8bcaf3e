"""What regenerated rewards tell of the pool that a group's seeds were chosen from.

A group holds few of its pool's seeds, and not just any: the choice looked at preview rewards x. It did not
look at regenerated rewards y. Two ways lead from the group back to the pool, and both rest on this alone:

By slope. Choosing on x leaves the law of y given x as it was. So the line y = a + b x is fitted to the group
without bias, and the pool's variance is b² var(x) + var(y - a - b x), with var(x) from all previews (the
correction for selection of Pearson and Lawley). The square of a fitted slope is too large by its own
variance, s²/Sxx, which is taken off. Unbiased if y given x is linear with a constant spread; if the spread
differs between middle and ends, or the line bends, it is biased by that, and nothing in the group shows it.
A group whose chosen previews are all equal has no line, and to leave it out for that would be biased: it
borrows the mean of the others', which is right as far as prompts are alike in their lines.

By design. Where some of the group were drawn at random among the seeds that rank left, every pair of the pool
has a known probability to be in the group, and sums over pairs are weighted with its inverse (Horvitz and
Thompson 1952). Unbiased whatever the law, and noisy.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

_LINE_POINTS = 3
"""A line and the spread about it need as many points."""


@dataclass(frozen=True, slots=True)
class GroupEvidence:
    """Preview and regenerated rewards of a group's surviving seeds.

    Attributes:
        pool: number of previews that the seeds were chosen among.
        pool_variance: unbiased variance of their preview rewards.
        previews, realised: of the group's seeds, in one order: chosen by rank first, drawn ones last.
        drawn: how many of them, from the end, were drawn at random among those that rank left.
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
        """Whether rank chose none of the group, or had nothing to choose by."""
        return self.drawn == len(self.previews) or self.pool_variance <= 0.0

    @property
    def by_design(self) -> bool:
        """Whether every pair of the pool could have been in the group."""
        ranked = len(self.previews) - self.drawn
        return self.drawn >= 2 or self.drawn == self.pool - ranked

    def pairs(self) -> Iterator[tuple[int, int, float]]:
        """Pairs of the group, each with the number of pairs of the pool that it stands for."""
        count = len(self.previews)
        ranked, left = count - self.drawn, self.pool - (count - self.drawn)
        once = left / self.drawn if self.drawn else 0.0
        both = once * (left - 1) / (self.drawn - 1) if self.drawn > 1 else 0.0
        for one in range(count):
            for other in range(one + 1, count):
                yield one, other, 1.0 if other < ranked else once if one < ranked else both


@dataclass(frozen=True, slots=True)
class FittedLine:
    """Regenerated on preview rewards.

    Attributes:
        slope: b.
        squared: b² without the bias of squaring; negative where it is indistinguishable from 0.
        spread: variance about the line.
        certainty: what it rests on, Sxx: the slope's variance is ``spread / certainty``.
    """

    slope: float
    squared: float
    spread: float
    certainty: float

    def pool_variance(self, group: GroupEvidence) -> float:
        """Of regenerated rewards over the whole pool: what a random group would have had."""
        return self.squared * group.pool_variance + self.spread


def fit_lines(groups: Sequence[GroupEvidence]) -> list[FittedLine | None]:
    """A line for each group, its own if it can be; None where nothing can be said.

    Of three seeds or more without contrast: the mean of the others' lines. Of two: none, as lost seeds are
    lost by chance; if no group has more, one line is fitted to all.
    """
    if all(len(group.previews) < _LINE_POINTS for group in groups):
        return [_fit(groups)] * len(groups)
    whole = [group if len(group.previews) >= _LINE_POINTS else None for group in groups]
    own = [None if group is None else _fit([group]) for group in whole]
    mean = _mean_line(own)
    return [line or (None if group is None else mean) for group, line in zip(whole, own, strict=True)]


def sampled_variance(group: GroupEvidence) -> float | None:
    """The pool's variance of regenerated rewards by design; None where the group was chosen by rank alone."""
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
    """By certainty. Of squares too: where slopes differ, the square of their mean would be too small."""
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
