"""Advantages of samples whose group is not complete yet, as pure functions: A = (R - b) / (s + ε), clipped.

Three choices of the baseline b and the spread s; ``docs/maths.md`` has the bias and variance of each.

- ``group``: wait for the group (:func:`spotlight.algorithms.advantages.advantages`).
- ``slice``: what arrived of the group so far, the sample itself left out (:func:`slice_advantages`).
- ``exploration``: other seeds of the prompt, explored before: no waiting (:func:`exploration_advantages`).

Invariants: b and s of a sample are functions of other samples alone, so the gradient has the direction of
the true one in expectation (before clipping), whatever they are, unless seeds were chosen by what b and s are
made of (``docs/maths.md``); the order of samples changes not a bit.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from spotlight.algorithms.advantages import (
    check_rewards,
    mean_of,
    spread_of,
    weighted_sum,
)
from spotlight.config.algorithm import AdvantageConfig

Rewards = Mapping[str, float]
"""A sample's value of each reward."""
TOTAL = "reward"
"""Names the weighted sum of all rewards among spreads."""


def slice_advantages(
    arrived: Sequence[Rewards],
    seen: Sequence[Rewards],
    weights: Mapping[str, float],
    config: AdvantageConfig,
    spreads: Mapping[str, float] | None = None,
) -> list[float]:
    """Advantages of a slice of one prompt's group, by all others of the group that are there: [arrived].

    Args:
        arrived: the slice.
        seen: the group's earlier slices.
        weights: factor of each reward; its names are those every sample must have.
        config: conventions; ``std`` does not matter.
        spreads: known before these samples, such as :func:`spreads_of` the iteration before: every slice
            is then scaled alike. None: that of the others, which scales early slices more.

    Raises:
        ValueError: too few others (one, or two where the spread is theirs), or rewards are not as they
            should be.
    """
    check_rewards([arrived, *([seen] if seen else [])], weights)
    others, wanted = len(arrived) + len(seen) - 1, 1 if spreads is not None else 2
    if others < wanted:
        raise ValueError(
            f"a sample of the slice has {others} other(s) of its group to be compared with; expected at "
            f"least {wanted}: make the first slice larger, or give spreads"
        )
    channels = _channels([*arrived, *seen], weights, config)
    rows = []
    for i in range(len(arrived)):
        rest = {name: [*values[:i], *values[i + 1 :]] for name, values in channels.items()}
        rows.append(_advantage({name: values[i] for name, values in channels.items()}, rest, spreads, config))
    return [_combined(row, weights, config) for row in rows]


def exploration_advantages(
    arrived: Sequence[Rewards],
    explored: Sequence[Rewards],
    weights: Mapping[str, float],
    config: AdvantageConfig,
    spreads: Mapping[str, float] | None = None,
) -> list[float]:
    """Advantages of any samples of one prompt, by what exploration found at OTHER seeds: [arrived].

    Exploration may have used older weights or fewer denoising steps: that costs variance, no bias.

    Args:
        arrived: the samples.
        explored: of seeds that none of the samples has: a seed's own exploration is correlated with it.
        weights: factor of each reward; its names are those every sample must have.
        config: conventions; ``std`` does not matter.
        spreads: known before these samples; None: that of ``explored``.

    Raises:
        ValueError: too few explored (none, or one where the spread is theirs), or rewards are not as they
            should be.
    """
    wanted = 1 if spreads is not None else 2
    if len(explored) < wanted:
        raise ValueError(
            f"{len(explored)} other seeds of the prompt were explored; expected at least {wanted}: explore "
            "more of them, or wait for the group"
        )
    check_rewards([arrived, explored], weights)
    others = _channels(explored, weights, config)
    channels = _channels(arrived, weights, config)
    rows = [
        _advantage({name: values[i] for name, values in channels.items()}, others, spreads, config)
        for i in range(len(arrived))
    ]
    return [_combined(row, weights, config) for row in rows]


def spreads_of(
    groups: Sequence[Sequence[Rewards]], weights: Mapping[str, float], config: AdvantageConfig
) -> dict[str, float]:
    """Standard deviation over all samples of all groups, of their sum or of each reward as ``combine`` says.

    That is what ``advantage.std`` "global" divides by.
    """
    check_rewards(groups, weights)
    channels = _channels([sample for group in groups for sample in group], weights, config)
    return {name: spread_of(values, config.ddof) for name, values in channels.items()}


def _channels(
    samples: Sequence[Rewards], weights: Mapping[str, float], config: AdvantageConfig
) -> dict[str, list[float]]:
    """What is normalised: the sums, or each reward."""
    if config.combine == "sum":
        return {TOTAL: [weighted_sum(sample, weights) for sample in samples]}
    return {name: [sample[name] for sample in samples] for name in weights}


def _advantage(
    sample: Rewards,
    others: Mapping[str, Sequence[float]],
    spreads: Mapping[str, float] | None,
    config: AdvantageConfig,
) -> dict[str, float]:
    row = {}
    for name, value in sample.items():
        if spreads is not None and name not in spreads:
            raise ValueError(f"spreads has {sorted(spreads)}; expected one of {name!r}")
        spread = spread_of(others[name], config.ddof) if spreads is None else spreads[name]
        row[name] = (value - mean_of(others[name])) / (spread + config.epsilon)
    return row


def _combined(row: Mapping[str, float], weights: Mapping[str, float], config: AdvantageConfig) -> float:
    total = row[TOTAL] if config.combine == "sum" else weighted_sum(row, weights)
    return min(max(total, -config.clip), config.clip)
