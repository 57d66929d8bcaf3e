"""Limits that follow measured steps."""

from __future__ import annotations

import pytest
from queue_machine import make_rollout

from spotlight.scheduler.cluster.answer_limits import MORE_MAX, REMEMBERED, SLOWER_MAX, AnswerLimits
from spotlight.scheduler.cluster.queue import CommitVerdict, PullQueue
from spotlight.scheduler.types import GroupKind, Purpose, WorkerId

FIRST_S, LEASE_S = 600.0, 120.0
ALONE = GroupKind("H100", 1)
ONE, OTHER = WorkerId("n/0"), WorkerId("n/1")


def formed(*leaders: WorkerId, kind: GroupKind = ALONE) -> AnswerLimits:
    limits = AnswerLimits(FIRST_S)
    for leader in leaders:
        limits.formed((leader,), kind, trains=False)
    return limits


class Clock:
    """Answers of groups, each so long after the time before."""

    def __init__(self, limits: AnswerLimits) -> None:
        self.limits, self.now = limits, 0.0

    def answer(self, leader: WorkerId, seconds: float, rollouts: int = 1, *, ends: bool = False) -> None:
        self.limits.works_on(leader, rollouts)
        self.limits.answered(leader, rollouts, self.now, self.now + seconds, ends=ends)
        self.now += seconds

    def warm_up(self, *leaders: WorkerId, seconds: float = 1.0, rollouts: int = 1) -> None:
        for leader in leaders:
            for ends in (False, True, False, True, False, True):
                self.answer(leader, seconds, rollouts, ends=ends)


def test_processes_have_long_until_they_are_warmed_up() -> None:
    limits = formed(ONE)
    clock = Clock(limits)
    assert limits.limit_s(ONE, LEASE_S) == LEASE_S, "it has no work, so it is in no step"
    assert limits.limit_s(None, LEASE_S) == limits.limit_s(OTHER, LEASE_S) == LEASE_S
    clock.answer(ONE, 10.0, 2)
    assert limits.limit_s(ONE, LEASE_S) == FIRST_S, "the decoder has yet to be loaded"
    clock.warm_up(ONE, seconds=20.0, rollouts=2)
    assert limits.limit_s(ONE) == SLOWER_MAX * 20.0
    assert limits.limit_s(ONE, LEASE_S) == LEASE_S, "measured steps only lengthen it"
    limits.works_on(ONE, 0)
    assert limits.limit_s(ONE) == 0.0, "it works on nothing, so it answers at once"
    limits.works_on(ONE, 2)
    limits.started(ONE)
    assert limits.limit_s(ONE) == FIRST_S, "another process"


def test_first_answers_which_compile_are_not_measured() -> None:
    limits = formed(ONE, OTHER)
    clock = Clock(limits)
    for leader in (ONE, OTHER):
        clock.answer(leader, FIRST_S - 10.0)
        limits.answered(leader, 1, clock.now - 500.0, clock.now, ends=False)  # a lease granted meanwhile
        clock.answer(leader, FIRST_S - 10.0, ends=True)
    limits.works_on(ONE, 8)
    assert limits.limit_s(ONE, LEASE_S) == FIRST_S
    clock.warm_up(ONE, seconds=1.0)
    assert limits.limit_s(ONE, LEASE_S) == LEASE_S


def test_limits_follow_the_kind_and_grow_little_with_the_rollouts() -> None:
    limits = formed(ONE, OTHER)
    other_kind, trainer = WorkerId("m/0"), WorkerId("t/0")
    limits.formed((other_kind,), GroupKind("A100", 1), trains=False)
    limits.formed((trainer,), ALONE, trains=True)
    clock = Clock(limits)
    clock.warm_up(other_kind, trainer, seconds=0.5)
    clock.warm_up(ONE, OTHER, seconds=60.0, rollouts=2)
    assert limits.limit_s(ONE) == limits.limit_s(OTHER) == SLOWER_MAX * 60.0
    assert limits.limit_s(other_kind) == limits.limit_s(trainer) == SLOWER_MAX * 0.5
    for rollouts, more in ((1, 1.0), (3, 1.5), (64, MORE_MAX)):
        limits.works_on(OTHER, rollouts)
        assert limits.limit_s(OTHER) == SLOWER_MAX * more * 60.0


