"""Rewards to advantages, as pure functions of whole groups.

Invariants: every group's advantages have mean 0 (before clipping); an affine change of the rewards changes
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
    groups: Sequence[Sequence[Mapping[str, float]]], weights: Mapping[str, float], params: AdvantageParams
) -> list[list[float]]:
    """Advantages of one iteration's groups, in the order given.

    Args:
        groups: one entry a prompt, one mapping (reward name to value) a surviving sample. A group of one
            gets advantage 0.
        weights: factor of each reward; its names are those every sample must have.
        params: conventions.

    Raises:
        ValueError: a sample's rewards are not those of ``weights``, a reward is not finite, or a group is
            empty.
    """
    check_rewards(groups, weights)
    if params.combine == "sum":
        totals = [[weighted_sum(sample, weights) for sample in group] for group in groups]
        raw = _normalise(totals, params)
    else:
        each = {
            name: _normalise([[sample[name] for sample in group] for group in groups], params)
            for name in weights
        }
        raw = [
            [weighted_sum({name: each[name][g][i] for name in weights}, weights) for i in range(len(group))]
            for g, group in enumerate(groups)
        ]
    return [[min(max(a, -params.clip), params.clip) for a in group] for group in raw]


def weighted_sum(rewards: Mapping[str, float], weights: Mapping[str, float]) -> float:
    """The sum of a sample's rewards by weight."""
    return math.fsum(weights[name] * rewards[name] for name in weights)


def _normalise(groups: Sequence[Sequence[float]], params: AdvantageParams) -> list[list[float]]:
    means = [mean_of(group) for group in groups]
    if params.std == "global":
        spread = spread_of([value for group in groups for value in group], params.ddof)
        spreads = [spread] * len(groups)
    else:
        spreads = [spread_of(group, params.ddof) for group in groups]
    return [
        [(value - mean) / (spread + params.epsilon) for value in group]
        for group, mean, spread in zip(groups, means, spreads, strict=True)
    ]


def mean_of(values: Sequence[float]) -> float:
    """Exact up to the last rounding, and exactly the value where all are equal."""
    # Around the minimum, so that equal values have exactly that mean and advantages of exactly 0.
    lowest = min(values)
    return lowest + math.fsum(value - lowest for value in values) / len(values)


def spread_of(values: Sequence[float], ddof: int) -> float:
    """Standard deviation; 0 of a single value, whatever the convention."""
    if len(values) == 1:
        return 0.0
    mean = mean_of(values)
    return math.sqrt(math.fsum((value - mean) ** 2 for value in values) / (len(values) - ddof))


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
