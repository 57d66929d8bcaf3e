"""Where weights come from: the adapter from the store, everything from a neighbour that has it."""

from __future__ import annotations

import pytest

from spotlight.scheduler.cluster.weight_sources import Holding, WeightSource, choose_source
from spotlight.scheduler.types import PolicyVersion, WeightKind, WorkerId

V1, V2 = PolicyVersion(1), PolicyVersion(2)
C = WorkerId("c")
ADAPTER, FULL = WeightKind.ADAPTER, WeightKind.FULL


def holding(name: str, based: bool = False, version: int | None = None, fetching: bool = False) -> Holding:
    return Holding(WorkerId(name), based, None if version is None else PolicyVersion(version), fetching)


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
    me: Holding, neighbours: list[Holding], publishes: WeightKind, source: WeightSource | None
) -> None:
    assert choose_source(me, neighbours, V2, publishes) == source
