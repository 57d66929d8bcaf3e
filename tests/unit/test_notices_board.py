"""Readings become notices: what is reported is the earliest end that stands, once."""

from __future__ import annotations

import random

from hypothesis import given, settings
from hypothesis import strategies as st

from spotlight.scheduler.types import NodeId
from spotlight_fleet.notices.board import NoticeBoard
from spotlight_fleet.notices.notice import (
    Cancelled,
    Noticed,
    NoticeReading,
    PendingNotice,
    Rebalance,
)
from spotlight_fleet.notices.watcher import Backoff

NODE = NodeId("spot-1")


def reading(*pending: tuple[str, str, float]) -> NoticeReading:
    return NoticeReading(
        tuple(PendingNotice(key, stamp, left_s, f"{key} {stamp}") for key, stamp, left_s in pending)
    )


def test_a_notice_is_reported_once_although_its_remaining_time_jitters() -> None:
    board = NoticeBoard()
    assert board.update("aws", reading(), 0.0) == []
    assert board.update("aws", reading(("stop", "t", 100.0)), 1.0) == [Noticed("aws", 101.0, "stop t")]
    assert board.update("aws", reading(("stop", "t", 93.2)), 6.0) == []
    assert board.update("aws", reading(), 11.0) == [Cancelled("aws", "stop t")]
    assert board.update("aws", reading(("stop", "t", 80.0)), 20.0) == [Noticed("aws", 100.0, "stop t")]


def test_a_deadline_may_move_ahead_but_is_put_off_by_a_cancellation() -> None:
    board = NoticeBoard()
    board.update("azure", reading(("a", "12:00", 30.0)), 0.0)
    assert board.update("azure", reading(("a", "started", 0.0)), 5.0) == [Noticed("azure", 5.0, "a started")]
    assert board.update("azure", reading(("a", "13:00", 3600.0)), 6.0) == [
        Cancelled("azure", "a started"),
        Noticed("azure", 3606.0, "a 13:00"),
    ]


def test_a_node_stays_noticed_while_another_source_says_so() -> None:
    board = NoticeBoard()
    assert len(board.update("azure", reading(("a", "x", 60.0)), 0.0)) == 1
    assert board.update("sigterm", reading(("sigterm", "", 30.0)), 1.0) == [
        Noticed("sigterm", 31.0, "sigterm ")
    ]
    assert board.update("azure", reading(), 2.0) == []


def test_advice_is_reported_once_and_changes_nothing_else() -> None:
    board, advice = NoticeBoard(), NoticeReading(rebalance="since 8:22")
    assert board.update("aws", advice, 0.0) == [Rebalance("aws", "since 8:22")]
    assert board.update("aws", advice, 5.0) == []


_pending = st.dictionaries(
    st.sampled_from("abc"), st.tuples(st.sampled_from(["s", "t"]), st.floats(0, 1e4)), max_size=3
)


@settings(max_examples=40)
@given(st.lists(st.tuples(st.sampled_from(["aws", "gcp"]), _pending), max_size=8))
def test_whoever_follows_the_notices_knows_the_earliest_end(
    readings: list[tuple[str, dict[str, tuple[str, float]]]],
) -> None:
    board, known, noticed = NoticeBoard(), {}, None
    for step, (source, pending) in enumerate(readings):
        now_s = float(step)
        found = reading(*((key, stamp, left_s) for key, (stamp, left_s) in pending.items()))
        before = known.get(source, {})
        # The first reading of an announcement fixes its deadline.
        known[source] = {
            (item.key, item.stamp): before.get((item.key, item.stamp), now_s + item.remaining_s)
            for item in found.pending
        }
        for notice in board.update(source, found, now_s):
            if isinstance(notice, Noticed):
                assert noticed is None or notice.deadline_s <= noticed, "put off without a cancellation"
                noticed = notice.deadline_s
            else:
                assert noticed is not None, "cancelled what was not reported"
                noticed = None
        assert noticed == min((end for ends in known.values() for end in ends.values()), default=None)


@settings(max_examples=30)
@given(st.integers(1, 10_000), st.integers())
def test_pauses_grow_stay_bounded_and_come_from_the_source_that_is_given(failures: int, seed: int) -> None:
    backoff = Backoff(first_s=1.0, max_s=12.0)
    pause_s = backoff.pause_s(failures, random.Random(seed))
    longest = min(12.0, 2.0 ** (min(failures, 10) - 1))
    assert longest / 2 <= pause_s <= longest
    assert pause_s == backoff.pause_s(failures, random.Random(seed))
