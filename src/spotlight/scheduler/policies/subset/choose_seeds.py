"""Which samples of a whole group are trained. Pure.

The choice depends on the rewards, the seeds and the run seed alone, never on arrival: a resumed run, every
driver and every rank choose alike.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from spotlight.config.sections.algorithm import TrainPolicy
from spotlight.scheduler.policies.selection import SelectionPolicy, select


def choose_seeds(
    rewards: Mapping[int, float], count: int, policy: TrainPolicy, draw_seed: int
) -> frozenset[int]:
    """``count`` seeds, or all if there are no more. Equal rewards rank by seed; seeds are hashes.

    Of a group whose rewards differ, every policy but ``random`` chooses rewards that differ.

    Args:
        rewards: by seed.
        count: at least 2.
        draw_seed: fixes what is random.
    """
    if len(rewards) <= count:
        return frozenset(rewards)
    if policy == "farthest":
        return frozenset(_farthest(rewards, count))
    found = select(rewards, count, SelectionPolicy(policy), draw_seed=draw_seed, draw_flat=True)
    return frozenset(found.seeds)


def _farthest(rewards: Mapping[int, float], count: int) -> list[int]:
    """Those farthest from the mean, from both its sides: their advantages are relative to their own mean."""
    mean = math.fsum(rewards.values()) / len(rewards)
    ranked = sorted(rewards, key=lambda seed: (-abs(rewards[seed] - mean), seed))
    chosen = ranked[:count]
    low = min(ranked, key=lambda seed: (rewards[seed], seed))
    high = min(ranked, key=lambda seed: (-rewards[seed], seed))
    # Where rounding makes the mean an extreme, a side seems empty although that extreme is chosen.
    if all(rewards[seed] >= mean for seed in chosen) and low not in chosen:
        chosen[-1] = low
    elif all(rewards[seed] <= mean for seed in chosen) and high not in chosen:
        chosen[-1] = high
    return chosen
