"""Which workers of a node denoise together: pure functions of sizes and load.

Ulysses replicates weights and shards activations: the degree, a divisor of the attention heads, can change
without moving weights. Degree 1 has the highest throughput. A higher degree shortens one rollout, which pays
with fewer rollouts than workers and large samples (``ClusterPlan.sp_pays``), or is required by memory.

Published for a 20B model, ms per step at degrees 1 / 2 / 4: 512 x 512 155 / 161 / 172; 1024 x 1024 605 / 350
/ 207; 1536 x 1536 1557 / 880 / 464.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

from spotlight.scheduler.plan import ClusterPlan

Member = TypeVar("Member")


def choose_degree(plan: ClusterPlan, workers: int, rollouts: int) -> int:
    """The degree for ``rollouts`` outstanding on ``workers``.

    The largest with a group per rollout; the smallest for small samples, or with more rollouts than workers.
    """
    degrees = plan.degrees
    if not plan.sp_pays or rollouts == 0:
        return degrees[0]
    fitting = [degree for degree in degrees if degree * rollouts <= workers]
    return fitting[-1] if fitting else degrees[0]


def form_groups(workers: Sequence[Member], degree: int, degrees: Sequence[int]) -> list[tuple[Member, ...]]:
    """Divide a node's free workers into groups of ``degree``, the remainder into the largest that fit.

    Args:
        degrees: allowed group sizes, ascending.

    Returns:
        Groups of neighbours. Workers too few for the smallest degree are left out.
    """
    groups: list[tuple[Member, ...]] = []
    left = list(workers)
    while left:
        fitting = [allowed for allowed in degrees if allowed <= min(degree, len(left))]
        if not fitting:
            break
        groups.append(tuple(left[: fitting[-1]]))
        left = left[fitting[-1] :]
    return groups
