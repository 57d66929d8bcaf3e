"""Group-relative advantages, as pure functions of complete groups.

Invariants: a group's advantages sum to 0 before clipping; affine changes of the rewards
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
    others: Sequence[Sequence[Mapping[str, float]]] | None = None,
) -> list[list[float]]:
    """Advantages of one iteration's groups, in the order given.

    Args:
        groups: per prompt, one mapping (reward name to value) per surviving sample. A group of one gets 0.
        weights: factor of each reward; every sample must have exactly these rewards.
        config: conventions.
        others: per group, samples that were generated and are not trained; they count in standard deviations
            only, so that a group's advantages sum to 0 even if only extremes are trained. None: none.

    Raises:
        ValueError: an empty group, missing, surplus or non-finite rewards.
    """
    others = [()] * len(groups) if others is None else others
    check_rewards([[*pair[0], *pair[1]] for pair in zip(groups, others, strict=True)], weights)
    if config.combine == "sum":
        totals, more = (
            [[weighted_sum(sample, weights) for sample in group] for group in each]
            for each in (groups, others)
        )
        raw = _normalise(totals, config, more)
    else:
        each = {
            name: _normalise(
                [[sample[name] for sample in group] for group in groups],
                config,
                [[sample[name] for sample in group] for group in others],
            )
            for name in weights
        }
        raw = [
            [weighted_sum({name: each[name][g][i] for name in weights}, weights) for i in range(len(group))]
            for g, group in enumerate(groups)
        ]
    if config.combine == "gdpo":
        raw = _over_the_batch(raw, config)
    return [[min(max(a, -config.clip), config.clip) for a in group] for group in raw]


def weighted_sum(rewards: Mapping[str, float], weights: Mapping[str, float]) -> float:
    """A sample's total reward."""
    return math.fsum(weights[name] * rewards[name] for name in weights)


def _normalise(
    groups: Sequence[Sequence[float]],
    config: AdvantageConfig,
    others: Sequence[Sequence[float]],
) -> list[list[float]]:
    means = [mean_of(group) for group in groups]
    wider = [[*group, *more] for group, more in zip(groups, others, strict=True)]
    if config.std == "global":
        spreads = [spread_of([value for group in wider for value in group], config.ddof)] * len(groups)
    else:
        spreads = [spread_of(group, config.ddof) for group in wider]
    return [
        [(value - mean) / (spread + config.epsilon) for value in group]
        for group, mean, spread in zip(groups, means, spreads, strict=True)
    ]


def _over_the_batch(groups: Sequence[Sequence[float]], config: AdvantageConfig) -> list[list[float]]:
    """Normalised by mean and standard deviation of all samples."""
    everything = [value for group in groups for value in group]
    mean, spread = mean_of(everything), spread_of(everything, config.ddof)
    return [[(value - mean) / (spread + config.epsilon) for value in group] for group in groups]


def mean_of(values: Sequence[float]) -> float:
    """Mean, exact up to the last rounding; equal values give exactly that value."""
    # Relative to the minimum, so that equal values have exactly that mean and advantages of exactly 0.
    lowest = min(values)
    return lowest + math.fsum(value - lowest for value in values) / len(values)


def spread_of(values: Sequence[float], ddof: int) -> float:
    """Standard deviation; 0 for a single value, whatever ``ddof`` is."""
    if len(values) == 1:
        return 0.0
    mean = mean_of(values)
    squares = math.fsum((value - mean) ** 2 for value in values)
    # Not simply `len(values) - ddof`, which may differ in the last bit: curves are kept to the last digit.
    freedom = (len(values) - ddof) / len(values)
    return math.sqrt(squares / (len(values) * freedom))


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
