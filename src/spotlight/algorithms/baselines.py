"""Advantages of samples whose group is still incomplete: A = (R - b) / (s + ε), clipped. Pure functions.

``docs/maths.md`` derives bias and variance of the three baselines b and scales s:

- ``group``: wait for the whole group (:func:`spotlight.algorithms.advantages.advantages`).
- ``slice``: the group's samples so far, leave-one-out (:func:`slice_advantages`).
- ``exploration``: previews of other seeds that the prompt's group has (:func:`exploration_advantages`).

Invariants: b and s depend on other samples only, so before clipping the expected gradient keeps its direction
(unless seeds were selected by those values); the order of samples changes no bit.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from spotlight.algorithms.advantages import (
    check_rewards,
    mean_of,
    spread_of,
    weighted_sum,
)
from spotlight.config.sections.algorithm import AdvantageConfig
from spotlight_rewards.reward_config import REWARD

Rewards = Mapping[str, float]
"""A sample's value of each reward."""


def slice_advantages(
    arrived: Sequence[Rewards],
    seen: Sequence[Rewards],
    weights: Mapping[str, float],
    config: AdvantageConfig,
    spreads: Mapping[str, float] | None = None,
) -> list[float]:
    """Leave-one-out advantages of a slice of one prompt's group: [arrived].

    Args:
        arrived: the slice.
        seen: the group's earlier slices.
        weights: factor of each reward; every sample must have exactly these rewards.
        config: conventions; ``std`` is ignored.
        spreads: scales known in advance, such as the previous iteration's standard deviations, so that all
            slices are scaled alike. None: computed from the other samples, which scales early slices more.

    Raises:
        ValueError: too few other samples (at least 1; 2 without ``spreads``), or invalid rewards.
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
    """Advantages of samples of one prompt relative to previews of OTHER seeds: [arrived].

    Previews may use older weights or fewer denoising steps: that adds variance, no bias.

    Args:
        arrived: the samples.
        explored: previews of seeds that none of the samples has: a seed's own preview is correlated with it.
        weights: as in :func:`slice_advantages`.
        config: as in :func:`slice_advantages`.
        spreads: scales known in advance; None: computed from ``explored``.

    Raises:
        ValueError: too few previews (at least 1; 2 without ``spreads``), or invalid rewards.
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


def _channels(
    samples: Sequence[Rewards], weights: Mapping[str, float], config: AdvantageConfig
) -> dict[str, list[float]]:
    if config.combine == "sum":
        return {REWARD: [weighted_sum(sample, weights) for sample in samples]}
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
    total = row[REWARD] if config.combine == "sum" else weighted_sum(row, weights)
    return min(max(total, -config.clip), config.clip)
