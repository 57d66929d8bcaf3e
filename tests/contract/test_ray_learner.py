"""Learner ranks as real Ray actors: a whole iteration, and a rank that is killed in the middle of one."""

from __future__ import annotations

import asyncio
import os
import re
import shutil
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import pytest
from learner_job import Batch, config_of, inline_learning, make_batch

from spotlight.cluster.blobs.blob_server import start_blob_store
from spotlight.cluster.learner.learner_actor import CONDITION, NEGATIVE, WEIGHTS, Placement, RayLauncher
from spotlight.cluster.learner.learner_group import Deadlines, LearnerGroup
from spotlight.cluster.learner.learner_rank import write_token
from spotlight.config.load import dump_config
from spotlight.scheduler.effects import PrepareBatch
from spotlight.scheduler.types import Baseline, Comparison, PolicyVersion, RolloutId
from spotlight.store.run_directory import RunPaths
from spotlight.training.learner import TrainingError
from spotlight.weights.bundle import Manifest, read

ray = pytest.importorskip("ray")

ANSWER_S = 120.0
SLICE = Comparison(Baseline.SLICE)


@pytest.fixture(scope="module")
def cluster() -> Iterator[str]:
    """A local Ray of this test's own; its node's id."""
    directory = mkdtemp(prefix="rl", dir="/tmp")
    ray.init(
        num_cpus=2,
        resources={"spotlight_reserved": 2},
        include_dashboard=False,
        log_to_driver=False,
        logging_level="WARNING",
        _temp_dir=directory,
        _node_ip_address="127.0.0.1",
    )
    yield ray.get_runtime_context().get_node_id()
    ray.shutdown()
    shutil.rmtree(directory, ignore_errors=True)


@dataclass
class Heard:
    lost_: list[tuple[float, str]] = field(default_factory=list)
    failed_: list[Exception] = field(default_factory=list)
    trouble_: list[str] = field(default_factory=list)

    def lost(self, detail: str) -> None:
        self.lost_.append((time.monotonic(), detail))

    def failed(self, error: Exception) -> None:
        self.failed_.append(error)

    def trouble(self, detail: str) -> None:
        self.trouble_.append(detail)


class Head:
    """Two ranks, driven from asyncio's loop."""

    def __init__(
        self,
        cluster: str,
        root: Path,
        pipeline: Path,
        algorithm: str,
        answer_s: float = ANSWER_S,
        reserved: int = 1,
    ) -> None:
        self.config = config_of(root, pipeline, algorithm)
        self.paths = RunPaths(self.config.runs_dir / self.config.name)
        self.paths.attempts.mkdir(parents=True)
        write_token(self.config, "token")
        self.keeper = start_blob_store(self.paths.path / "kept", 1 << 24, node=cluster)
        place = Placement(cluster, "127.0.0.1", resources={"spotlight_reserved": reserved}, threads=1)
        self.launcher = RayLauncher(
            dump_config(self.config), 2, lambda: [place, place], self.keeper, "token", self.paths.attempts
        )
        self.heard = Heard()
        self.deadlines = Deadlines(start_s=120, load_s=120, answer_s=answer_s)
        self.group: LearnerGroup | None = None

    async def __aenter__(self) -> Head:
        loop = asyncio.get_running_loop()
        self.group = LearnerGroup(self.launcher, loop, self.heard, self.deadlines)
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self.group is not None
        self.group.stop()
        await asyncio.to_thread(self.launcher.close)
        ray.kill(self.keeper)

    async def ask(self, method: str, *args: Any) -> Any:
        future = asyncio.get_running_loop().create_future()
        getattr(self.group, method)(*args, lambda *told: future.set_result(told))
        await self.until(future.done)
        told = future.result()
        return told[0] if len(told) == 1 else told

    async def until(self, true: Callable[[], bool]) -> None:
        give_up = time.monotonic() + ANSWER_S
        while not true():
            assert time.monotonic() < give_up, self.heard
            await asyncio.sleep(0.01)

    def keep(self, batch: Batch, mark: str = "the mark") -> dict[RolloutId, str]:
        for name, data in batch.packed.items():
            ray.get(self.keeper.put.remote("sample", name, data, mark))
        return dict.fromkeys(batch.rollouts, mark)

    async def train(self, batch: Batch) -> tuple[float, float]:
        await self.ask("prepare", batch.effect, batch.rollouts, self.keep(batch))
        for micro_batch in batch.effect.micro_batches:
            await self.ask("accumulate", micro_batch)
        told: tuple[float, float] = await self.ask("step", len(batch.rollouts))
        await self.ask("finish_batch")
        return told

    def kept(self, kind: str, name: str) -> bytes:
        ((kept,)) = ray.get(self.keeper.fetch.remote(kind, [name]))
        return bytes(kept.data)

    def process_of(self, rank: int) -> int:
        assert self.group is not None
        log = self.paths.attempts / f"learner-{self.group.life:03d}-rank-{rank}.log"
        found = re.search(r"in process (\d+)", log.read_text())
        assert found is not None
        return int(found[1])


def in_parts(effect: PrepareBatch) -> tuple[PrepareBatch, PrepareBatch]:
    """A group each, which is compared within itself, each sample left out."""
    first, second = (
        replace(effect, groups=(group,), micro_batches=(micro_batch,), partial=True, comparisons=(SLICE,))
        for group, micro_batch in zip(effect.groups, effect.micro_batches, strict=True)
    )
    return first, second


