"""A picture becomes bytes twice between a worker and any number of rewards: once for the blob store, once for
the rewards' processes, which all get the same message."""

from __future__ import annotations

import asyncio
import pickle
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
from head_world import Method, answered
from test_serialization import finished

from spotlight.cluster.blobs.blob_client import BlobClient
from spotlight.cluster.blobs.blob_store import StoredBlob
from spotlight.cluster.remote_calls import Conversations
from spotlight.cluster.sample_scoring import AcceptedSamples, SampleScoring
from spotlight.scheduler import events as ev
from spotlight.scheduler.effects import ScoreSamples
from spotlight.scheduler.types import LeaseId, RolloutId, WorkerId
from spotlight.worker.reports import Report
from spotlight.worker.stored_rollouts import ReportOutbox
from spotlight_rewards.base.prompts import Prompt
from spotlight_rewards.pool.reward_pool import RewardPool
from spotlight_rewards.reward_config import RewardConfig

DIGEST = "d" * 8
REWARDS = [RewardConfig(name="jpeg_size", label=name) for name in ("one", "two", "three")]


def scored(events: list[ev.Event]) -> dict[RolloutId, Mapping[str, float]]:
    assert all(isinstance(event, ev.SamplesRewarded) for event in events)
    return {id_: scores for event in events for id_, scores in event.scores.items()}  # type: ignore[union-attr]


class Store:
    """The blob store's actor, and the worker's way to it."""

    def __init__(self) -> None:
        self.blobs: dict[tuple[str, str, str], StoredBlob] = {}
        self.fetch = Method(
            lambda kind, names, mark: answered([self.blobs.get((kind, name, mark)) for name in names])
        )

    def deliver(self, reports: Iterable[Report]) -> None:
        for report in reports:
            for each in report.values:
                self.blobs[each.kind, each.name, report.weights_digest] = StoredBlob(each.step, each.data)


class Reports(Store):
    """Keeps the reports themselves."""

    def __init__(self) -> None:
        super().__init__()
        self.reports: list[Report] = []

    def deliver(self, reports: Iterable[Report]) -> None:
        self.reports.extend(reports)


def test_a_picture_is_serialised_twice_for_three_rewards(monkeypatch: pytest.MonkeyPatch) -> None:
    made = [finished(seed, name=f"r{seed}") for seed in range(4)]
    pixels = [each.image.tobytes() for each in made]
    written: list[str] = []

    def counted(name: str, function: Callable[..., bytes]) -> Callable[..., bytes]:
        def write(*args: Any, **options: Any) -> bytes:
            data = function(*args, **options)
            written.extend(name for picture in pixels if picture in data)
            return data

        return write

    monkeypatch.setattr(safetensors.torch, "save", counted("store", safetensors.torch.save))
    store, events = Store(), list[ev.Event]()
    outbox = ReportOutbox(WorkerId("n/0"), store)
    for each in made:
        outbox.keep_finished(each)
    outbox.deliver(DIGEST)

    async def score(pool: RewardPool) -> None:
        samples = AcceptedSamples(BlobClient(store))
        samples.accept([each.rollout.id for each in made], DIGEST)
        conversations = Conversations()
        prompts = {each.rollout.prompt_id: Prompt(each.rollout.prompt_id, "a", {}) for each in made}
        scoring = SampleScoring(conversations, samples, pool, prompts, events.append, print)

        async def until_scored() -> None:
            scoring.score(ScoreSamples(tuple(each.rollout for each in made)))
            while len(scored(events)) < len(made):  # in one event or, if the machine is busy, in more
                await asyncio.sleep(0.01)

        await conversations.supervise(until_scored())

    with RewardPool(REWARDS) as pool:
        monkeypatch.setattr(pickle, "dumps", counted("rewards", pickle.dumps))
        asyncio.run(score(pool))
    assert all({"one", "two", "three"} <= set(scores) for scores in scored(events).values())
    assert sorted(written) == ["rewards"] * len(made) + ["store"] * len(made)


def test_a_group_is_scored_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "whole.py").write_text(
        "from spotlight_rewards.reward import takes_groups\n"
        "@takes_groups\n"
        "def group_size(images, prompts, metadata):\n"
        "    return [len(images)] * len(images)\n"
    )
    monkeypatch.chdir(tmp_path)
    made = [finished(seed, name=f"r{seed}") for seed in range(3)]
    rollouts = [each.rollout for each in made]
    store, events = Store(), list[ev.Event]()
    outbox = ReportOutbox(WorkerId("n/0"), store)
    for each in made:
        outbox.keep_finished(each)
    outbox.deliver(DIGEST)

    async def score(pool: RewardPool) -> None:
        samples = AcceptedSamples(BlobClient(store))
        samples.accept([rollout.id for rollout in rollouts], DIGEST)
        conversations = Conversations()
        prompts = {rollout.prompt_id: Prompt(rollout.prompt_id, "a", {}) for rollout in rollouts}
        scoring = SampleScoring(conversations, samples, pool, prompts, events.append, print)

        async def until_scored() -> None:
            # The third has failed.
            scoring.score(ScoreSamples(tuple(rollouts[:2]), 5, size=len(rollouts)))
            while sum(len(each.scores) for each in events if isinstance(each, ev.SamplesRewarded)) < 2:
                await asyncio.sleep(0.01)

        await conversations.supervise(until_scored())

    with RewardPool([RewardConfig(name="whole:group_size")], merges=True) as pool:
        asyncio.run(score(pool))
    found = [
        scores for each in events if isinstance(each, ev.SamplesRewarded) for scores in each.scores.values()
    ]
    assert [each["group_size"] for each in found] == [2.0, 2.0]
    assert [each["group_size/missing"] for each in found] == [1.0, 1.0]
    assert {each.lineage for each in events if isinstance(each, ev.SamplesRewarded)} == {5}


@pytest.mark.parametrize("parts", [1, 3, 8])
def test_large_reports_travel_in_parts_and_their_events_with_the_last(parts: int) -> None:
    whole_head = Reports()
    sizes = ReportOutbox(WorkerId("w"), whole_head)
    made = [finished(seed, name=f"r{seed}") for seed in range(4)]
    for each in made:
        sizes.keep_finished(each)
    sizes.deliver(DIGEST)
    values = [value for report in whole_head.reports for value in report.values]
    whole = sum(len(value.data) for value in values)
    limit = {1: whole, 3: -(-whole // 2), 8: 1}[parts]
    head = Reports()
    outbox = ReportOutbox(WorkerId("w"), head, report_bytes=limit)
    for each in made:
        outbox.keep_finished(each)
    progress = ev.LeaseProgressed(WorkerId("w"), LeaseId(1), 1, 2)
    outbox.send(progress)
    outbox.deliver(DIGEST)
    assert [value for report in head.reports for value in report.values] == values
    assert [report.events for report in head.reports] == [()] * (len(head.reports) - 1) + [(progress,)]
    assert all(
        len(report.values) == 1 or sum(len(value.data) for value in report.values) <= limit
        for report in head.reports
    )
    assert len(head.reports) in {1: {1}, 3: {2, 3}, 8: {8}}[parts]
    assert {report.weights_digest for report in head.reports} == {DIGEST}
    outbox.deliver(DIGEST)  # nothing is left
    assert len(head.reports) in {1: {1}, 3: {2, 3}, 8: {8}}[parts]
