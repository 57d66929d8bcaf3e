"""Workers' processes as the head sees them: a death reported once, no tight loops, nobody old believed."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from virtual_time import VirtualTimeLoop

from spotlight.cluster.remote_calls import Conversations
from spotlight.cluster.workers.worker_pool import (
    FIRST_PAUSE_S,
    HEARTBEATS_MISSED,
    LONGEST_PAUSE_S,
    WorkerPool,
)
from spotlight.scheduler import effects as ef
from spotlight.scheduler import events as ev
from spotlight.scheduler.types import LeaseId, NodeId, WorkerId
from spotlight.worker.interfaces import Command

A, B = WorkerId("n/0"), WorkerId("n/1")
NODE = NodeId("n")
BEAT_S, START_S = 5.0, 60.0
ROOMS: list[Room] = []


@dataclass
class FakeHandle:
    """A process: the test answers for it, in any order."""

    order: ef.StartWorker
    loop: VirtualTimeLoop
    up: asyncio.Future[Any]
    watches: list[asyncio.Future[Any]] = field(default_factory=list)
    sent: list[tuple[Command, asyncio.Future[Any]]] = field(default_factory=list)
    killed: bool = False

    def ready(self) -> asyncio.Future[Any]:
        return self.up

    def tell(self, command: Command) -> asyncio.Future[Any]:
        self.sent.append((command, self.loop.create_future()))
        return self.sent[-1][1]

    def watch(self, hang_s: float) -> asyncio.Future[Any]:
        self.watches.append(self.loop.create_future())
        return self.watches[-1]

    @property
    def commands(self) -> list[Command]:
        return [command for command, _ in self.sent]

    def die(self, error: Exception | None = None) -> None:
        """As Ray tells it: every open call fails."""
        for reference in (self.up, *self.watches, *(reference for _, reference in self.sent)):
            if not reference.done():
                reference.set_exception(error or RuntimeError("line\nthe actor died"))
                reference.exception()  # nobody need wait for it


@dataclass
class FakeStarter:
    loop: VirtualTimeLoop
    handles: list[FakeHandle] = field(default_factory=list)
    gone: set[NodeId] = field(default_factory=set)

    def start(self, order: ef.StartWorker) -> FakeHandle:
        if order.node in self.gone:
            raise KeyError(order.node)
        self.handles.append(FakeHandle(order, self.loop, self.loop.create_future()))
        return self.handles[-1]

    def kill(self, handle: FakeHandle) -> None:
        handle.killed = True
        handle.die(RuntimeError("killed"))

    async def log_tail(self, order: ef.StartWorker) -> str:
        return f"the last lines of {order.worker}"


class Room:
    """A pool, and what it reported. The pool's methods are called from within its event loop."""

    def __init__(self) -> None:
        self.loop = VirtualTimeLoop()
        self.starter = FakeStarter(self.loop)
        self.events: list[ev.Event] = []
        self.notes: list[str] = []
        self.crashes: list[tuple[WorkerId, str]] = []
        ROOMS.append(self)
        self.loop.run_until_complete(self._make())

    async def _make(self) -> None:
        self.pool = WorkerPool(
            Conversations(), self.starter, self.events.append, self.notes.append,
            lambda worker, why: self.crashes.append((worker, why)), BEAT_S, START_S,
        )  # fmt: skip

    def call(self, method: str, *args: Any) -> None:
        """A method of the pool; what it begins takes its first step."""

        async def call() -> None:
            getattr(self.pool, method)(*args)
            await asyncio.sleep(0)

        self.loop.run_until_complete(call())

    def order(self, epoch: int, worker: WorkerId = A) -> None:
        self.call("start", ef.StartWorker(worker, NODE, 0, epoch))

    def start(self, epoch: int, worker: WorkerId = A) -> FakeHandle:
        self.order(epoch, worker)
        return self.last

    def up(self, epoch: int = 1, worker: WorkerId = A) -> FakeHandle:
        handle = self.start(epoch, worker)
        handle.up.set_result(None)
        self.loop.settle()
        return handle

    @property
    def last(self) -> FakeHandle:
        return self.starter.handles[-1]

    def end(self) -> None:
        tasks = asyncio.all_tasks(self.loop)
        for task in tasks:
            task.cancel()
        self.loop.settle()
        self.loop.close()

    def take(self) -> list[ev.Event]:
        taken, self.events[:] = list(self.events), []
        return taken


