"""Which worker traces, and what the head tells of traces that came, are broken or never come."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path

import pytest

from spotlight.cluster.blobs.blob_server import TRACE
from spotlight.cluster.blobs.blob_store import StoredBlob
from spotlight.cluster.remote_calls import RayLostError
from spotlight.cluster.trace_collector import TraceCollector
from spotlight.scheduler.types import Phase, WorkerId
from spotlight_rewards.base.file_errors import StoreError

A, B = WorkerId("a/0"), WorkerId("b/0")


class Store:
    def __init__(self, found: StoredBlob | Exception | None) -> None:
        self.found = found

    async def fetch(self, kind: str, names: Sequence[str], weights_digest: str) -> list[StoredBlob | None]:
        assert (kind, list(names)) == (TRACE, [Phase.ROLLOUT])
        if isinstance(self.found, Exception):
            raise self.found
        return [self.found]

    async def drop(self, kind: str, names: Sequence[str]) -> None:
        self.found = None


def collector(folder: Path, found: StoredBlob | Exception | None) -> tuple[TraceCollector, list[str]]:
    notes: list[str] = []
    return TraceCollector(Store(found), folder, notes.append, 3), notes


def test_one_worker_at_a_time_traces_once_until_the_trace_is_there(tmp_path: Path) -> None:
    traces, _ = collector(tmp_path, StoredBlob(0, b"trace"))
    nodes = {"1", "2"}
    assert traces.steps_of(A, "1", nodes) == 3
    assert traces.steps_of(B, "2", nodes) == 0, "the other one is at it"
    assert traces.steps_of(A, "1", nodes) == 0, "it was started again"
    assert traces.steps_of(B, "2", nodes) == 3
    assert traces.steps_of(A, "1", nodes) == 0
    assert traces.steps_of(A, "3", {"2", "3"}) == 0
    assert traces.steps_of(A, "3", {"3"}) == 3, "of a node that came back"
    asyncio.run(traces.collect())
    assert traces.steps_of(B, "4", {"4"}) == 0


@pytest.mark.parametrize("error", [StoreError("its disk is full"), RayLostError("it is silent")])
def test_a_store_that_fails_costs_the_trace_and_no_run(tmp_path: Path, error: Exception) -> None:
    traces, notes = collector(tmp_path, error)
    asyncio.run(traces.collect())
    assert [str(error) in note for note in notes] == [True]
    asyncio.run(traces.finish())
    assert [note.partition(":")[0] for note in notes[1:]] == ["no trace of training steps was taken"]


def test_what_came_late_is_kept_and_what_is_missing_reported(tmp_path: Path) -> None:
    traces, notes = collector(tmp_path, StoredBlob(0, b"trace"))
    asyncio.run(traces.finish())
    assert (tmp_path / "rollout.json.gz").read_bytes() == b"trace"
    assert notes[0] == f"trace of rollout steps: {tmp_path / 'rollout.json.gz'}"
    assert [note.partition(":")[0] for note in notes[1:]] == ["no trace of training steps was taken"]
