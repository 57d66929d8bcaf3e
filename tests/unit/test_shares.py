"""How work is divided among unlike GPUs: somebody takes it, and nobody takes what others finish sooner."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from spotlight.core.members import Group
from spotlight.core.pipeline.pace import Pace
from spotlight.core.shares import Shares
from spotlight.core.types import GroupKind, LeaseId, NodeId, WorkerId

STEPS = 8


def group(number: int, kind: GroupKind, trains: bool = False) -> Group:
    leader = WorkerId(f"w{number}")
    return Group(leader, 1, NodeId(f"n{number}"), (leader,), kind, trains)


def cluster(seconds: Sequence[int], counts: Sequence[int]) -> tuple[Shares, list[Group]]:
    """Kinds of groups that take so many seconds a step, and how many groups each has."""
    pace = Pace()
    shares, groups = Shares(pace), []
    for index, (step_s, count) in enumerate(zip(seconds, counts, strict=True)):
        kind = GroupKind(f"gpu{index}", 1)
        pace.begin(LeaseId(index), WorkerId("before"), kind, STEPS, None, 1000.0 * index)
        pace.end(LeaseId(index), 1000.0 * index + step_s * STEPS)
        groups += [group(10 * index + i, kind) for i in range(count)]
    for one in groups:
        shares.count(one, 1)
    return shares, groups


KINDS = st.lists(st.tuples(st.integers(1, 8), st.integers(1, 4)), min_size=1, max_size=3)


@given(KINDS, st.integers(1, 200))
def test_the_fastest_always_take_some_and_a_share_is_never_more_than_proportional(
    kinds: list[tuple[int, int]], rollouts: int
) -> None:
    seconds, counts = zip(*kinds, strict=True)
    shares, groups = cluster(seconds, counts)
    speeds = {one.leader: 1 / seconds[int(one.kind.gpu_type.removeprefix("gpu"))] for one in groups}
    together = sum(speeds.values())
    for one in groups:
        share = shares.of(one, rollouts, trainers=False)
        assert 0 <= share < rollouts * speeds[one.leader] / together + 1
        if speeds[one.leader] == max(speeds.values()):
            assert share >= 1


@given(KINDS, st.integers(1, 200))
def test_nobody_takes_a_rollout_that_faster_groups_finish_sooner_besides_their_own(
    kinds: list[tuple[int, int]], rollouts: int
) -> None:
    seconds, counts = zip(*kinds, strict=True)
    shares, groups = cluster(seconds, counts)
    for one in groups:
        own_s = seconds[int(one.kind.gpu_type.removeprefix("gpu"))]
        share = shares.of(one, rollouts, trainers=False)
        if share:
            others = sum((share * own_s) // each_s * count for each_s, count in kinds if each_s < own_s)
            assert others <= rollouts - share


def test_the_last_rollouts_are_left_to_the_fast() -> None:
    shares, groups = cluster([1, 4], [4, 1])
    slow = groups[-1]
    assert [shares.of(slow, rollouts, trainers=False) for rollouts in (16, 17, 40)] == [0, 1, 2]
    for fast in groups[:-1]:
        shares.count(fast, -1)
    assert shares.of(slow, 1, trainers=False) == 1, "nobody else is left"


def test_gpus_that_train_count_where_they_share() -> None:
    shares, (one,) = cluster([1], [1])
    shares.count(group(99, one.kind, trains=True), 1)
    assert shares.of(one, 10, trainers=False) == 10
    assert shares.of(one, 10, trainers=True) == 5