@pytest.fixture(autouse=True)
def _rooms_end() -> Iterator[None]:
    yield
    while ROOMS:
        ROOMS.pop().end()


def test_a_process_is_reported_when_it_is_up_and_watched_from_then_on() -> None:
    room = Room()
    handle = room.start(1)
    assert room.take() == []
    assert room.pool.alive == []
    handle.up.set_result(None)
    room.loop.settle()
    assert room.take() == [ev.WorkerStarted(A, 1)]
    assert room.pool.alive == [A]
    for beat in range(4):
        room.loop.pass_s(BEAT_S)
        handle.watches[beat].set_result(None)
        room.loop.settle()
    assert len(handle.watches) == 5
    assert room.take() == []


def test_released_processes_live_on_unwatched_and_those_that_hold_weights_are_told_apart() -> None:
    room = Room()
    proven, other = room.up(), room.up(1, B)
    room.call("prove", A)
    room.take()
    able, unfit = room.pool.release([NODE])
    assert (able, unfit) == ([proven], [other])
    proven.die()
    room.loop.settle()
    assert room.take() == []
    assert room.pool.alive == []
    assert not other.killed
    assert room.start(2) is not proven, "the node rolls out again"


def test_commands_keep_their_order_and_wait_for_nobody() -> None:
    room = Room()
    handle = room.up()
    commands = [ef.AbandonLease(A, 1, LeaseId(number)) for number in range(3)]
    for command in commands:
        room.call("tell", A, command)
    assert handle.commands == commands
    for beat in range(20):
        room.loop.pass_s(BEAT_S)
        handle.watches[beat].set_result(None)
    assert not handle.killed, "a worker slow to take a command is not restarted for that"


def test_commands_for_a_process_that_is_not_there_are_dropped() -> None:
    room = Room()
    command = ef.AbandonLease(A, 1, LeaseId(1))
    room.call("tell", A, command)
    handle = room.start(1)
    room.call("tell", A, command)
    assert handle.commands == []


def test_an_order_that_is_repeated_starts_nothing() -> None:
    room = Room()
    room.start(1)
    room.start(1)
    assert len(room.starter.handles) == 1
    room.last.up.set_result(None)
    room.loop.settle()
    room.start(1)
    assert len(room.starter.handles) == 1
    assert room.take() == [ev.WorkerStarted(A, 1)] * 2, "the first answer may have been lost"


def test_a_newer_order_replaces_the_process_and_the_old_one_is_not_heard() -> None:
    room = Room()
    old = room.up(1)
    room.take()
    room.call("start", ef.StartWorker(A, NODE, 0, 2))
    assert old.killed
    room.loop.pass_s(FIRST_PAUSE_S)
    new = room.last
    assert new is not old
    room.loop.settle()
    assert room.take() == []
    new.up.set_result(None)
    room.loop.settle()
    assert room.take() == [ev.WorkerStarted(A, 2)]


def test_one_that_is_replaced_while_it_starts_is_not_reported_as_up() -> None:
    room = Room()
    old = room.start(1)
    old.up.set_result(None)  # on its way to the loop
    room.start(2)
    room.loop.settle()
    assert room.take() == []


def test_a_death_is_reported_once_and_why() -> None:
    room = Room()
    handle = room.up()
    room.call("prove", A)
    room.take()
    room.call("tell", A, ef.AbandonLease(A, 1, LeaseId(1)))
    handle.die()
    room.loop.pass_s(100)
    assert room.take() == [ev.WorkerCrashed(A, 1)]
    assert room.pool.alive == []
    assert handle.killed, "its work has ended, which does not end the process"
    room.start(2)
    assert room.last is handle, "not at once"
    room.loop.pass_s(FIRST_PAUSE_S)
    assert room.last.order.epoch == 2
    assert room.crashes == [(A, "RuntimeError: the actor died")]
    assert room.notes == [], "one that had started is a crash, no failure to start"


