"""Where weights come from: the adapter from the store, everything from a neighbour that has it."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spotlight.core.selection import top_and_bottom
from spotlight.core.types import PolicyVersion, WeightKind, WorkerId
from spotlight.core.weights import Holding, Source, choose_source

V1, V2 = PolicyVersion(1), PolicyVersion(2)
C = WorkerId("c")
ADAPTER, FULL = WeightKind.ADAPTER, WeightKind.FULL


def holding(name: str, based: bool = False, version: int | None = None, fetching: bool = False) -> Holding:
    return Holding(WorkerId(name), based, None if version is None else PolicyVersion(version), fetching)


@pytest.mark.parametrize(
    ("me", "neighbours", "publishes", "source"),
    [
        (holding("a", True, 1), [], ADAPTER, Source(ADAPTER, None)),
        (holding("a", True, 1), [holding("b", True, 2)], ADAPTER, Source(ADAPTER, None)),
        (holding("a"), [], ADAPTER, Source(FULL, None)),
        (holding("a"), [holding("b", True, 1)], ADAPTER, Source(FULL, WorkerId("b"))),
        (holding("a"), [holding("b", fetching=True)], ADAPTER, None),
        (holding("a"), [holding("b", fetching=True), holding("c", True)], ADAPTER, Source(FULL, C)),
        (holding("a", True, 1), [holding("b", True, 1)], FULL, Source(FULL, None)),
        (holding("a", True, 1), [holding("b", True, 2)], FULL, Source(FULL, WorkerId("b"))),
        (holding("a"), [holding("a", fetching=True)], ADAPTER, Source(FULL, None)),
    ],
)  # fmt: skip
def test_sources(
    me: Holding, neighbours: list[Holding], publishes: WeightKind, source: Source | None
) -> None:
    assert choose_source(me, neighbours, V2, publishes) == source


rewards = st.dictionaries(st.integers(0, 1000), st.floats(-10, 10), min_size=1, max_size=24)


@given(rewards, st.integers(1, 24))
def test_chosen_seeds_are_the_extremes(previews: Mapping[int, float], count: int) -> None:
    if len(previews) < count:
        with pytest.raises(ValueError, match="cannot be chosen"):
            top_and_bottom(previews, count)
        return
    chosen = top_and_bottom(previews, count)
    assert len(set(chosen)) == count
    high, low = chosen[: count - count // 2], chosen[count - count // 2 :]
    rest = [previews[seed] for seed in previews if seed not in chosen]
    assert all(previews[h] >= r for h in high for r in rest)
    assert all(previews[x] <= r for x in low for r in rest)
