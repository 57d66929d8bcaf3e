"""Ranking fidelity: how well previews rank the seeds that training regenerates. Pure functions.

Correlations within a group (``group_tau``, ``group_rho``) overestimate, since the group holds the pool's
easily ranked extremes (the reverse of range restriction); they are only reported. Two estimates are for the
whole pool:

- by design (``tau``): Kendall's tau-b over pairs weighted by inverse inclusion probability, from groups with
  randomly drawn seeds. Numerators and denominators are summed over groups first, so the ratio is consistent.
- by slope (``tau_by_slope``): Pearson's correlation corrected for selection, rho² = b² var(x) / var(y),
  converted by tau = asin(rho) * 2 / pi, which holds for bivariate normal rewards.
"""

from __future__ import annotations

import math
import statistics
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass

from spotlight.scheduler.policies.exploration.evidence import GroupEvidence, fit_lines


def kendall_tau(x: Sequence[float], y: Sequence[float]) -> float | None:
    """Kendall's tau-b; None if either side is constant."""
    return _tau_b([(_signs(x, y, one, other), 1.0) for one in range(len(x)) for other in range(one)])


def spearman_rho(x: Sequence[float], y: Sequence[float]) -> float | None:
    """Spearman's rho, ties at their mean rank; None if either side is constant."""
    one, other = _ranks(x), _ranks(y)
    return statistics.correlation(one, other) if min(len({*one}), len({*other})) > 1 else None


def hit_rate(previews: Sequence[float], realised: Sequence[float], count: int, *, top: bool) -> float:
    """Share of the ``count`` best (or worst) previews whose regenerated rewards are among the ``count`` best.

    Ties count with their expectation under random order.

    Raises:
        ValueError: ``count`` is not in 1..n.
    """
    if not 1 <= count <= len(previews):
        raise ValueError(f"hits among the best {count} of {len(previews)}; expected 1 to {len(previews)}")
    one, other = (_membership(values, count, top) for values in (previews, realised))
    return math.fsum(a * b for a, b in zip(one, other, strict=True)) / count


@dataclass(frozen=True, slots=True)
class Fidelity:
    """Fidelity for one reward over an iteration's groups; None: not measurable.

    Attributes:
        groups: number with contrast.
        sampled: of these, number with seeds drawn at random.
        top_hit, bottom_hit: hit rates within groups for the best and worst quarter; chance is 0.25.
    """

    groups: int
    sampled: int
    tau: float | None
    tau_by_slope: float | None
    group_tau: float | None
    group_rho: float | None
    top_hit: float | None
    bottom_hit: float | None

    def as_metrics(self) -> Mapping[str, float]:
        """Measured values by name."""
        return {name: float(value) for name, value in asdict(self).items() if value is not None}


def fidelity(groups: Sequence[GroupEvidence]) -> Fidelity:
    """Fidelity over an iteration's explored groups."""
    informative = [group for group in groups if len(group.previews) >= 2 and group.pool_variance > 0.0]
    sampled = [group for group in informative if group.by_design]
    quarters = [(group, max(1, len(group.previews) // 4)) for group in informative]
    return Fidelity(
        groups=len(informative),
        sampled=len(sampled),
        tau=pool_tau(sampled),
        tau_by_slope=tau_by_slope(informative),
        group_tau=_mean(kendall_tau(group.previews, group.realised) for group in informative),
        group_rho=_mean(spearman_rho(group.previews, group.realised) for group in informative),
        top_hit=_mean(hit_rate(g.previews, g.realised, count, top=True) for g, count in quarters),
        bottom_hit=_mean(hit_rate(g.previews, g.realised, count, top=False) for g, count in quarters),
    )


def pool_tau(groups: Sequence[GroupEvidence]) -> float | None:
    """Kendall's tau-b over the groups' pools, by design; None if either side is constant."""
    pairs = [
        (_signs(group.previews, group.realised, one, other), weight)
        for group in groups
        for one, other, weight in group.pairs()
    ]
    return _tau_b(pairs)


def tau_by_slope(groups: Sequence[GroupEvidence]) -> float | None:
    """Kendall's tau over the groups' pools, by slope; None if no group has a line."""
    explained = total = direction = 0.0
    for group, line in zip(groups, fit_lines(groups), strict=True):
        if line is not None:
            explained += line.squared * group.pool_variance
            total += line.pool_variance(group)
            direction += line.slope * group.pool_variance
    if total <= 0.0:
        return None
    rho = math.copysign(math.sqrt(min(1.0, max(0.0, explained / total))), direction)
    return 2 / math.pi * math.asin(rho)


# -- inside ------------------------------------------------------------------------------------------------


def _signs(x: Sequence[float], y: Sequence[float], one: int, other: int) -> tuple[int, int]:
    return _sign(x[one] - x[other]), _sign(y[one] - y[other])


def _sign(value: float) -> int:
    return (value > 0) - (value < 0)


def _tau_b(pairs: Sequence[tuple[tuple[int, int], float]]) -> float | None:
    agree = math.fsum(weight * sx * sy for (sx, sy), weight in pairs)
    untied_x = math.fsum(weight for (sx, _), weight in pairs if sx)
    untied_y = math.fsum(weight for (_, sy), weight in pairs if sy)
    if not untied_x or not untied_y:
        return None
    return max(-1.0, min(1.0, agree / math.sqrt(untied_x * untied_y)))


def _ranks(values: Sequence[float]) -> list[float]:
    """Ascending from 1; ties share their mean rank."""
    ordered = sorted(values)
    return [(bisect_left(ordered, value) + 1 + bisect_right(ordered, value)) / 2 for value in values]


def _membership(values: Sequence[float], count: int, top: bool) -> list[float]:
    """Probability of each value to be among the best (or worst) ``count``, ties in random order."""
    last = sorted(values, reverse=top)[count - 1]
    better = [value > last if top else value < last for value in values]
    share = (count - sum(better)) / sum(value == last for value in values)
    return [1.0 if inside else share * (value == last) for inside, value in zip(better, values, strict=True)]


def _mean(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return math.fsum(known) / len(known) if known else None
