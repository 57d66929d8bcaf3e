"""How work is divided among unlike GPUs: somebody takes it, and nobody takes what others finish sooner."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from spotlight.scheduler.cluster.members import WorkerGroup
from spotlight.scheduler.cluster.pace import Pace
from spotlight.scheduler.cluster.sharing import FairShares
from spotlight.scheduler.types import GroupKind, LeaseId, NodeId, WorkerId

STEPS = 8


def group(number: int, kind: GroupKind, trains: bool = False) -> WorkerGroup:
    leader = WorkerId(f"w{number}")
    return WorkerGroup(leader, 1, NodeId(f"n{number}"), (leader,), kind, trains)


def cluster(seconds: Sequence[int], counts: Sequence[int]) -> tuple[FairShares, list[WorkerGroup]]:
    """Kinds of groups that take so many seconds a step, and how many groups each has."""
    pace = Pace()
    shares, groups = FairShares(pace), []
    for index, (step_s, count) in enumerate(zip(seconds, counts, strict=True)):
        kind = GroupKind(f"gpu{index}", 1)
        pace.begin(LeaseId(index), WorkerId("before"), kind, STEPS, None, 1000.0 * index)
        pace.end(LeaseId(index), 1000.0 * index + step_s * STEPS)
        groups += [group(10 * index + i, kind) for i in range(count)]
    for one in groups:
        shares.add(one)
    return shares, groups


KINDS = st.lists(st.tuples(st.integers(1, 8), st.integers(1, 4)), min_size=1, max_size=3)


def step_s(one: WorkerGroup, seconds: Sequence[int]) -> int:
    return seconds[int(one.kind.gpu_type.removeprefix("gpu"))]


@given(KINDS, st.integers(1, 200))
def test_a_share_is_proportional_to_the_pace(kinds: list[tuple[int, int]], rollouts: int) -> None:
    seconds, counts = zip(*kinds, strict=True)
    shares, groups = cluster(seconds, counts)
    together = sum(1 / step_s(one, seconds) for one in groups)
    for one in groups:
        exact = rollouts / step_s(one, seconds) / together
        assert exact - 1e-6 <= shares.of(one, rollouts, trainers=False) < exact + 1 + 1e-6


@given(KINDS, st.integers(1, 200), st.integers(1, 4))
def test_what_is_sooner_done_by_faster_groups_is_left_to_them(
    kinds: list[tuple[int, int]], rollouts: int, share: int
) -> None:
    seconds, counts = zip(*kinds, strict=True)
    share = min(share, rollouts)
    shares, groups = cluster(seconds, counts)
    able = Counter(one.kind for one in groups)
    for one in groups:
        own_s = step_s(one, seconds)
        done = sum(share * own_s // each_s * count for each_s, count in kinds if each_s < own_s)
        sooner = shares.is_sooner_done(one, share, rollouts, lambda: able)
        assert sooner == (done > rollouts - share)
        assert not sooner or own_s > min(seconds), "the fastest leave nothing"
        assert not shares.is_sooner_done(one, share, rollouts, Counter), "others cannot work"


def test_the_last_rollouts_are_left_to_the_fast() -> None:
    shares, groups = cluster([1, 4], [4, 1])
    *fast, slow = groups
    able = Counter(one.kind for one in groups)
    assert [shares.of(slow, rollouts, trainers=False) for rollouts in (16, 17)] == [1, 1]
    assert [shares.is_sooner_done(slow, 1, rollouts, lambda: able) for rollouts in (16, 17)] == [True, False]
    assert not shares.is_sooner_done(fast[0], 1, 1, lambda: able)


def test_gpus_that_train_count_where_they_share() -> None:
    shares, (one,) = cluster([1], [1])
    shares.add(group(99, one.kind, trains=True))
    assert shares.of(one, 10, trainers=False) == 10
    assert shares.of(one, 10, trainers=True) == 5


def test_what_groups_do_is_looked_at_only_where_it_can_matter() -> None:
    """With a thousand groups nearly every event offers work, and that all of them worked would not do."""
    shares, (*_, slow) = cluster([1, 4], [4, 1])

    def looked_at() -> Counter[GroupKind]:
        raise AssertionError("4 fast groups do 16 in the time of one")

    assert not shares.is_sooner_done(slow, 1, 17, looked_at)
