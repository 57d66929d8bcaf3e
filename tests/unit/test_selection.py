"""Seeds are chosen as the policy says, whatever the order of previews, and with the probability stated."""

from __future__ import annotations

from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spotlight.scheduler.policies.selection import (
    SelectionPolicy,
    SelectionVerdict,
    max_variance,
    sample_variance,
    select,
)

POLICIES = list(SelectionPolicy)
REWARDS = st.one_of(
    st.lists(st.floats(-10, 10), min_size=2, max_size=9),
    st.lists(st.sampled_from([0.0, 0.5, 1.0]), min_size=2, max_size=9),
    st.lists(st.floats(1e6, 1e6 + 1), min_size=2, max_size=9),
)


def pool_of(rewards: list[float]) -> dict[int, float]:
    return {1000 + 7 * index: reward for index, reward in enumerate(rewards)}


@given(rewards=REWARDS, data=st.data())
def test_no_subset_has_more_variance(rewards: list[float], data: st.DataObject) -> None:
    count = data.draw(st.integers(1, len(rewards)))
    ascending = sorted(rewards)
    high = max_variance(ascending, count)
    found = sample_variance([*ascending[: count - high], *ascending[len(rewards) - high :]])
    best = max(sample_variance(subset) for subset in combinations(rewards, count))
    assert found == pytest.approx(best, rel=1e-6, abs=1e-9)


@given(
    rewards=REWARDS,
    data=st.data(),
    policy=st.sampled_from(POLICIES),
    kept=st.integers(0, 3),
    seed=st.integers(0, 9),
)
def test_the_order_of_previews_changes_nothing(
    rewards: list[float], data: st.DataObject, policy: SelectionPolicy, kept: int, seed: int
) -> None:
    count = data.draw(st.integers(1, len(rewards)))
    pool = pool_of(rewards)
    other = dict(data.draw(st.permutations(list(pool.items()))))
    kept = min(kept, count)
    chosen = select(pool, count, policy, draw_seed=seed, kept_at_random=kept)
    assert chosen == select(other, count, policy, draw_seed=seed, kept_at_random=kept)
    if chosen.verdict is SelectionVerdict.CHOSEN:
        assert len(set(chosen.seeds)) == count
        assert set(chosen.seeds) <= set(pool)
    else:
        assert len(set(rewards)) == 1


def test_policies_take_what_their_names_say() -> None:
    pool = {1: 0.1, 2: 0.9, 3: 0.5, 4: 0.4, 5: 1.0, 6: 0.0}
    assert select(pool, 3, SelectionPolicy.TOP).seeds == (5, 2, 3)
    assert select(pool, 3, SelectionPolicy.TOP_AND_BOTTOM).seeds == (5, 2, 6)
    assert set(select(pool, 4, SelectionPolicy.MAX_VARIANCE).seeds) == {1, 2, 5, 6}
    lone = {1: 1.0, 2: 0.0, 3: 0.0, 4: 0.1, 5: 0.0, 6: 0.0}
    assert 1 in select(lone, 4, SelectionPolicy.MAX_VARIANCE).seeds
    assert 4 in select(lone, 4, SelectionPolicy.TOP).seeds


@pytest.mark.parametrize("policy", POLICIES)
def test_equal_rewards_choose_nothing_and_say_so(policy: SelectionPolicy) -> None:
    assert select(pool_of([0.3] * 6), 4, policy).verdict is SelectionVerdict.NO_CONTRAST
    near = pool_of([0.3, 0.3 + 1e-9, 0.3, 0.3])
    assert select(near, 2, policy).verdict is SelectionVerdict.CHOSEN
    found = select(near, 2, policy, contrast_min=1e-6)
    assert (found.verdict, found.seeds) == (SelectionVerdict.NO_CONTRAST, ())
    assert select(pool_of([0.1, 0.2]), 3, policy).verdict is SelectionVerdict.TOO_FEW


def test_a_tie_falls_by_seed_not_by_place() -> None:
    pool = {9: 0.0, 3: 0.0, 5: 0.0, 1: 1.0}
    assert select(pool, 2, SelectionPolicy.TOP_AND_BOTTOM).seeds == (1, 3)


def test_no_more_seeds_are_drawn_than_chosen() -> None:
    pool = pool_of([0.0, 0.2, 0.4, 0.6])
    with pytest.raises(ValueError, match="at least 1 seed"):
        select(pool, 2, SelectionPolicy.TOP, kept_at_random=3)
