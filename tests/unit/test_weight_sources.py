"""Where weights come from: the adapter from the store, everything from a neighbour that has it."""

from __future__ import annotations

import pytest

from spotlight.scheduler.cluster.members import Worker
from spotlight.scheduler.cluster.weight_sources import WeightSource, choose_source
from spotlight.scheduler.effects import PullWeights
from spotlight.scheduler.types import NodeId, PolicyVersion, WeightKind, WorkerId

V1, V2 = PolicyVersion(1), PolicyVersion(2)
C = WorkerId("c")
ADAPTER, FULL = WeightKind.ADAPTER, WeightKind.FULL


def holding(name: str, based: bool = False, version: int | None = None, fetching: bool = False) -> Worker:
    held = None if version is None else PolicyVersion(version)
    pull = PullWeights(WorkerId(name), 1, V2, 0, FULL, None) if fetching else None
    return Worker(WorkerId(name), NodeId("n"), 0, 1, based=based, version=held, pull=pull)


@pytest.mark.parametrize(
    ("me", "neighbours", "publishes", "source"),
    [
        (holding("a", True, 1), [], ADAPTER, WeightSource(ADAPTER, None)),
        (holding("a", True, 1), [holding("b", True, 2)], ADAPTER, WeightSource(ADAPTER, None)),
        (holding("a"), [], ADAPTER, WeightSource(FULL, None)),
        (holding("a"), [holding("b", True, 1)], ADAPTER, WeightSource(FULL, WorkerId("b"))),
        (holding("a"), [holding("b", fetching=True)], ADAPTER, None),
        (holding("a"), [holding("b", fetching=True), holding("c", True)], ADAPTER, WeightSource(FULL, C)),
        (holding("a", True, 1), [holding("b", True, 1)], FULL, WeightSource(FULL, None)),
        (holding("a", True, 1), [holding("b", True, 2)], FULL, WeightSource(FULL, WorkerId("b"))),
        (holding("a"), [holding("a", fetching=True)], ADAPTER, WeightSource(FULL, None)),
    ],
)  # fmt: skip
def test_sources(
    me: Worker, neighbours: list[Worker], publishes: WeightKind, source: WeightSource | None
) -> None:
    assert choose_source(me, neighbours, V2, publishes) == source
