"""Groups are divided, evened out and cut without losing or repeating a sample."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from spotlight.scheduler.batches import (
    even_out,
    even_out_each,
    micro_batches,
    split_samples,
    split_updates,
)
from spotlight.scheduler.seeds import derive_seed
from spotlight.scheduler.types import Group, RolloutId
from spotlight_rewards.base.prompts import PromptId

SIZES = st.lists(st.integers(2, 9), min_size=1, max_size=10)


def make_groups(sizes: list[int]) -> list[Group]:
    return [
        Group(PromptId(f"p{index}"), tuple(RolloutId(f"r{index}-{member}") for member in range(size)))
        for index, size in enumerate(sizes)
    ]


def without(groups: list[Group], surplus: list[RolloutId]) -> list[Group]:
    kept = [
        Group(group.prompt_id, tuple(name for name in group.rollouts if name not in surplus))
        for group in groups
    ]
    return [group for group in kept if group.rollouts]


def rollouts_of(groups: list[Group]) -> list[RolloutId]:
    return [rollout for group in groups for rollout in group.rollouts]


@given(SIZES, st.integers(1, 12))
def test_updates_are_whole_groups_in_order_evenly_divided(sizes: list[int], updates: int) -> None:
    groups = make_groups(sizes)
    parts = split_updates(groups, updates)
    assert [group for part in parts for group in part] == groups
    assert len(parts) == min(updates, len(groups))
    counts = [len(part) for part in parts]
    assert max(counts) - min(counts) <= 1


@given(SIZES, st.integers(1, 6), st.integers(1, 3), st.booleans())
def test_samples_are_divided_evenly_and_by_the_ranks(
    sizes: list[int], updates: int, ranks: int, shuffled: bool
) -> None:
    whole = make_groups(sizes)
    groups = without(whole, even_out(whole, ranks))
    samples = rollouts_of(groups)
    if not samples:
        return
    key = (lambda name: derive_seed(3, name)) if shuffled else None
    parts = split_samples(groups, updates, ranks, key)
    assert sorted(name for part in parts for name in rollouts_of(part)) == sorted(samples)
    counts = [len(rollouts_of(part)) for part in parts]
    assert len(counts) == min(updates, len(samples) // ranks)
    assert all(count % ranks == 0 for count in counts)
    assert max(counts) - min(counts) <= ranks
    of_prompt = {group.prompt_id: group.rollouts for group in groups}
    for part in parts:  # in the order of groups, and within one of its members
        assert [group.prompt_id for group in part] == [
            group.prompt_id for group in groups if group.prompt_id in {one.prompt_id for one in part}
        ]
        for group in part:
            assert group.rollouts == tuple(
                name for name in of_prompt[group.prompt_id] if name in set(group.rollouts)
            )
    if shuffled:
        again = split_samples(groups[::-1], updates, ranks, key)
        assert [set(rollouts_of(part)) for part in again] == [set(rollouts_of(part)) for part in parts]


@given(st.integers(1, 6), st.integers(1, 4), st.integers(1, 4))
def test_every_update_takes_an_equal_part_of_every_group(groups: int, updates: int, share: int) -> None:
    whole = make_groups([updates * share] * groups)
    parts = split_samples(whole, updates, 1, None)
    assert len(parts) == updates
    for number, part in enumerate(parts):
        assert [group.rollouts for group in part] == [
            group.rollouts[number * share : (number + 1) * share] for group in whole
        ]


def test_a_shuffle_mixes_groups_and_a_group_is_in_several_updates() -> None:
    groups = make_groups([8] * 8)
    parts = split_samples(groups, 2, 1, lambda name: derive_seed(0, name))
    assert all(len(part) == 8 for part in parts)
    assert len({len(group.rollouts) for part in parts for group in part}) > 1


def test_no_groups_make_no_updates() -> None:
    assert split_updates([], 3) == []
    assert even_out([], 4) == []


@given(SIZES, st.integers(1, 8))
def test_ranks_share_equally_and_no_sample_is_left_alone(sizes: list[int], ranks: int) -> None:
    groups = make_groups(sizes)
    surplus = even_out(groups, ranks)
    kept = without(groups, surplus)
    assert sorted(rollouts_of(kept) + surplus) == sorted(rollouts_of(groups))
    assert len(rollouts_of(kept)) % ranks == 0
    assert all(len(group.rollouts) >= 2 for group in kept)
    # A group keeps its first samples, and groups keep their order.
    of_prompt = {group.prompt_id: group.rollouts for group in groups}
    assert all(of_prompt[group.prompt_id][: len(group.rollouts)] == group.rollouts for group in kept)
    assert [group.prompt_id for group in kept] == sorted(
        (group.prompt_id for group in kept), key=list(of_prompt).index
    )


@given(SIZES, st.integers(1, 8))
def test_nothing_is_left_out_without_need(sizes: list[int], ranks: int) -> None:
    groups = make_groups([size * ranks for size in sizes])
    assert even_out(groups, ranks) == []
    room = sum(size - 2 for size in sizes)
    if room >= sum(sizes) % ranks:  # groups can shrink instead of vanishing
        assert len(even_out(make_groups(sizes), ranks)) == sum(sizes) % ranks


@given(SIZES, st.integers(1, 20))
def test_micro_batches_cut_an_update_in_order(sizes: list[int], size: int) -> None:
    groups = make_groups(sizes)
    cut = micro_batches(groups, 3, 1, size, sum(sizes), whole_groups=False)
    assert [rollout for batch in cut for rollout in batch.rollouts] == rollouts_of(groups)
    assert all(0 < len(batch.rollouts) <= size for batch in cut)
    assert all(len(batch.rollouts) == size for batch in cut[:-1])
    assert {(batch.iteration, batch.update, batch.update_samples) for batch in cut} == {(3, 1, sum(sizes))}


@given(SIZES, st.integers(9, 30), st.integers(1, 4))
def test_whole_groups_are_not_cut_and_divide_by_the_ranks(sizes: list[int], size: int, ranks: int) -> None:
    given_all = make_groups(sizes)
    surplus = even_out_each(given_all, ranks)
    groups = without(given_all, surplus)
    assert sorted(rollouts_of(groups) + surplus) == sorted(rollouts_of(given_all))
    assert all(len(group.rollouts) % ranks == 0 and len(group.rollouts) >= 2 for group in groups)
    cut = micro_batches(groups, 0, 0, size, len(rollouts_of(groups)), whole_groups=True)
    assert [rollout for batch in cut for rollout in batch.rollouts] == rollouts_of(groups)
    whole = {group.rollouts for group in groups}
    for batch in cut:
        assert 0 < len(batch.rollouts) <= size
        for rollouts in whole:
            assert len(set(rollouts) & set(batch.rollouts)) in (0, len(rollouts))
    for one, two in pairwise(cut):  # as few as possible, in order
        first = next(group for group in groups if group.rollouts[0] == two.rollouts[0])
        assert len(one.rollouts) + len(first.rollouts) > size
