"""Rewards to advantages, as pure functions of whole groups.

Invariants: every group's advantages have mean 0 (before clipping: the clip comes before importance does its
weighting, and centres are weighted, so the sum over a group stays 0); an affine change of the rewards changes
nothing (up to epsilon); the order of groups, of samples within a group and of rewards changes nothing, not
even a bit, because all sums are exact (``math.fsum``). Float64 throughout. Groups may have lost samples.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from spotlight.config.algorithm import AdvantageConfig


def advantages(
    groups: Sequence[Sequence[Mapping[str, float]]],
    weights: Mapping[str, float],
    config: AdvantageConfig,
    importance: Sequence[Sequence[float]] | None = None,
) -> list[list[float]]:
    """Advantages of one iteration's groups, in the order given.

    Args:
        groups: one entry a prompt, one mapping (reward name to value) a surviving sample. A group of one
            gets advantage 0.
        weights: factor of each reward; its names are those every sample must have.
        config: conventions.
        importance: a factor above 0 for each sample, that undoes how its seed was chosen: means and spreads
            are weighted with it, and advantages multiplied by it. None: 1 each.

    Raises:
        ValueError: a sample's rewards are not those of ``weights``, a reward is not finite, a group is empty,
            or importance is not one positive number a sample.
    """
    check_rewards(groups, weights)
    if importance is not None:
        _check_importance(groups, importance)
    if config.combine == "sum":
        totals = [[weighted_sum(sample, weights) for sample in group] for group in groups]
        raw = _normalise(totals, config, importance)
    else:
        each = {
            name: _normalise([[sample[name] for sample in group] for group in groups], config, importance)
            for name in weights
        }
        raw = [
            [weighted_sum({name: each[name][g][i] for name in weights}, weights) for i in range(len(group))]
            for g, group in enumerate(groups)
        ]
    clipped = [[min(max(a, -config.clip), config.clip) for a in group] for group in raw]
    if importance is None:
        return clipped
    return [[w * a for w, a in zip(*pair, strict=True)] for pair in zip(importance, clipped, strict=True)]


def weighted_sum(rewards: Mapping[str, float], weights: Mapping[str, float]) -> float:
    """The sum of a sample's rewards by weight."""
    return math.fsum(weights[name] * rewards[name] for name in weights)


def _normalise(
    groups: Sequence[Sequence[float]],
    config: AdvantageConfig,
    importance: Sequence[Sequence[float]] | None,
) -> list[list[float]]:
    shares = [[1.0] * len(group) for group in groups] if importance is None else importance
    means = [mean_of(group, share) for group, share in zip(groups, shares, strict=True)]
    if config.std == "global":
        everything = [value for group in groups for value in group]
        spread = spread_of(everything, config.ddof, [weight for share in shares for weight in share])
        spreads = [spread] * len(groups)
    else:
        spreads = [spread_of(group, config.ddof, share) for group, share in zip(groups, shares, strict=True)]
    return [
        [(value - mean) / (spread + config.epsilon) for value in group]
        for group, mean, spread in zip(groups, means, spreads, strict=True)
    ]


def mean_of(values: Sequence[float], weights: Sequence[float] | None = None) -> float:
    """Exact up to the last rounding, and exactly the value where all are equal.

    Args:
        weights: above 0, one a value; None: all the same.
    """
    weights = [1.0] * len(values) if weights is None else weights
    # Around the minimum, so that equal values have exactly that mean and advantages of exactly 0.
    lowest = min(values)
    total = math.fsum(weight * (value - lowest) for value, weight in zip(values, weights, strict=True))
    return lowest + total / math.fsum(weights)


def spread_of(values: Sequence[float], ddof: int, weights: Sequence[float] | None = None) -> float:
    """Standard deviation; 0 of a single value, whatever the convention. ``weights`` as in :func:`mean_of`."""
    if len(values) == 1:
        return 0.0
    weights = [1.0] * len(values) if weights is None else weights
    mean = mean_of(values, weights)
    squares = math.fsum(weight * (value - mean) ** 2 for value, weight in zip(values, weights, strict=True))
    freedom = (len(values) - ddof) / len(values)  # of weights that add up to the number of values
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
    """Raise ValueError unless every group has samples, with finite rewards of the names in ``weights``."""
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