@pytest.mark.parametrize("ends", [False, True])
def test_silences_that_were_waited_for_do_not_lengthen_the_next_limit(ends: bool) -> None:
    limits = formed(ONE)
    clock = Clock(limits)
    clock.warm_up(ONE, seconds=50.0)
    for _ in range(2):
        clock.answer(ONE, 0.99 * limits.limit_s(ONE), ends=ends)
        assert limits.limit_s(ONE) == SLOWER_MAX * 50.0
    for _ in range(20):
        for step_s in (50.0, 50.0, 0.99 * limits.limit_s(ONE)):
            clock.answer(ONE, step_s, ends=ends)
            assert limits.limit_s(ONE) <= FIRST_S
    assert limits.limit_s(ONE) == FIRST_S, "some are that long"


def test_limits_follow_steps_that_become_slower_or_faster() -> None:
    limits = formed(ONE)
    clock = Clock(limits)
    clock.warm_up(ONE, seconds=40.0)
    for _ in range(REMEMBERED):
        clock.answer(ONE, 100.0)
    assert limits.limit_s(ONE) == SLOWER_MAX * 100.0
    for _ in range(REMEMBERED):
        clock.answer(ONE, 5.0)
    assert limits.limit_s(ONE) == SLOWER_MAX * 40.0, "steps between two decodings do not make one shorter"


def test_a_degree_that_was_not_used_before_compiles_again() -> None:
    limits = formed(ONE, OTHER)
    clock = Clock(limits)
    clock.warm_up(ONE, OTHER)
    limits.formed((ONE, OTHER), GroupKind("H100", 2), trains=False)
    limits.works_on(ONE, 1)
    assert limits.limit_s(ONE) == FIRST_S


@pytest.mark.parametrize("step_s", [130.0, 200.0, 500.0])
def test_a_healthy_lease_with_slow_steps_never_expires(step_s: float) -> None:
    queue = PullQueue(LEASE_S, limits=formed(ONE))
    queue.add(make_rollout(n, Purpose.TRAIN) for n in range(4))
    queue.admit(ONE)
    now = 0.0
    for _ in range(2):
        granted = queue.pull(ONE, 2, now)
        assert granted is not None
        lease, rollouts, _ = granted
        for step in range(1, rollouts[0].steps):
            now += step_s
            assert not queue.expire(now)
            assert queue.advance(lease.id, lease.epoch, step, now) is CommitVerdict.ACCEPTED
        now += 1.5 * step_s
        assert not queue.expire(now), "decoding"
        queue.renew(lease.id, lease.epoch, now)
        for rollout in rollouts:
            assert queue.complete(lease.id, lease.epoch, rollout.id) is CommitVerdict.ACCEPTED


def test_a_lease_without_news_expires_and_then_its_worker_has_as_long_as_a_new_one() -> None:
    queue = PullQueue(LEASE_S, limits=formed(ONE))
    queue.add(make_rollout(n, Purpose.TRAIN) for n in range(2))
    epoch = queue.admit(ONE)
    Clock(queue.limits).warm_up(ONE)
    for began_s, limit_s in ((0.0, LEASE_S), (1000.0, FIRST_S)):
        granted = queue.pull(ONE, 1, began_s)
        assert granted is not None
        assert not queue.expire(began_s + limit_s - 0.1)
        assert [lease.id for lease in queue.expire(began_s + limit_s)] == [granted[0].id]
        assert queue.advance(granted[0].id, epoch, 1, began_s + limit_s) is CommitVerdict.STALE_EPOCH
