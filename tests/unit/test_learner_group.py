"""The learner as the head sees it: lives end once, in whatever order news come. No Ray, virtual time."""

from __future__ import annotations

import heapq
import itertools
import pickle
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spotlight.cluster.learner.learner_group import (
    FINAL,
    Deadlines,
    LearnerError,
    LearnerGroup,
    Process,
    State,
)
from spotlight.config.errors import ConfigError, Problem
from spotlight.scheduler.types import MicroBatch
from spotlight.training.settings import TrainingError
from spotlight.weights.bundle import Manifest

MANIFEST = Manifest(0, 0, "digest", 1, ("policy",), 1)
MICRO_BATCH = MicroBatch(0, 0, (), 0)
START = ["begin", "open_rendezvous", "join", "load_model", "build", "load", "publish"]


@dataclass
class Put:
    at_s: float
    call: Callable[[], object] | None

    def cancel(self) -> None:
        self.call = None


@dataclass
class VirtualLoop:
    now_s: float = 0.0
    heap: list[tuple[float, int, Put]] = field(default_factory=list)
    numbers: itertools.count[int] = field(default_factory=itertools.count)

    def call_soon_threadsafe(self, callback: Callable[..., object], /, *args: Any) -> Put:
        return self.call_later(0, callback, *args)

    def call_later(self, delay: float, callback: Callable[..., object], /, *args: Any) -> Put:
        put = Put(self.now_s + delay, lambda: callback(*args))
        heapq.heappush(self.heap, (put.at_s, next(self.numbers), put))
        return put

    def run(self, for_s: float = 0.0) -> None:
        until = self.now_s + for_s
        while self.heap and self.heap[0][0] <= until:
            self.now_s, _, put = heapq.heappop(self.heap)
            if put.call is not None:
                put.call()
        self.now_s = until


@dataclass
class FakeProcess:
    rank: int
    life: int
    answers: Callable[[int, str], Any]
    called: list[str] = field(default_factory=list)
    waiting: list[Future[Any]] = field(default_factory=list)
    death: Future[Any] = field(default_factory=Future)

    def call(self, method: str, *args: object) -> Future[Any]:
        self.called.append(method)
        future: Future[Any] = Future()
        answer = self.answers(self.rank, method)
        if self.death.done():
            future.set_exception(RuntimeError("actor died"))
        elif isinstance(answer, Exception):
            future.set_exception(answer)
        elif answer is not PENDING:
            future.set_result(answer)
        else:
            self.waiting.append(future)
        return future

    def gone(self) -> Future[Any]:
        return self.death

    def die(self) -> None:
        if not self.death.done():
            self.death.set_exception(RuntimeError("actor died"))
            for future in self.waiting:
                if not future.done():
                    future.set_exception(RuntimeError("actor died"))


PENDING = object()


@dataclass
class FakeLauncher:
    world: int = 2
    answers: dict[str, Any] = field(default_factory=dict)
    lives: list[list[FakeProcess]] = field(default_factory=list)
    started_at_s: list[float] = field(default_factory=list)
    refuses: int = 0
    loop: VirtualLoop = field(default_factory=VirtualLoop)

    def answer(self, rank: int, method: str) -> Any:
        told = self.answers.get(method, self.answers.get(f"{method} {rank}"))
        return (MANIFEST if rank == 0 else None) if told is None and method == "publish" else told

    def start(self, life: int) -> Future[Sequence[Process]]:
        future: Future[Sequence[Process]] = Future()
        self.started_at_s.append(self.loop.now_s)
        if self.refuses > 0:
            self.refuses -= 1
            future.set_exception(LookupError("no reserved node has room"))
            return future
        self.lives.append([FakeProcess(rank, life, self.answer) for rank in range(self.world)])
        future.set_result(self.lives[-1])
        return future

    def end(self, processes: Sequence[Process], ranks: Sequence[int]) -> Future[str]:
        future: Future[str] = Future()
        for process in processes:
            assert isinstance(process, FakeProcess)
            process.die()
        future.set_result("".join(f"log of {rank}" for rank in ranks))
        return future

    def meeting_hosts(self, processes: Sequence[Process]) -> list[str]:
        return ["127.0.0.1"] * len(processes)


@dataclass
class Heard:
    lost_: list[str] = field(default_factory=list)
    failed_: list[Exception] = field(default_factory=list)
    trouble_: list[str] = field(default_factory=list)

    def lost(self, detail: str) -> None:
        self.lost_.append(detail)

    def failed(self, error: Exception) -> None:
        self.failed_.append(error)

    def trouble(self, detail: str) -> None:
        self.trouble_.append(detail)


