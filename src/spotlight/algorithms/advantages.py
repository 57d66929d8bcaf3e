"""Group-relative advantages, as pure functions: of complete groups, and of samples whose group is incomplete.

Invariants of complete groups: a group's advantages sum to 0 before clipping; affine changes of the rewards
change nothing (up to epsilon); the order of groups, samples and rewards changes no bit, because all sums
are exact (``math.fsum``). Float64 throughout. Groups may have lost samples.

Of an incomplete group A = (R - b) / (s + ε), clipped. ``docs/maths.md`` derives bias and variance of the
three baselines b and scales s:

- ``group``: wait for the whole group (:func:`advantages`).
- ``slice``: the group's samples so far, leave-one-out (:func:`slice_advantages`).
- ``exploration``: previews of other seeds that the prompt's group has (:func:`exploration_advantages`).

b and s depend on other samples only, so before clipping the expected gradient keeps its direction
(unless seeds were selected by those values); the order of samples changes no bit.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from spotlight.config.sections.algorithm import AdvantageConfig
from spotlight_rewards.reward_config import REWARD


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


# -- advantages of samples whose group is still incomplete: A = (R - b) / (s + ε), clipped. Pure functions -


Rewards = Mapping[str, float]
"""A sample's value of each reward."""

_OTHERS_MIN = 2
"""So many samples have a standard deviation."""


def slice_advantages(
    arrived: Sequence[Rewards],
    seen: Sequence[Rewards],
    weights: Mapping[str, float],
    config: AdvantageConfig,
) -> list[float]:
    """Leave-one-out advantages of a slice of one prompt's group: [arrived].

    Args:
        arrived: the slice.
        seen: the group's earlier slices.
        weights: factor of each reward; every sample must have exactly these rewards.
        config: conventions; ``std`` is ignored. Scales are of the other samples too, so early slices, which
            have fewer, are scaled more.

    Raises:
        ValueError: fewer than 2 other samples, or invalid rewards.
    """
    check_rewards([arrived, *([seen] if seen else [])], weights)
    others = len(arrived) + len(seen) - 1
    if others < _OTHERS_MIN:
        raise ValueError(
            f"a sample of the slice has {others} other(s) of its group to be compared with; expected at "
            f"least {_OTHERS_MIN}: make the first slice larger"
        )
    rows = [_channels(sample, weights, config) for sample in (*arrived, *seen)]
    return [_compared(rows[i], [*rows[:i], *rows[i + 1 :]], weights, config) for i in range(len(arrived))]


def exploration_advantages(
    arrived: Sequence[Rewards],
    explored: Sequence[Rewards],
    weights: Mapping[str, float],
    config: AdvantageConfig,
) -> list[float]:
    """Advantages of samples of one prompt relative to previews of OTHER seeds: [arrived].

    Previews may use older weights or fewer denoising steps: that adds variance, no bias.

    Args:
        arrived: the samples.
        explored: previews of seeds that none of the samples has: a seed's own preview is correlated with it.
        weights: as in :func:`slice_advantages`.
        config: as in :func:`slice_advantages`.

    Raises:
        ValueError: fewer than 2 previews, or invalid rewards.
    """
    if len(explored) < _OTHERS_MIN:
        raise ValueError(
            f"{len(explored)} other seeds of the prompt were explored; expected at least {_OTHERS_MIN}: "
            "explore more of them, or wait for the group"
        )
    check_rewards([arrived, explored], weights)
    others = [_channels(sample, weights, config) for sample in explored]
    return [_compared(_channels(sample, weights, config), others, weights, config) for sample in arrived]


def _channels(sample: Rewards, weights: Mapping[str, float], config: AdvantageConfig) -> Rewards:
    """What is compared between samples: their total rewards, or each reward by itself."""
    return {REWARD: weighted_sum(sample, weights)} if config.combine == "sum" else sample


def _compared(
    own: Rewards, others: Sequence[Rewards], weights: Mapping[str, float], config: AdvantageConfig
) -> float:
    """A sample's advantage, from what :func:`_channels` says of it and of those it is compared with."""
    each: dict[str, float] = {}
    for name, value in own.items():
        values = [other[name] for other in others]
        each[name] = (value - mean_of(values)) / (spread_of(values, config.ddof) + config.epsilon)
    total = each[REWARD] if config.combine == "sum" else weighted_sum(each, weights)
    return min(max(total, -config.clip), config.clip)
