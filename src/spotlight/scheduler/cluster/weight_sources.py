"""Where a worker gets the policy version it needs. Pure.

The adapter is small and comes from the store. Full weights are copied from a worker on the same node; if none
has them, one worker downloads them from the store while its neighbours wait.

Versions count optimizer steps, so a learner restored from a checkpoint reuses version numbers. The lineage
counts restores and tells them apart.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from spotlight.scheduler.cluster.members import Worker
from spotlight.scheduler.types import PolicyVersion, WeightKind, WorkerId


@dataclass(frozen=True, slots=True)
class WeightSource:
    """What to pull, and from which worker; ``peer`` None is the store."""

    kind: WeightKind
    peer: WorkerId | None


def choose_source(
    worker: Worker, neighbours: Iterable[Worker], target: PolicyVersion, publishes: WeightKind
) -> WeightSource | None:
    """Where a worker gets version ``target``; None: wait for a neighbour's download."""
    if worker.based and publishes is WeightKind.ADAPTER:
        return WeightSource(WeightKind.ADAPTER, None)
    waits = False
    for neighbour in neighbours:
        if neighbour.id == worker.id:
            continue
        if neighbour.based and (publishes is WeightKind.ADAPTER or neighbour.version == target):
            return WeightSource(WeightKind.FULL, neighbour.id)
        waits = waits or neighbour.fetching
    return None if waits else WeightSource(WeightKind.FULL, None)
