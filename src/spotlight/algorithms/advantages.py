"""Group-relative advantages, as pure functions of complete groups.

Invariants: a group's (importance-weighted) advantages sum to 0 before clipping; affine changes of the rewards
change nothing (up to epsilon); the order of groups, samples and rewards changes no bit, because all sums
are exact (``math.fsum``). Float64 throughout. Groups may have lost samples.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from spotlight.config.sections.algorithm import AdvantageConfig


def advantages(
    groups: Sequence[Sequence[Mapping[str, float]]],
    weights: Mapping[str, float],
    config: AdvantageConfig,
    importance: Sequence[Sequence[float]] | None = None,
    others: Sequence[Sequence[Mapping[str, float]]] | None = None,
) -> list[list[float]]:
    """Advantages of one iteration's groups, in the order given.

    Args:
        groups: per prompt, one mapping (reward name to value) per surviving sample. A group of one gets 0.
        weights: factor of each reward; every sample must have exactly these rewards.
        config: conventions.
        importance: a positive factor per sample that undoes the selection of its seed: weights means and
            standard deviations, and multiplies the (clipped) advantage. None: all 1.
        others: per group, samples that were generated and are not trained; they count in standard deviations
            only, so that a group's advantages sum to 0 even if only extremes are trained. None: none.

    Raises:
        ValueError: an empty group, missing, surplus or non-finite rewards, or invalid ``importance``.
    """
    others = [()] * len(groups) if others is None else others
    check_rewards([[*pair[0], *pair[1]] for pair in zip(groups, others, strict=True)], weights)
    if importance is not None:
        _check_importance(groups, importance)
    if config.combine == "sum":
        totals, more = (
            [[weighted_sum(sample, weights) for sample in group] for group in each]
            for each in (groups, others)
        )
        raw = _normalise(totals, config, importance, more)
    else:
        each = {
            name: _normalise(
                [[sample[name] for sample in group] for group in groups],
                config,
                importance,
                [[sample[name] for sample in group] for group in others],
            )
            for name in weights
        }
        raw = [
            [weighted_sum({name: each[name][g][i] for name in weights}, weights) for i in range(len(group))]
            for g, group in enumerate(groups)
        ]
    if config.combine == "gdpo":
        raw = _over_the_batch(raw, config, importance)
    clipped = [[min(max(a, -config.clip), config.clip) for a in group] for group in raw]
    if importance is None:
        return clipped
    return [[w * a for w, a in zip(*pair, strict=True)] for pair in zip(importance, clipped, strict=True)]


def weighted_sum(rewards: Mapping[str, float], weights: Mapping[str, float]) -> float:
    """A sample's total reward."""
    return math.fsum(weights[name] * rewards[name] for name in weights)


def _normalise(
    groups: Sequence[Sequence[float]],
    config: AdvantageConfig,
    importance: Sequence[Sequence[float]] | None,
    others: Sequence[Sequence[float]],
) -> list[list[float]]:
    shares = [[1.0] * len(group) for group in groups] if importance is None else importance
    means = [mean_of(group, share) for group, share in zip(groups, shares, strict=True)]
    wider = [[*group, *more] for group, more in zip(groups, others, strict=True)]
    wider_shares = [[*share, *[1.0] * len(more)] for share, more in zip(shares, others, strict=True)]
    if config.std == "global":
        everything = [value for group in wider for value in group]
        spread = spread_of(everything, config.ddof, [weight for share in wider_shares for weight in share])
        spreads = [spread] * len(groups)
    else:
        spreads = [
            spread_of(group, config.ddof, share) for group, share in zip(wider, wider_shares, strict=True)
        ]
    return [
        [(value - mean) / (spread + config.epsilon) for value in group]
        for group, mean, spread in zip(groups, means, spreads, strict=True)
    ]


def _over_the_batch(
    groups: Sequence[Sequence[float]],
    config: AdvantageConfig,
    importance: Sequence[Sequence[float]] | None,
) -> list[list[float]]:
    """Normalised by mean and standard deviation of all samples."""
    everything = [value for group in groups for value in group]
    shares = None if importance is None else [weight for share in importance for weight in share]
    mean, spread = mean_of(everything, shares), spread_of(everything, config.ddof, shares)
    return [[(value - mean) / (spread + config.epsilon) for value in group] for group in groups]


def mean_of(values: Sequence[float], weights: Sequence[float] | None = None) -> float:
    """Weighted mean, exact up to the last rounding; equal values give exactly that value.

    Args:
        weights: above 0, one per value; None: all equal.
    """
    weights = [1.0] * len(values) if weights is None else weights
    # Relative to the minimum, so that equal values have exactly that mean and advantages of exactly 0.
    lowest = min(values)
    total = math.fsum(weight * (value - lowest) for value, weight in zip(values, weights, strict=True))
    return lowest + total / math.fsum(weights)


def spread_of(values: Sequence[float], ddof: int, weights: Sequence[float] | None = None) -> float:
    """Weighted standard deviation; 0 for a single value, whatever ``ddof`` is."""
    if len(values) == 1:
        return 0.0
    weights = [1.0] * len(values) if weights is None else weights
    mean = mean_of(values, weights)
    squares = math.fsum(weight * (value - mean) ** 2 for value, weight in zip(values, weights, strict=True))
    freedom = (len(values) - ddof) / len(values)  # weights need not sum to the number of values
    return math.sqrt(squares / (math.fsum(weights) * freedom))


def _check_importance(
    groups: Sequence[Sequence[Mapping[str, float]]], importance: Sequence[Sequence[float]]
) -> None:
    sizes, found = [len(group) for group in groups], [len(share) for share in importance]
    if sizes != found:
        raise ValueError(f"groups of {sizes} samples have {found} importance weights; expected one a sample")
    for share in importance:
        for weight in share:
            if not 0 < weight < math.inf:
                raise ValueError(f"a sample's importance is {weight}; expected a finite number above 0")


def check_rewards(groups: Sequence[Sequence[Mapping[str, float]]], weights: Mapping[str, float]) -> None:
    """Raise ValueError unless every group has samples, with finite values of exactly ``weights``' rewards."""
    for g, group in enumerate(groups):
        if not group:
            raise ValueError(f"group {g} has no samples; leave out groups that lost all of theirs")
        for i, sample in enumerate(group):
            if sample.keys() != weights.keys():
                raise ValueError(
                    f"sample {i} of group {g} has the rewards {sorted(sample)}; expected {sorted(weights)}"
                )
            for name, value in sample.items():
                if not math.isfinite(value):
                    raise ValueError(
                        f"reward {name!r} of sample {i} of group {g} is {value}; expected a finite number "
                        "(drop the sample instead)"
                    )
