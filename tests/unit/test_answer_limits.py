"""Limits that follow measured steps."""

from __future__ import annotations

import pytest
from queue_machine import make_rollout

from spotlight.scheduler.cluster.answer_limits import SLOWER_MAX, AnswerLimits
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


def test_a_process_has_long_until_its_first_rollout_is_finished() -> None:
    limits = formed(ONE)
    assert limits.limit_s(ONE, LEASE_S) == LEASE_S, "it has no work, so it is in no step"
    assert limits.limit_s(None, LEASE_S) == limits.limit_s(OTHER, LEASE_S) == LEASE_S
    limits.granted(ONE, 2)
    limits.took(ONE, 2, 10.0, ends=False)
    assert limits.limit_s(ONE, LEASE_S) == FIRST_S, "the decoder has yet to be loaded"
    limits.took(ONE, 2, 20.0, ends=True)
    assert limits.limit_s(ONE) == SLOWER_MAX * 20.0
    assert limits.limit_s(ONE, LEASE_S) == LEASE_S, "measured steps only lengthen it"
    limits.started(ONE)
    assert limits.limit_s(ONE) == FIRST_S, "another process"


def test_limits_grow_with_the_rollouts_held_and_follow_the_kind() -> None:
    limits = formed(ONE, OTHER)
    limits.formed((WorkerId("m/0"),), GroupKind("A100", 1), trains=False)
    limits.formed((WorkerId("t/0"),), ALONE, trains=True)
    for leader in (ONE, OTHER, WorkerId("m/0"), WorkerId("t/0")):
        limits.granted(leader, 1)
        limits.took(leader, 1, 0.5, ends=True)
    limits.took(ONE, 1, 60.0, ends=False)
    assert limits.limit_s(OTHER) == SLOWER_MAX * 60.0, "of the same kind"
    limits.granted(OTHER, 4)
    assert limits.limit_s(OTHER) == SLOWER_MAX * 240.0
    assert limits.limit_s(WorkerId("m/0")) == limits.limit_s(WorkerId("t/0")) == SLOWER_MAX * 0.5


def test_a_slow_step_fades_while_faster_ones_are_measured_and_decoding_does_not() -> None:
    limits = formed(ONE)
    limits.granted(ONE, 1)
    limits.took(ONE, 1, 40.0, ends=True)
    limits.took(ONE, 1, 100.0, ends=False)
    assert limits.limit_s(ONE) == SLOWER_MAX * 100.0
    for _ in range(60):
        limits.took(ONE, 1, 5.0, ends=False)
    assert limits.limit_s(ONE) == SLOWER_MAX * 40.0, "steps between two decodings do not make one shorter"


def test_a_degree_that_was_not_used_before_compiles_again() -> None:
    limits = formed(ONE, OTHER)
    for leader in (ONE, OTHER):
        limits.granted(leader, 1)
        limits.took(leader, 1, 1.0, ends=True)
    limits.formed((ONE, OTHER), GroupKind("H100", 2), trains=False)
    limits.granted(ONE, 1)
    assert limits.limit_s(ONE) == FIRST_S


@pytest.mark.parametrize("step_s", [130.0, 500.0])
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
    for began_s, limit_s in ((0.0, LEASE_S), (1000.0, FIRST_S)):
        if began_s == 0.0:  # a fast step was measured
            queue.limits.granted(ONE, 1)
            queue.limits.took(ONE, 1, 1.0, ends=True)
        granted = queue.pull(ONE, 1, began_s)
        assert granted is not None
        assert not queue.expire(began_s + limit_s - 0.1)
        assert [lease.id for lease in queue.expire(began_s + limit_s)] == [granted[0].id]
        assert queue.advance(granted[0].id, epoch, 1, began_s + limit_s) is CommitVerdict.STALE_EPOCH
