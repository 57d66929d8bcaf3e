"""Who holds which policy version, and where a worker gets the one it needs. Pure.

The adapter comes from the store: it is small. All weights are copied from a worker of the same node that has
them; where none has, one worker fetches them from the store and its neighbours wait for it.

Versions count optimizer steps, so a learner restored from a checkpoint makes some numbers again. The lineage
counts restores: what was pulled under an older one is not what the number says.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from spotlight.scheduler.types import PolicyVersion, WeightKind, WorkerId


@dataclass(frozen=True, slots=True)
class Holding:
    """What one worker of a node has.

    Attributes:
        based: the model's base weights are loaded.
        version: the policy version loaded; None while unknown.
        fetching: it is pulling all weights from the store right now.
    """

    worker: WorkerId
    based: bool
    version: PolicyVersion | None
    fetching: bool


@dataclass(frozen=True, slots=True)
class WeightSource:
    """What to pull, and from whom; ``peer`` None is the store."""

    kind: WeightKind
    peer: WorkerId | None


def choose_source(
    holding: Holding, neighbours: Iterable[Holding], target: PolicyVersion, publishes: WeightKind
) -> WeightSource | None:
    """Where a worker gets version ``target``, or None: wait until a neighbour has it."""
    if holding.based and publishes is WeightKind.ADAPTER:
        return WeightSource(WeightKind.ADAPTER, None)
    waits = False
    for neighbour in neighbours:
        if neighbour.worker == holding.worker:
            continue
        if neighbour.based and (publishes is WeightKind.ADAPTER or neighbour.version == target):
            return WeightSource(WeightKind.FULL, neighbour.worker)
        waits = waits or neighbour.fetching
    return None if waits else WeightSource(WeightKind.FULL, None)