def test_silence_for_some_heartbeats_is_death() -> None:
    room = Room()
    handle = room.up()
    room.call("prove", A)
    room.take()
    room.loop.pass_s(BEAT_S * HEARTBEATS_MISSED - 0.1)
    assert room.take() == []
    room.loop.pass_s(0.2)
    assert room.take() == [ev.WorkerCrashed(A, 1)]
    assert handle.killed
    room.start(2)
    room.loop.pass_s(FIRST_PAUSE_S)
    assert room.crashes == [(A, "shows no sign of life")]


def test_a_process_that_does_not_come_up_in_time_is_ended() -> None:
    room = Room()
    handle = room.start(1)
    room.loop.pass_s(START_S + 0.1)
    assert room.take() == [ev.WorkerCrashed(A, 1)]
    assert handle.killed


def fail_to_start(room: Room, times: int, *, up: bool = False) -> list[float]:
    """Let it fail so many times, each answered by a new order at once. Returns the pauses."""
    pauses: list[float] = []
    for epoch in range(1, times + 1):
        began_s, known = room.loop.time(), len(room.starter.handles)
        room.call("start", ef.StartWorker(A, NODE, 0, epoch))
        while len(room.starter.handles) == known:
            room.loop.pass_s(0.25)
        pauses.append(room.loop.time() - began_s)
        if up:
            room.last.up.set_result(None)
            room.loop.settle()
        room.last.die()
        room.loop.settle()
    return pauses


@pytest.mark.parametrize("up", [False, True], ids=["never up", "up, but never with weights"])
def test_what_does_not_start_is_reported_once_and_tried_with_growing_pauses(up: bool) -> None:
    room = Room()
    pauses = fail_to_start(room, 12, up=up)
    assert pauses[0] == pytest.approx(0, abs=1e-3)
    assert pauses[1] == pytest.approx(2 * FIRST_PAUSE_S, abs=1e-3)
    assert all(later >= earlier - 1e-3 for earlier, later in pairwise(pauses))
    assert pauses[-1] == pytest.approx(LONGEST_PAUSE_S, abs=0.3)
    (note,) = room.notes
    assert "n/0 does not start, and is tried again with growing pauses: RuntimeError: the actor died" in note
    assert "the last lines of n/0" in note


def test_weights_end_the_pauses_and_the_next_trouble_is_reported_again() -> None:
    room = Room()
    fail_to_start(room, 4)
    room.call("start", ef.StartWorker(A, NODE, 0, 5))
    room.loop.pass_s(LONGEST_PAUSE_S)
    room.last.up.set_result(None)
    room.loop.settle()
    room.call("prove", A)
    room.last.die()
    room.loop.settle()
    room.call("start", ef.StartWorker(A, NODE, 0, 6))
    room.loop.pass_s(FIRST_PAUSE_S)
    assert room.last.order.epoch == 6
    room.last.die()
    room.loop.settle()
    assert len(room.notes) == 1  # not before it is started again: its node may be gone as well
    room.call("start", ef.StartWorker(A, NODE, 0, 7))
    room.loop.pass_s(LONGEST_PAUSE_S)
    assert len(room.notes) == 2


def test_a_repeated_order_within_the_pause_does_not_prolong_it_or_start_twice() -> None:
    room = Room()
    fail_to_start(room, 1)
    for _ in range(4):
        room.call("start", ef.StartWorker(A, NODE, 0, 2))
        room.loop.pass_s(FIRST_PAUSE_S / 2)
    room.loop.pass_s(FIRST_PAUSE_S)
    assert [handle.order.epoch for handle in room.starter.handles] == [1, 2]


def test_a_node_s_loss_ends_its_processes_without_a_crash() -> None:
    room = Room()
    handle, waiting = room.up(1, A), room.start(1, B)
    room.take()
    room.call("lose", NODE)
    assert handle.killed
    assert waiting.killed
    room.loop.pass_s(1000)
    assert room.take() == []
    assert room.crashes == []
    assert room.pool.alive == []


