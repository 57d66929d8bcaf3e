"""Which previewed seeds form a group: pure functions of preview rewards.

Invariants
    1. The choice depends on preview rewards, seeds and ``draw_seed`` only, not on arrival order or
       regenerated rewards. Ties rank by seed; seeds are hashes, so that is random yet reproducible.
    2. Previews without contrast choose nothing: the group takes fresh seeds, which may still differ. With
       ``draw_flat`` it draws from the pool instead: redrawing flat pools, more frequent where rewards are
       low, would be biased.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import accumulate

from spotlight.scheduler.seeds import derive_seed

_TIE = 1e-12
"""Relative difference below which variances count as equal (rounding of prefix sums)."""


class SelectionPolicy(StrEnum):
    """How seeds are chosen among previews.

    MAX_VARIANCE: the subset with the largest reward variance (PODS, arXiv 2504.13818).
    TOP_AND_BOTTOM: half with the highest rewards, half with the lowest (one more of the highest if odd).
    TOP: the highest rewards. RANDOM: uniform, the control.
    """

    MAX_VARIANCE = "max_variance"
    TOP_AND_BOTTOM = "top_and_bottom"
    TOP = "top"
    RANDOM = "random"


class SelectionVerdict(StrEnum):
    """Outcome for a pool of previews."""

    CHOSEN = "chosen"
    NO_CONTRAST = "no_contrast"
    TOO_FEW = "too_few"


@dataclass(frozen=True, slots=True)
class Selection:
    """Seeds chosen among previews.

    Attributes:
        seeds: those drawn at random last; empty with too few previews, or without contrast unless
            ``draw_flat``.
        kept_at_random: number of seeds, at the end, drawn uniformly from those left by rank: all under RANDOM
            or without contrast.
    """

    verdict: SelectionVerdict
    seeds: tuple[int, ...] = ()
    kept_at_random: int = 0


def select(
    rewards: Mapping[int, float],
    count: int,
    policy: SelectionPolicy,
    *,
    draw_seed: int = 0,
    kept_at_random: int = 0,
    contrast_min: float = 0.0,
    draw_flat: bool = False,
) -> Selection:
    """Choose ``count`` seeds.

    Args:
        rewards: preview reward by seed.
        draw_seed: fixes all randomness.
        kept_at_random: number drawn uniformly from the seeds left by rank, to measure ranking fidelity and a
            random group's contrast.
        contrast_min: rewards within this range have no contrast.
        draw_flat: without contrast, draw uniformly instead of choosing none.

    Raises:
        ValueError: ``count`` below 1, or ``kept_at_random`` outside 0..count.
    """
    if count < 1 or not 0 <= kept_at_random <= count:
        raise ValueError(
            f"selection of {count} seeds, {kept_at_random} of them at random; expected at least 1 seed, "
            "and at most as many at random"
        )
    if len(rewards) < count:
        return Selection(SelectionVerdict.TOO_FEW)
    if max(rewards.values()) - min(rewards.values()) <= contrast_min:
        verdict = SelectionVerdict.NO_CONTRAST
        return _with_drawn(verdict, rewards, (), count, draw_seed) if draw_flat else Selection(verdict)
    if len(rewards) == count:
        return Selection(SelectionVerdict.CHOSEN, tuple(sorted(rewards)))
    ranked = sorted(rewards, key=lambda seed: (rewards[seed], seed))
    drawn = count if policy is SelectionPolicy.RANDOM else kept_at_random
    chosen = _by_rank(ranked, rewards, count - drawn, policy)
    return _with_drawn(SelectionVerdict.CHOSEN, rewards, chosen, drawn, draw_seed)


def max_variance(rewards: Sequence[float], count: int) -> int:
    """How many of the highest belong to the ``count`` rewards of largest variance; the rest are the lowest.

    The best subset always consists of some highest and some lowest (PODS, arXiv 2504.13818), so prefix sums
    find it in O(n). Ties go to the most even split.

    Args:
        rewards: ascending.
    """
    centre = rewards[len(rewards) // 2]  # centred, as prefix sums of rewards far from 0 lose digits
    shifted = [value - centre for value in rewards]
    sums = [0.0, *accumulate(shifted)]
    squares = [0.0, *accumulate(value * value for value in shifted)]
    best_high, best = -1, 0.0
    for high in sorted(range(count + 1), key=lambda high: (abs(2 * high - count), -high)):
        low, start = count - high, len(rewards) - high
        total = sums[low] + sums[-1] - sums[start]
        spread = squares[low] + squares[-1] - squares[start] - total * total / count
        if best_high < 0 or spread > best * (1 + _TIE):
            best_high, best = high, spread
    return best_high


def sample_variance(values: Sequence[float]) -> float:
    """Unbiased variance (divisor n - 1), the contrast of a group; 0 for fewer than two values."""
    if len(values) < 2:
        return 0.0
    mean = values[0] + sum(value - values[0] for value in values) / len(values)
    return sum((value - mean) ** 2 for value in values) / (len(values) - 1)


def _by_rank(
    ranked: Sequence[int], rewards: Mapping[int, float], count: int, policy: SelectionPolicy
) -> list[int]:
    if count == 0:
        return []
    match policy:
        case SelectionPolicy.MAX_VARIANCE:
            high = max_variance([rewards[seed] for seed in ranked], count)
        case SelectionPolicy.TOP_AND_BOTTOM:
            high = count - count // 2
        case _:
            high = count
    return [*reversed(ranked[len(ranked) - high :]), *ranked[: count - high]]


def _with_drawn(
    verdict: SelectionVerdict,
    rewards: Mapping[int, float],
    chosen: Sequence[int],
    count: int,
    draw_seed: int,
) -> Selection:
    """Those chosen by rank, and ``count`` of the others at random."""
    shuffled = sorted(rewards.keys() - {*chosen}, key=lambda seed: derive_seed(draw_seed, "draw", seed))
    return Selection(verdict, (*chosen, *shuffled[:count]), count)