class World:
    def __init__(self, world: int = 2, **answers: Any) -> None:
        self.launcher = FakeLauncher(world, answers)
        self.loop, self.heard = self.launcher.loop, Heard()
        self.group = LearnerGroup(
            self.launcher, self.loop, self.heard, Deadlines(start_s=20, load_s=100, answer_s=50)
        )
        self.done: list[Any] = []

    def up(self, checkpoint: Path | None = None, lineage: int = 0) -> FakeLauncher:
        self.group.restore(checkpoint, lineage, self.done.append)
        self.loop.run()
        return self.launcher

    def accumulate(self, label: str) -> None:
        self.group.accumulate(MICRO_BATCH, lambda: self.done.append(label))


def test_a_start_makes_every_rank_ready_and_publishes() -> None:
    world = World()
    launcher = world.up(Path("state"), 3)
    first, second = launcher.lives[0]
    assert first.called == START
    assert second.called == [step for step in START if step != "open_rendezvous"]
    assert world.done == [MANIFEST]
    assert world.group.state is State.UP
    alone = World(world=1)
    assert alone.up().lives[0][0].called == ["begin", "join", "load_model", "build", "publish"]


def test_calls_go_to_every_rank_one_after_the_other() -> None:
    world = World(accumulate=PENDING, step=(0.5, 2.0))
    launcher = world.up()
    world.accumulate("a")
    world.group.step(8, lambda *told: world.done.append(told))
    world.loop.run()
    assert [process.called[-1] for process in launcher.lives[0]] == ["accumulate"] * 2
    launcher.lives[0][1].waiting[0].set_result(None)
    world.loop.run(40)
    assert world.done == [MANIFEST]
    launcher.lives[0][0].waiting[0].set_result(None)
    world.loop.run(200)  # every deadline passes: an answered call has none
    assert world.done == [MANIFEST, "a", (0.5, 2.0)]
    assert not world.heard.lost_


def test_a_death_is_told_once_and_nothing_of_that_life_is_answered() -> None:
    world = World(accumulate=PENDING)
    launcher = world.up()
    world.accumulate("a")
    world.accumulate("b")
    world.loop.run()
    first, second = launcher.lives[0]
    second.die()
    first.waiting[0].set_exception(RuntimeError("gloo: Connection closed by peer"))
    world.loop.run(300)
    (detail,) = world.heard.lost_
    assert "learner rank 1 died" in detail
    assert "log of 1" in detail
    assert first.death.done(), "the survivors are killed"
    world.accumulate("c")
    world.loop.run(300)
    assert world.done == [MANIFEST]
    assert world.group.state is State.DOWN
    assert len(launcher.lives) == 1, "only restore() starts anew"
    launcher.answers = {}
    world.group.restore(Path("state"), 1, world.done.append)
    world.loop.run()
    assert world.done == [MANIFEST, MANIFEST]
    assert len(world.heard.lost_) == 1


def test_a_survivors_error_waits_for_the_death_that_caused_it() -> None:
    world = World(accumulate=PENDING)
    launcher = world.up()
    world.accumulate("a")
    world.loop.run()
    first, second = launcher.lives[0]
    first.waiting.pop().set_exception(RuntimeError("gloo: Connection closed by peer"))
    world.loop.run(0.5)
    assert not world.heard.lost_
    second.die()
    world.loop.run(5)
    (detail,) = world.heard.lost_
    assert "learner rank 1 died" in detail


def test_a_late_answer_costs_the_life() -> None:
    world = World(**{"accumulate 1": PENDING})
    launcher = world.up()
    world.accumulate("a")
    world.loop.run(49)
    assert not world.heard.lost_
    world.loop.run(2)
    assert "learner ranks 1 of 2 did not answer accumulate within 50 s" in world.heard.lost_[0]
    assert all(process.death.done() for process in launcher.lives[0])
    assert world.done == [MANIFEST]


def test_errors_to_mend_end_the_run_as_they_are() -> None:
    error = TrainingError("the gradient norm is nan")
    world = World(step=error)
    launcher = world.up()
    world.group.step(8, lambda *told: world.done.append(told))
    world.loop.run(300)
    assert world.heard.failed_ == [error]
    assert not world.heard.lost_
    assert all(process.death.done() for process in launcher.lives[0])


def test_a_start_that_fails_is_told_once_and_tried_again_ever_more_slowly() -> None:
    world = World()
    world.launcher.refuses = 9
    world.up()
    world.loop.run(1000)
    (detail,) = world.heard.trouble_
    assert "no reserved node has room" in detail
    waited = [later - earlier for earlier, later in itertools.pairwise(world.launcher.started_at_s)]
    assert waited == [1, 2, 4, 8, 16, 32, 60, 60, 60]
    assert world.done == [MANIFEST]
    assert not world.heard.lost_