async def killed_and_restored(head: Head, batches: list[Batch]) -> None:
    state = head.paths.path / "state"
    async with head:
        manifest: Manifest = await head.ask("restore", None, 0)
        assert (manifest.version, manifest.lineage) == (0, 0)
        _, norm = await head.train(batches[0])
        assert norm > 0
        log = await head.ask("take_log")
        assert log["train/samples"] == len(batches[0].rollouts)
        published: Manifest = await head.ask("publish", PolicyVersion(1), 0)
        read(published, head.kept(WEIGHTS, published.digest))
        assert published.digest != manifest.digest
        prompts = [group.prompt_id for group in batches[0].effect.groups]
        await head.ask("send_conditions", prompts)
        assert all(head.kept(CONDITION, name) for name in [*prompts, NEGATIVE])
        await head.ask("save", state)
        undisturbed = await head.train(batches[1])
        digest = await head.ask("digest")

        marks = head.keep(batches[2])
        first_part, second_part = in_parts(batches[2].effect)
        await head.ask("prepare", first_part, batches[2].rollouts, marks)
        await head.ask("accumulate", first_part.micro_batches[0])
        await head.ask("prepare", second_part, batches[2].rollouts, marks)
        assert head.group is not None
        answered: list[str] = []
        head.group.accumulate(second_part.micro_batches[0], lambda: answered.append("accumulate"))
        killed_at, first = time.monotonic(), head.process_of(0)
        os.kill(head.process_of(1), signal.SIGKILL)
        head.group.step(8, lambda *_: answered.append("step"))
        await head.until(lambda: bool(head.heard.lost_))
        ((lost_at, detail),) = head.heard.lost_
        assert lost_at - killed_at < 10
        assert "rank 1 died" in detail
        assert "learner-001-rank-1.log ends with:" in detail

        again: Manifest = await head.ask("restore", state, 1)
        assert again.digest == published.digest, "what is published again is the same by content"
        assert (again.version, again.lineage) == (1, 1)
        assert not _lives(first), "the survivor of the lost life is gone"
        assert await head.train(batches[1]) == undisturbed
        assert await head.ask("digest") == digest
        exported: Path = await head.ask("export")
        assert exported.is_file()
        await head.ask("save", state.with_name("later"))
        assert (len(head.heard.lost_), head.heard.failed_, head.heard.trouble_) == (1, [], [])

        for sample in batches[2].finished.values():
            sample.final.fill_(float("nan"))
        marks = head.keep(batches[2], "another mark")
        for part in in_parts(batches[2].effect):  # whose first was prepared in the life that was lost
            head.group.prepare(part, batches[2].rollouts, marks, lambda: None)
            head.group.accumulate(part.micro_batches[0], lambda: None)
        head.group.step(8, lambda *_: answered.append("step"))
        await head.until(lambda: bool(head.heard.failed_))
        (error,) = head.heard.failed_
        assert type(error) is TrainingError
        assert "the gradient norm of optimizer step 3 is nan" in str(error)
    assert answered == []
    assert len(head.heard.lost_) == 1


def _lives(process: int) -> bool:
    try:
        return Path(f"/proc/{process}/stat").read_text().split()[2] != "Z"
    except FileNotFoundError:
        return False


def test_a_killed_rank_is_told_once_and_the_restored_learner_goes_on_as_if_nothing_was(
    cluster: str, random_pipeline: Path, tmp_path: Path
) -> None:
    head = Head(cluster, tmp_path, random_pipeline, "nft")
    learning = inline_learning(head.config)
    batches = [make_batch(head.config, learning, iteration, 0) for iteration in range(3)]
    asyncio.run(killed_and_restored(head, batches))


async def stopped(head: Head, batches: list[Batch]) -> None:
    async with head:
        await head.ask("restore", None, 0)
        assert head.group is not None
        await head.ask("prepare", batches[0].effect, batches[0].rollouts, head.keep(batches[0]))
        ranks = [head.process_of(rank) for rank in range(2)]
        os.kill(ranks[1], signal.SIGSTOP)
        answered: list[str] = []
        head.group.accumulate(batches[0].effect.micro_batches[0], lambda: answered.append("accumulate"))
        await head.until(lambda: bool(head.heard.lost_))
        ((_, detail),) = head.heard.lost_
        assert "did not answer accumulate within 5 s" in detail
        await head.until(lambda: not any(map(_lives, ranks)))
        assert not answered


async def without_room(head: Head) -> None:
    async with head:
        assert head.group is not None
        head.group.restore(None, 0, lambda _: None)
        await head.until(lambda: head.group is not None and head.group.life >= 2)
        await head.until(lambda: bool(head.heard.trouble_))


def test_ranks_without_room_are_told_and_started_again(
    cluster: str, random_pipeline: Path, tmp_path: Path
) -> None:
    head = Head(cluster, tmp_path, random_pipeline, "nft", reserved=2)
    head.deadlines = Deadlines(start_s=1.0)
    asyncio.run(without_room(head))
    (detail,) = head.heard.trouble_
    assert "learner ranks 0, 1 of 2 did not answer begin within 1 s" in detail
    assert "are the resources that they ask for free?" in detail


@pytest.mark.slow
def test_a_rank_that_hangs_is_killed(cluster: str, random_pipeline: Path, tmp_path: Path) -> None:
    head = Head(cluster, tmp_path, random_pipeline, "grpo", answer_s=5)
    batch = make_batch(head.config, inline_learning(head.config), 0, 0)
    asyncio.run(stopped(head, [batch]))
