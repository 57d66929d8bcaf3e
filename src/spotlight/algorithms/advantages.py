"""Rewards to advantages, as pure functions of whole groups.

Invariants: every group's advantages have mean 0 (before clipping: the clip comes before importance does its
weighting, and centres are weighted, so the sum over a group stays 0); an affine change of the rewards changes
nothing (up to epsilon); the order of groups, of samples within a group and of rewards changes nothing, not
even a bit, because all sums are exact (``math.fsum``). Float64 throughout. Groups may have lost samples.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class AdvantageParams:
    """Conventions of the scaling.

    Attributes:
        std: scale by the spread of the whole batch ("global") or of each prompt's group ("group").
        ddof: 0 for the population standard deviation (Flow-GRPO), 1 for the unbiased (DanceGRPO).
        epsilon: added to the standard deviation: 1e-4 (Flow-GRPO), 1e-8 (DanceGRPO).
        clip: advantages are clipped to [-clip, clip].
        combine: several rewards: weighted sum first ("sum"), or normalise each on its own and sum the
            advantages by weight ("normalise_each", MixGRPO).
    """

    std: Literal["global", "group"] = "global"
    ddof: Literal[0, 1] = 0
    epsilon: float = 1e-4
    clip: float = 5.0
    combine: Literal["sum", "normalise_each"] = "sum"

    def __post_init__(self) -> None:
        for key, value, known in (
            ("std", self.std, ("global", "group")),
            ("ddof", self.ddof, (0, 1)),
            ("combine", self.combine, ("sum", "normalise_each")),
        ):
            if value not in known:
                raise ValueError(f"advantage {key} is {value!r}; expected one of {known}")
        for key, number in (("epsilon", self.epsilon), ("clip", self.clip)):
            if not number > 0:
                raise ValueError(f"advantage {key} is {number}; expected a number above 0")


def advantages(
    groups: Sequence[Sequence[Mapping[str, float]]],
    weights: Mapping[str, float],
    params: AdvantageParams,
    importance: Sequence[Sequence[float]] | None = None,
) -> list[list[float]]:
    """Advantages of one iteration's groups, in the order given.

    Args:
        groups: one entry a prompt, one mapping (reward name to value) a surviving sample. A group of one
            gets advantage 0.
        weights: factor of each reward; its names are those every sample must have.
        params: conventions.
        importance: a factor above 0 for each sample, that undoes how its seed was chosen: means and spreads
            are weighted with it, and advantages multiplied by it. None: 1 each.

    Raises:
        ValueError: a sample's rewards are not those of ``weights``, a reward is not finite, a group is empty,
            or importance is not one positive number a sample.
    """
    check_rewards(groups, weights)
    if importance is not None:
        _check_importance(groups, importance)
    if params.combine == "sum":
        totals = [[weighted_sum(sample, weights) for sample in group] for group in groups]
        raw = _normalise(totals, params, importance)
    else:
        each = {
            name: _normalise([[sample[name] for sample in group] for group in groups], params, importance)
            for name in weights
        }
        raw = [
            [weighted_sum({name: each[name][g][i] for name in weights}, weights) for i in range(len(group))]
            for g, group in enumerate(groups)
        ]
    clipped = [[min(max(a, -params.clip), params.clip) for a in group] for group in raw]
    if importance is None:
        return clipped
    return [[w * a for w, a in zip(*pair, strict=True)] for pair in zip(importance, clipped, strict=True)]


def weighted_sum(rewards: Mapping[str, float], weights: Mapping[str, float]) -> float:
    """The sum of a sample's rewards by weight."""
    return math.fsum(weights[name] * rewards[name] for name in weights)


def _normalise(
    groups: Sequence[Sequence[float]],
    params: AdvantageParams,
    importance: Sequence[Sequence[float]] | None,
) -> list[list[float]]:
    shares = [[1.0] * len(group) for group in groups] if importance is None else importance
    means = [mean_of(group, share) for group, share in zip(groups, shares, strict=True)]
    if params.std == "global":
        everything = [value for group in groups for value in group]
        spread = spread_of(everything, params.ddof, [weight for share in shares for weight in share])
        spreads = [spread] * len(groups)
    else:
        spreads = [spread_of(group, params.ddof, share) for group, share in zip(groups, shares, strict=True)]
    return [
        [(value - mean) / (spread + params.epsilon) for value in group]
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