def test_a_process_that_died_with_its_node_is_no_crash() -> None:
    room = Room()
    room.up().die()  # before the node's loss is reported
    room.loop.settle()
    room.take()
    room.call("start", ef.StartWorker(A, NODE, 0, 2))
    room.call("lose", NODE)
    room.loop.pass_s(1000)
    assert room.crashes == []
    assert len(room.starter.handles) == 1
    # It comes back: nothing of before counts.
    assert room.start(3).order.epoch == 3


def test_an_order_for_a_node_that_is_gone_already_starts_nothing() -> None:
    room = Room()
    room.starter.gone.add(NODE)
    room.call("start", ef.StartWorker(A, NODE, 0, 1))
    room.loop.pass_s(1000)
    assert room.take() == []


def test_a_distrusted_process_is_ended_and_restarted() -> None:
    room = Room()
    handle = room.up()
    room.take()
    room.call("distrust", A)
    assert handle.killed
    room.loop.settle()
    assert room.take() == [ev.WorkerCrashed(A, 1)]
    room.call("distrust", A)  # nobody is there
    assert room.take() == []


def test_after_the_end_nothing_lives_and_nothing_is_reported() -> None:
    room = Room()
    handle = room.up(1, A)
    room.start(1, B).die()
    room.loop.settle()
    room.call("start", ef.StartWorker(B, NODE, 1, 2))  # in its pause
    room.take()
    room.call("close")
    room.loop.pass_s(1000)
    assert handle.killed
    assert room.take() == []
    assert len(room.starter.handles) == 2


class PoolMachine(RuleBasedStateMachine):
    """Orders, deaths, losses and time in any order: at most one process lives, and silence is answered."""

    def __init__(self) -> None:
        super().__init__()
        self.room = Room()
        self.epoch = 0
        self.expected: int | None = None

    @rule()
    def order(self) -> None:
        self.epoch += 1
        self.expected = self.epoch
        self.room.take()
        self.room.call("start", ef.StartWorker(A, NODE, 0, self.epoch))

    @precondition(lambda self: self.expected is not None)
    @rule()
    def repeat(self) -> None:
        self.room.call("start", ef.StartWorker(A, NODE, 0, self.epoch))

    @precondition(lambda self: self.room.starter.handles)
    @rule(data=st.data(), dies=st.booleans(), settles=st.booleans())
    def answer(self, data: st.DataObject, dies: bool, settles: bool) -> None:
        handle = data.draw(st.sampled_from(self.room.starter.handles[-2:]))
        if dies:
            handle.die()
        elif not handle.up.done():
            handle.up.set_result(None)
        if settles:
            self.room.loop.settle()

    @rule()
    def prove(self) -> None:
        self.room.call("prove", A)

    @rule(seconds=st.sampled_from([0.5, 5.0, 70.0]))
    def wait(self, seconds: float) -> None:
        self.room.loop.pass_s(seconds)

    @rule()
    def lose(self) -> None:
        self.expected = None
        self.room.take()
        self.room.call("lose", NODE)

    @invariant()
    def nobody_from_before(self) -> None:
        living = [handle for handle in self.room.starter.handles if not handle.killed]
        assert len(living) <= 1
        if self.expected is None:
            assert not living
        for handle in living:
            assert handle.order.epoch == self.epoch
        for event in self.room.events:
            assert isinstance(event, ev.WorkerStarted | ev.WorkerCrashed)
            assert event.epoch == self.expected, "news of a process from before"

    def teardown(self) -> None:
        """Whatever happened, an order is answered in the end."""
        self._see_the_answer()
        self.room.end()
        ROOMS.remove(self.room)

    def _see_the_answer(self) -> None:
        if self.expected is not None and not self.room.events:
            self.room.loop.pass_s(START_S + LONGEST_PAUSE_S + BEAT_S * HEARTBEATS_MISSED + 1)
            assert self.room.events, "a silence that the controller must end by its own clock"


TestPool = PoolMachine.TestCase
TestPool.settings = settings(max_examples=40, stateful_step_count=25)
