"""Which samples of a whole group are trained. Pure.

The choice depends on the rewards, the seeds and the run seed alone, never on arrival: a resumed run, every
driver and every rank choose alike.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from spotlight.config.sections.algorithm import TrainPolicy
from spotlight.scheduler.exploration.selection import SelectionPolicy, select


def choose_seeds(
    rewards: Mapping[int, float], count: int, policy: TrainPolicy, draw_seed: int
) -> frozenset[int]:
    """``count`` seeds, or all if there are no more. Equal rewards rank by seed; seeds are hashes.

    Args:
        rewards: by seed.
        draw_seed: fixes what is random.
    """
    if len(rewards) <= count:
        return frozenset(rewards)
    if policy == "farthest":
        mean = math.fsum(rewards.values()) / len(rewards)
        ranked = sorted(rewards, key=lambda seed: (-abs(rewards[seed] - mean), seed))
        return frozenset(ranked[:count])
    found = select(rewards, count, SelectionPolicy(policy), draw_seed=draw_seed, draw_flat=True)
    return frozenset(found.seeds)