def test_a_process_that_dies_or_hangs_while_it_starts_is_started_again() -> None:
    world = World(build=PENDING)
    launcher = world.up()
    launcher.lives[0][0].die()
    world.loop.run(0.5)
    launcher.answers = {"begin 1": PENDING}
    world.loop.run(10)
    assert len(launcher.lives) == 2
    launcher.answers = {}
    world.loop.run(30)
    assert world.done == [MANIFEST]
    (detail,) = world.heard.trouble_
    assert "learner rank 0 did not start" in detail
    assert "log of 0" in detail


def test_what_raises_in_every_life_ends_the_run() -> None:
    world = World(accumulate=RuntimeError("a bug"))
    world.up()
    for _ in range(3):
        world.accumulate("a")
        world.loop.run(10)
        world.group.restore(None, 1, world.done.append)
        world.loop.run(100)
    (error,) = world.heard.failed_
    assert isinstance(error, LearnerError)
    assert "3 times in a row: learner rank 0 failed: RuntimeError: a bug" in str(error)
    assert len(world.heard.lost_) == 2


def test_losses_in_a_row_slow_restarts_down_until_a_checkpoint() -> None:
    world = World()
    for _ in range(4):
        world.group.restore(None, 1, world.done.append)
        world.loop.run(100)
        world.launcher.lives[-1][0].die()
        world.loop.run()
    lost_at_s = [100.0, 200.0, 300.0]
    pauses = [start - lost for start, lost in zip(world.launcher.started_at_s[1:], lost_at_s, strict=True)]
    assert pauses == [0, 1, 2]
    world.group.restore(None, 1, world.done.append)
    world.loop.run(100)
    world.group.save(Path("state"), lambda: None)
    world.loop.run()
    world.launcher.lives[-1][0].die()
    world.loop.run()
    now = world.loop.now_s
    world.group.restore(None, 1, world.done.append)
    world.loop.run()
    assert world.launcher.started_at_s[-1] == now


@pytest.mark.parametrize("kind", FINAL)
def test_errors_to_mend_survive_the_way_from_another_process(kind: type[Exception]) -> None:
    error = ConfigError("the file", [Problem("a", "b", "c", "d")]) if kind is ConfigError else kind("text")
    again = pickle.loads(pickle.dumps(error))
    assert type(again) is kind
    assert str(again) == str(error)


def test_stop_ends_it_silently() -> None:
    world = World(accumulate=PENDING)
    launcher = world.up()
    world.accumulate("a")
    world.group.stop()
    world.loop.run(500)
    assert all(process.death.done() for process in launcher.lives[0])
    assert (world.heard.lost_, world.heard.failed_, world.heard.trouble_) == ([], [], [])


@pytest.mark.parametrize("world_size", [1, 3])
@given(data=st.data())
def test_each_life_ends_at_most_once_and_answers_only_while_it_lives(
    world_size: int, data: st.DataObject
) -> None:
    """Deaths, errors, silence and answers in any order: every restore leads to one manifest or one loss."""
    world = World(world=world_size, accumulate=PENDING)
    expected_losses = 0
    answered: list[int] = []
    for life in range(data.draw(st.integers(1, 3))):
        world.group.restore(None, life, world.done.append)
        world.loop.run(10)
        assert world.group.state is State.UP
        world.group.accumulate(MICRO_BATCH, lambda life=life: answered.append(life))  # type: ignore[misc]
        world.loop.run()
        processes = world.launcher.lives[-1]
        before = len(world.heard.lost_)
        fates = data.draw(st.permutations(range(world_size)))
        trouble = False
        for rank in fates:
            fate = data.draw(st.sampled_from(["answer", "die", "raise", "silence"]))
            trouble = trouble or fate != "answer"
            process = processes[rank]
            pending = [future for future in process.waiting if not future.done()]
            if fate == "die":
                process.die()
            elif pending and fate == "answer":
                pending[0].set_result(None)
            elif pending and fate == "raise":
                pending[0].set_exception(RuntimeError("a collective failed"))
            world.loop.run(data.draw(st.sampled_from([0.0, 0.4, 2.0])))
        world.loop.run(60)
        expected_losses += trouble
        ended = len(world.heard.lost_) + len(world.heard.failed_)
        assert ended == expected_losses
        assert (answered[-1:] == [life]) == (not trouble)
        if world.heard.failed_:
            return
        assert len(world.heard.lost_) - before == trouble
