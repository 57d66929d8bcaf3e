"""Learner ranks as real Ray actors: a whole iteration, and a rank that is killed in the middle of one."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import time
from collections.abc import Callable, Coroutine, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from learner_job import Batch, config_of, inline_learning, make_batch, prompts_of
from own_ray import own_ray

from spotlight.cluster.blobs.blob_server import start_blob_store
from spotlight.cluster.blobs.blob_store import BlobAddress
from spotlight.cluster.learner.learner_group import LearnerGroup
from spotlight.cluster.learner.learner_rank import CONDITION, NEGATIVE, WEIGHTS, LearnerRank
from spotlight.cluster.learner.life import Deadlines
from spotlight.cluster.learner.rank_folder import write_token
from spotlight.cluster.learner.ray_launcher import Placement, RayLauncher
from spotlight.cluster.remote_calls import AbandonedError
from spotlight.config.load import dump_config
from spotlight.scheduler import effects as ef
from spotlight.scheduler import events as ev
from spotlight.scheduler.effects import PrepareBatch
from spotlight.scheduler.types import Baseline, Comparison, PolicyVersion, Rollout, RolloutId, WorkerId
from spotlight.store.run_directory import RunPaths
from spotlight.training.learner import TrainingError
from spotlight.worker.reports import Report, ReportedValue
from spotlight_weights.bundle import WeightsManifest, read

ray = pytest.importorskip("ray")

# In the first tier test_ray_run.py kills the learner of a run on Ray, test_learner_ranks.py has two ranks,
# and test_learner_group.py every order in which what a rank's death causes is reported.
pytestmark = pytest.mark.slow

ANSWER_S = 120.0
SLICE = Comparison(Baseline.SLICE)


@pytest.fixture(scope="module")
def cluster() -> Iterator[str]:
    """A local Ray of this test's own; its node's id."""
    with own_ray(2, {"spotlight_reserved": 2}) as node_id:
        yield node_id


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
        start_s: float = 120,
        step_s: float = 120,
    ) -> None:
        self.config = config_of(root, pipeline, algorithm)
        self.paths = RunPaths(self.config.runs_dir / self.config.name)
        self.paths.attempts.mkdir(parents=True)
        write_token(self.config, "token")
        self.store = start_blob_store(self.paths.path / "stored", 1 << 24, node=cluster)
        place = Placement(cluster, "127.0.0.1", resources={"spotlight_reserved": reserved}, threads=1)
        self.launcher = RayLauncher(
            dump_config(self.config), lambda: [place, place], self.store, "token", self.paths.attempts
        )
        self.notes: list[str] = []
        self.losses: list[tuple[float, str]] = []
        self.answered: list[str] = []
        self.failed: list[Exception] = []
        self.group = LearnerGroup(
            self.launcher,
            prompts_of(self.config),
            self.notes.append,
            Deadlines(start_s=start_s, load_s=120, answer_s=answer_s, step_s=step_s),
        )
        self.tasks: list[asyncio.Task[None]] = []

    async def __aenter__(self) -> Head:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.group.stop()
        await asyncio.to_thread(self.launcher.close)
        ray.kill(self.store)

    async def restore(self, checkpoint: Path | None, lineage: int) -> WeightsManifest:
        async with asyncio.timeout(ANSWER_S):
            manifest = await self.group.restore(checkpoint, lineage)
        self.beside(self._watch())
        return manifest

    async def _watch(self) -> None:
        detail = await self.group.lost()
        self.losses.append((time.monotonic(), detail))

    def beside(self, asked: Coroutine[Any, Any, Any], label: str = "") -> None:
        """Have something done beside the test; ``label`` is noted if it is answered."""

        async def run() -> None:
            try:
                await asked
            except AbandonedError:
                return
            except Exception as error:  # noqa: BLE001 - the test looks at it
                if error not in self.failed:
                    self.failed.append(error)
                return
            if label:
                self.answered.append(label)

        self.tasks.append(asyncio.get_running_loop().create_task(run()))

    async def until(self, true: Callable[[], bool]) -> None:
        give_up = time.monotonic() + ANSWER_S
        while not true():
            assert time.monotonic() < give_up, (self.notes, self.losses, self.failed)
            await asyncio.sleep(0.01)

    def keep(self, batch: Batch, mark: str = "the mark") -> dict[RolloutId, BlobAddress]:
        values = tuple(ReportedValue("sample", name, data) for name, data in batch.packed.items())
        ray.get(self.store.deliver.remote(Report(WorkerId("w"), mark, values, ())))
        return {name: BlobAddress(name, mark) for name in batch.rollouts}

    async def ask(
        self,
        effect: ef.TrainEffect,
        rollouts: Mapping[RolloutId, Rollout] | None = None,
        stored: Mapping[RolloutId, BlobAddress] | None = None,
    ) -> ev.Event:
        return await self.group.ranks.ask(LearnerRank.train, effect, rollouts or {}, stored or {})

    async def train(self, batch: Batch) -> tuple[float, float]:
        await self.ask(batch.effect, batch.rollouts, self.keep(batch))
        for index, micro_batch in enumerate(batch.effect.micro_batches):
            await self.ask(ef.TrainMicroBatch(micro_batch, index))
        stepped = await self.ask(ef.StepOptimizer(batch.effect.iteration, 0, len(batch.rollouts)))
        assert isinstance(stepped, ev.OptimizerStepped)
        await self.ask(ef.FinishBatch(batch.effect.iteration))
        return stepped.loss, stepped.grad_norm

    def stored(self, kind: str, name: str) -> bytes:
        (blob,) = ray.get(self.store.fetch.remote(kind, [name]))
        return bytes(blob.data)

    def process_of(self, rank: int) -> int:
        log = self.paths.attempts / f"learner-{self.group.working_life:03d}-rank-{rank}.log"
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


async def fails_to_train(head: Head, batch: Batch) -> None:
    """Train what is not finite: its first part was prepared in the life that was lost."""
    for sample in batch.finished.values():
        sample.tensors.final.fill_(float("nan"))
    stored = head.keep(batch, "another digest")
    for part in in_parts(batch.effect):
        await head.ask(part, batch.rollouts, stored)
        await head.ask(ef.TrainMicroBatch(part.micro_batches[0], 0))
    head.beside(head.ask(ef.StepOptimizer(2, 0, 8)), "step")
    await head.until(lambda: bool(head.failed))
    (error,) = head.failed
    assert type(error) is TrainingError
    assert "the gradient norm of optimizer step 3 is nan" in str(error)


async def killed_and_restored(head: Head, batches: list[Batch]) -> None:
    state, group = head.paths.path / "state", head.group
    async with head:
        manifest = await head.restore(None, 0)
        assert (manifest.version, manifest.lineage) == (0, 0)
        _, norm = await head.train(batches[0])
        assert norm > 0
        log = await group.ranks.ask(LearnerRank.take_log)
        assert log["train/samples"] == len(batches[0].rollouts)
        published = await group.ranks.publish(PolicyVersion(1), 0)
        read(published, head.stored(WEIGHTS, published.digest))
        assert published.digest != manifest.digest
        prompts = [each.prompt_id for each in batches[0].effect.groups]
        await group.ranks.ask(LearnerRank.send_conditions, prompts)
        assert all(head.stored(CONDITION, name) for name in [*prompts, NEGATIVE])
        await group.save(state)
        undisturbed = await head.train(batches[1])
        digest = await group.ranks.ask(LearnerRank.digest)

        stored = head.keep(batches[2])
        first_part, second_part = in_parts(batches[2].effect)
        await head.ask(first_part, batches[2].rollouts, stored)
        await head.ask(ef.TrainMicroBatch(first_part.micro_batches[0], 0))
        await head.ask(second_part, batches[2].rollouts, stored)
        head.beside(head.ask(ef.TrainMicroBatch(second_part.micro_batches[0], 0)), "accumulate")
        await asyncio.sleep(0)
        first = head.process_of(0)
        os.kill(head.process_of(1), signal.SIGKILL)
        head.beside(head.ask(ef.StepOptimizer(2, 0, 8)), "step")
        await head.until(lambda: bool(head.losses))
        ((_, detail),) = head.losses
        assert "rank 1 died" in detail
        assert "learner-001-rank-1.log ends with:" in detail
        assert await head.launcher.stayed([1]) == [1], "its node is still there"

        again = await head.restore(state, 1)
        assert again.digest == published.digest, "what is published again is the same by content"
        assert (again.version, again.lineage) == (1, 1)
        assert not _lives(first), "the survivor of the lost life is gone"
        assert await head.train(batches[1]) == undisturbed
        assert await group.ranks.ask(LearnerRank.digest) == digest
        exported = await group.ranks.ask(LearnerRank.export)
        assert exported is not None
        assert exported.is_file()
        await group.save(state.with_name("later"))
        assert (len(head.losses), head.failed, head.notes) == (1, [], [])

        await fails_to_train(head, batches[2])
    assert head.answered == []
    assert len(head.losses) == 1


def _lives(process: int) -> bool:
    try:
        return Path(f"/proc/{process}/stat").read_text(encoding="utf-8").split()[2] != "Z"
    except FileNotFoundError:
        return False


def test_a_killed_rank_is_reported_once_and_the_restored_learner_goes_on_as_if_nothing_was(
    cluster: str, random_pipeline: Path, tmp_path: Path
) -> None:
    head = Head(cluster, tmp_path, random_pipeline, "nft")
    learning = inline_learning(head.config)
    batches = [make_batch(head.config, learning, iteration, 0) for iteration in range(3)]
    asyncio.run(killed_and_restored(head, batches))


async def stopped(head: Head, batches: list[Batch]) -> None:
    async with head:
        await head.restore(None, 0)
        await head.ask(batches[0].effect, batches[0].rollouts, head.keep(batches[0]))
        ranks = [head.process_of(rank) for rank in range(2)]
        os.kill(ranks[1], signal.SIGSTOP)
        head.beside(head.ask(ef.TrainMicroBatch(batches[0].effect.micro_batches[0], 0)), "accumulate")
        await head.until(lambda: bool(head.losses))
        ((_, detail),) = head.losses
        assert "did not answer train within 5 s" in detail
        await head.until(lambda: not any(map(_lives, ranks)))
        assert not head.answered


async def without_room(head: Head) -> None:
    async with head:
        head.beside(head.group.restore(None, 0))
        await head.until(lambda: head.group._lives >= 2)
        await head.until(lambda: bool(head.notes))


def test_ranks_without_room_are_reported_and_started_again(
    cluster: str, random_pipeline: Path, tmp_path: Path
) -> None:
    head = Head(cluster, tmp_path, random_pipeline, "nft", reserved=2, start_s=1.0)
    asyncio.run(without_room(head))
    (detail,) = head.notes
    assert "learner ranks 0, 1 of 2 did not answer begin within 1 s" in detail
    assert "are the resources that they ask for free?" in detail


async def frozen(head: Head, batches: list[Batch]) -> None:
    async with head:
        await head.restore(None, 0)
        for batch in batches:
            await head.train(batch)
        last = batches[-1]
        ranks = [head.process_of(rank) for rank in range(2)]
        for rank in ranks:
            os.kill(rank, signal.SIGSTOP)
        head.beside(head.ask(last.effect, last.rollouts, head.keep(last)), "prepare")
        await head.until(lambda: bool(head.losses))
        ((_, detail),) = head.losses
        assert "learner ranks 0, 1 of 2 did not answer train within" in detail
        assert "within 3600 s" not in detail
        await head.until(lambda: not any(map(_lives, ranks)))


@pytest.mark.slow
def test_a_frozen_learner_is_killed_after_what_its_calls_took(
    cluster: str, random_pipeline: Path, tmp_path: Path
) -> None:
    head = Head(cluster, tmp_path, random_pipeline, "nft", answer_s=3600, step_s=2)
    learning = inline_learning(head.config)
    batches = [make_batch(head.config, learning, number, number) for number in range(4)]
    asyncio.run(frozen(head, batches))


def test_a_rank_that_hangs_is_killed(cluster: str, random_pipeline: Path, tmp_path: Path) -> None:
    head = Head(cluster, tmp_path, random_pipeline, "grpo", answer_s=5)
    batch = make_batch(head.config, inline_learning(head.config), 0, 0)
    asyncio.run(stopped(head, [batch]))
