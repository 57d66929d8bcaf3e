"""The driver's own judgements: how far the work is, and when a failed reward ends it."""

from __future__ import annotations

import math
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import MISSING, Field, fields
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from spotlight.runtime.inline import InlineDriver, _Scoring
from spotlight.runtime.shared_pictures import encoded, whole_groups
from spotlight.scheduler.cluster.queue import PullQueue
from spotlight.scheduler.events import StopRequested
from spotlight.scheduler.types import DropReason, Phase, PolicyVersion, Purpose, Rollout, RolloutId
from spotlight.training.sharding import Ranks
from spotlight_rewards.base.prompts import PromptId
from spotlight_rewards.pool.waiting import SampleGroup
from spotlight_rewards.results import FailureKind, RewardBatch, RewardFailure


def rollouts(count: int, purpose: Purpose) -> list[Rollout]:
    return [
        Rollout(RolloutId(f"{purpose}{n}"), purpose, 0, PromptId("p"), n, n, 4, PolicyVersion(0))
        for n in range(count)
    ]


def driver(
    queue: PullQueue, progress: list[tuple[Phase, float, int]], max_drop_share: float | None
) -> InlineDriver:
    controller = SimpleNamespace(queue=queue, plan=SimpleNamespace(max_drop_share=max_drop_share))
    observer = SimpleNamespace(work=lambda *what: progress.append(what))
    absent: dict[str, Any] = {each.name: None for each in fields(InlineDriver) if _is_required(each)}
    return InlineDriver(**absent | {"controller": controller, "observer": observer, "ranks": Ranks()})


def _is_required(each: Field[Any]) -> bool:
    return each.default is MISSING and each.default_factory is MISSING


def test_work_is_counted_in_samples_over_all_leases_of_an_iteration() -> None:
    queue, progress = PullQueue(lease_s=math.inf), list[tuple[Phase, float, int]]()
    driven = driver(queue, progress, None)
    queue.admit("w")  # type: ignore[arg-type]
    for _iteration in range(2):
        fresh = [
            Rollout(
                RolloutId(f"{r.id}-{_iteration}"),
                r.purpose,
                _iteration,
                r.prompt_id,
                r.member,
                r.seed,
                4,
                r.version,
            )
            for r in (*rollouts(5, Purpose.TRAIN), *rollouts(2, Purpose.EVAL))
        ]
        queue.add(fresh)
        progress.clear()
        while queue.outstanding:
            pulled = queue.pull("w", 3, 0.0)  # type: ignore[arg-type]
            assert pulled is not None
            lease, granted, _ = pulled
            phase = Phase.ROLLOUT if granted[0].purpose is Purpose.TRAIN else Phase.EVALUATION
            report = driven._progress(phase, granted)
            for share in (0.5, 1.0):
                report(share)
            for rollout in granted:
                queue.complete(lease.id, lease.epoch, rollout.id)
        assert [(done, total) for phase, done, total in progress if phase is Phase.ROLLOUT] == [
            (1.5, 5),
            (3.0, 5),
            (4.0, 5),
            (5.0, 5),
        ]
        assert [(done, total) for phase, done, total in progress if phase is Phase.EVALUATION] == [
            (1, 2),
            (2, 2),
        ]


def scoring(result: RewardBatch | Exception | None) -> _Scoring:
    future: Future[RewardBatch] = Future()
    if isinstance(result, Exception):
        future.set_exception(result)
    elif result is not None:
        future.set_result(result)
    return _Scoring((), (), future, 0)


FAILED = RewardBatch((RewardFailure(FailureKind.ERROR, "ocr", "broken"),))


@pytest.mark.parametrize(
    ("results", "max_drop_share", "stops"),
    [
        ([], None, False),
        ([None], None, False),
        ([RewardBatch(())], None, False),
        ([FAILED], None, True),
        ([None, FAILED], None, True),
        ([RuntimeError("pool closed")], None, True),
        ([FAILED], 0.25, False),
    ],
)
def test_a_failure_that_will_stop_the_run_stops_it_at_once(
    results: list[RewardBatch | Exception | None], max_drop_share: float | None, stops: bool
) -> None:
    driven = driver(PullQueue(lease_s=1.0), [], max_drop_share)
    driven._scoring.extend(map(scoring, results))
    assert driven._stopping_failure() is stops


def test_a_run_that_a_failure_ends_can_be_stopped_while_it_waits_for_scores_before() -> None:
    driven = driver(PullQueue(lease_s=1.0), [], None)

    @contextmanager
    def phase(_: Phase) -> Iterator[None]:
        driven.request_stop()  # while it waits
        yield

    def endless() -> RewardBatch:
        raise AssertionError("nothing could end this")

    driven.clock = SimpleNamespace(phase=phase)  # type: ignore[assignment]
    driven._scoring.extend(map(scoring, [None, FAILED]))
    driven._scoring[0].future.result = endless  # type: ignore[assignment, method-assign]
    assert driven._next_event() == StopRequested()


def test_each_way_a_reward_fails_has_a_reason_of_its_own() -> None:
    assert len({DropReason(f"reward_{kind}") for kind in FailureKind}) == len(FailureKind)


def test_ranks_take_whole_groups_in_turn() -> None:
    names = [RolloutId(f"{group}{member}") for group in "abc" for member in range(4)]
    groups = {name: SampleGroup(name[0], 4) for name in names}
    made = [
        {name: np.full((1, 1, 3), at, np.uint8) for at, name in enumerate(names) if at % 2 == rank}
        for rank in (0, 1)
    ]
    sent = [{name: encoded(each) for name, each in own.items()} for own in made]
    ranks = [cast(Ranks, SimpleNamespace(rank=r, world=2, share=lambda _: sent)) for r in (0, 1)]
    for turn, expected in ((0, ["ac", "b"]), (3, ["b", "ac"])):  # the next goes on where this one ended
        found = [whole_groups(own, groups, rank, turn) for rank, own in zip(ranks, made, strict=True)]
        assert [list(own) for own in found] == [[n for n in names if n[0] in which] for which in expected]
        assert all(own[name][0, 0, 0] == names.index(name) for own in found for name in own)
