"""A learner whose ranks are played by the test, and what became of all that was asked of it."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from virtual_time import settle

from spotlight.cluster.learner.learner_group import LearnerGroup
from spotlight.cluster.learner.learner_rank import LearnerRank
from spotlight.cluster.learner.life import Deadlines, RankActor
from spotlight.cluster.remote_calls import AbandonedError
from spotlight.scheduler import effects as ef
from spotlight.scheduler.types import MicroBatch
from spotlight_weights.bundle import WeightsManifest

MANIFEST = WeightsManifest(0, 0, "digest", 1, ("policy",), 1)
MICRO_BATCH = MicroBatch(0, 0, (), 0)
START = ["begin", "open_rendezvous", "join", "load_model", "build", "load", "publish"]
PENDING = object()
TRAINING = {
    ef.PrepareBatch: "prepare",
    ef.TrainMicroBatch: "accumulate",
    ef.StepOptimizer: "step",
    ef.FinishBatch: "finish_batch",
}


def name_of(method: Callable[..., Any], args: Sequence[Any]) -> str:
    """What a rank is asked for, by the name of its method, or what it is to train."""
    return TRAINING[type(args[0])] if method == LearnerRank.train else method.__name__


def pending() -> asyncio.Future[Any]:
    return asyncio.get_running_loop().create_future()


def fail(future: asyncio.Future[Any], error: Exception) -> None:
    if not future.done():
        future.set_exception(error)
        future.exception()  # nobody need wait for it


@dataclass
class FakeRank:
    rank: int
    life: int
    answers: Callable[[int, str], Any]
    called: list[str] = field(default_factory=list)
    waiting: list[asyncio.Future[Any]] = field(default_factory=list)
    death: asyncio.Future[Any] = field(default_factory=pending)

    def call(self, method: Callable[..., Any], *args: Any, **kwargs: Any) -> asyncio.Future[Any]:
        name = name_of(method, args)
        self.called.append(name)
        future = pending()
        answer = self.answers(self.rank, name)
        if self.death.done():
            fail(future, RuntimeError("actor died"))
        elif isinstance(answer, Exception):
            fail(future, answer)
        elif answer is not PENDING:
            future.set_result(answer)
        else:
            self.waiting.append(future)
        return future

    async def gone(self) -> Any:
        return await asyncio.shield(self.death)

    def die(self) -> None:
        for future in (self.death, *self.waiting):
            fail(future, RuntimeError("actor died"))


@dataclass
class FakeLauncher:
    world: int = 2
    answers: dict[str, Any] = field(default_factory=dict)
    lives: list[list[FakeRank]] = field(default_factory=list)
    started_at_s: list[float] = field(default_factory=list)
    refuses: int = 0
    beside: list[int | None] = field(default_factory=list)
    left: set[int] = field(default_factory=set)

    def answer(self, rank: int, method: str) -> Any:
        answer = self.answers.get(method, self.answers.get(f"{method} {rank}"))
        return (MANIFEST if rank == 0 else None) if answer is None and method == "publish" else answer

    async def start(self, life: int, beside: int | None = None) -> Sequence[RankActor]:
        self.beside.append(beside)
        self.started_at_s.append(asyncio.get_running_loop().time())
        if self.refuses > 0:
            self.refuses -= 1
            raise LookupError("no reserved node has room")
        self.lives.append([FakeRank(rank, life, self.answer) for rank in range(self.world)])
        return self.lives[-1]

    async def end(self, ranks: Sequence[RankActor], suspects: Sequence[int]) -> str:
        for rank in ranks:
            assert isinstance(rank, FakeRank)
            rank.die()
        return "".join(f"log of {rank}" for rank in suspects)

    async def stayed(self, lives: Sequence[int]) -> list[int]:
        return [life for life in lives if life not in self.left]

    def meeting_hosts(self, ranks: Sequence[RankActor]) -> list[str]:
        return ["127.0.0.1"] * len(ranks)

    def nodes_of(self, life: int) -> Mapping[str, int]:
        return {f"node of life {life}": self.world}


class World:
    """A group, and what became of everything that was asked of it."""

    def __init__(self, world: int = 2, **answers: Any) -> None:
        self.launcher = FakeLauncher(world, answers)
        self.notes: list[str] = []
        self.group = LearnerGroup(
            self.launcher, [], self.notes.append, Deadlines(start_s=20, load_s=100, answer_s=50, step_s=4)
        )
        self.done: list[Any] = []
        self.lost: list[str] = []
        self.failed: list[Exception] = []
        self.tasks: set[asyncio.Task[None]] = set()

    def ask(self, asked: Awaitable[Any], label: Any = None) -> None:
        """Have something done beside the test; its value, or ``label``, is added to :attr:`done`."""
        self._start(self._ask(asked, label))

    def restore(self, checkpoint: Path | None = None, lineage: int = 0) -> None:
        self._start(self._live(checkpoint, lineage))

    def accumulate(self, label: str) -> None:
        self.ask(self.train(ef.TrainMicroBatch(MICRO_BATCH, 0)), label)

    async def train(self, effect: ef.TrainEffect) -> Any:
        return await self.group.ranks.ask(LearnerRank.train, effect, {}, {})

    async def up(self, checkpoint: Path | None = None, lineage: int = 0) -> FakeLauncher:
        self.restore(checkpoint, lineage)
        await settle()
        return self.launcher

    async def _live(self, checkpoint: Path | None, lineage: int) -> None:
        await self._ask(self.group.restore(checkpoint, lineage), None)
        if self.group.is_up:
            await self._ask(self.group.lost(), None, self.lost)

    async def _ask(self, asked: Awaitable[Any], label: Any, done: list[Any] | None = None) -> None:
        try:
            value = await asked
        except AbandonedError:
            return
        except Exception as error:  # noqa: BLE001 - the test looks at it
            if error not in self.failed:
                self.failed.append(error)
            return
        (self.done if done is None else done).append(value if label is None else label)

    def _start(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard)
