"""A picture becomes bytes twice between a worker and any number of rewards: once for the blob store, once for
the rewards' processes, which all get the same message."""

from __future__ import annotations

import asyncio
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import safetensors.torch
from head_world import Method, answered
from test_parcels import finished

from spotlight.cluster.blobs.blob_client import BlobClient
from spotlight.cluster.blobs.blob_store import StoredBlob
from spotlight.cluster.remote_calls import Conversations
from spotlight.cluster.sample_scoring import AcceptedSamples, SampleScoring
from spotlight.config.sections.rewards import RewardConfig
from spotlight.rewards.pool.reward_pool import RewardPool
from spotlight.scheduler import events as ev
from spotlight.scheduler.types import Prompt, WorkerId
from spotlight.worker.outbox import ReportOutbox
from spotlight.worker.reports import Report

DIGEST = "d" * 8
REWARDS = [RewardConfig(name="jpeg_size", label=name) for name in ("one", "two", "three")]


class Store:
    """The blob store's actor, and the worker's way to it."""

    def __init__(self) -> None:
        self.blobs: dict[tuple[str, str, str], StoredBlob] = {}
        self.fetch = Method(
            lambda kind, names, mark: answered([self.blobs.get((kind, name, mark)) for name in names])
        )

    def deliver(self, report: Report) -> None:
        for each in report.values:
            self.blobs[each.kind, each.name, report.mark] = StoredBlob(each.step, each.data)


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
            scoring.score([each.rollout for each in made], 0)
            while not events:
                await asyncio.sleep(0.01)

        await conversations.supervise(until_scored())

    with RewardPool(REWARDS) as pool:
        monkeypatch.setattr(pickle, "dumps", counted("rewards", pickle.dumps))
        asyncio.run(score(pool))
    (rewarded,) = events
    assert isinstance(rewarded, ev.SamplesRewarded)
    assert all({"one", "two", "three"} <= set(scores) for scores in rewarded.scores.values())
    assert sorted(written) == ["rewards"] * len(made) + ["store"] * len(made)
