"""The learner as the head sees it: lives end once, in whatever order news come. No Ray, virtual time."""

from __future__ import annotations

import asyncio
import itertools
import pickle
from collections.abc import Callable, Iterable
from pathlib import Path

import pytest
from fake_learner import MANIFEST, PENDING, START, World
from hypothesis import given
from hypothesis import strategies as st
from virtual_time import played, settle

from spotlight.cluster.learner.learner_group import STUCK_MAX, Failures, LearnerError
from spotlight.cluster.learner.life import FINAL, CallLimits, Deadlines
from spotlight.scheduler import effects as ef
from spotlight.scheduler.cluster.answer_limits import AGREE, REMEMBERED
from spotlight.scheduler.types import MicroBatch, RolloutId
from spotlight.training.settings import TrainingError
from spotlight_rewards.base.errors import ConfigError, Problem

STEP = ef.StepOptimizer(0, 0, 8)


def test_a_start_makes_every_rank_ready_and_publishes() -> None:
    async def scene() -> None:
        world = World()
        launcher = await world.up(Path("state"), 3)
        first, second = launcher.lives[0]
        assert first.called == START
        assert second.called == START
        assert world.done == [MANIFEST]
        assert world.group.is_up
        alone = World(world=1)
        assert (await alone.up()).lives[0][0].called == [step for step in START if step != "load"]

    played(scene())


def test_calls_go_to_every_rank_one_after_the_other() -> None:
    async def scene() -> None:
        world = World(accumulate=PENDING, step=(0.5, 2.0))
        launcher = await world.up()
        world.accumulate("a")
        world.ask(world.train(STEP))
        await settle()
        assert [process.called[-1] for process in launcher.lives[0]] == ["accumulate"] * 2
        launcher.lives[0][1].waiting[0].set_result(None)
        await asyncio.sleep(40)
        assert world.done == [MANIFEST]
        launcher.lives[0][0].waiting[0].set_result(None)
        await asyncio.sleep(200)  # every deadline passes: an answered call has none
        assert world.done == [MANIFEST, "a", (0.5, 2.0)]
        assert not world.lost

    played(scene())


def test_a_death_is_reported_once_and_nothing_of_that_life_is_answered() -> None:
    async def scene() -> None:
        world = World(accumulate=PENDING)
        launcher = await world.up()
        world.accumulate("a")
        world.accumulate("b")
        await settle()
        first, second = launcher.lives[0]
        second.die()
        first.waiting[0].set_exception(RuntimeError("gloo: Connection closed by peer"))
        await asyncio.sleep(300)
        (detail,) = world.lost
        assert "learner rank 1 died" in detail
        assert "log of 1" in detail
        assert first.death.done(), "the survivors are killed"
        world.accumulate("c")
        await asyncio.sleep(300)
        assert world.done == [MANIFEST]
        assert not world.group.is_up
        assert len(launcher.lives) == 1, "only restore() starts the ranks again"
        launcher.answers = {}
        world.restore(Path("state"), 1)
        await settle()
        assert world.done == [MANIFEST, MANIFEST]
        assert len(world.lost) == 1

    played(scene())


def test_a_survivors_error_waits_for_the_death_that_caused_it() -> None:
    async def scene() -> None:
        world = World(accumulate=PENDING)
        launcher = await world.up()
        world.accumulate("a")
        await settle()
        first, second = launcher.lives[0]
        first.waiting.pop().set_exception(RuntimeError("gloo: Connection closed by peer"))
        await asyncio.sleep(0.5)
        assert not world.lost
        second.die()
        await asyncio.sleep(5)
        (detail,) = world.lost
        assert "learner rank 1 died" in detail

    played(scene())


async def answered_after(world: World, seconds: float, rollouts: int = 1) -> None:
    """A micro-batch, to which the only rank answers so late."""
    (rank,) = world.launcher.lives[-1]
    micro_batch = MicroBatch(0, 0, tuple(RolloutId(str(n)) for n in range(rollouts)), rollouts)
    world.ask(world.train(ef.TrainMicroBatch(micro_batch, 0)))
    await settle()
    await asyncio.sleep(seconds)
    for call in rank.waiting:
        if not call.done():
            call.set_result("answered")
    await settle()


def test_a_frozen_learner_is_lost_after_four_times_what_its_calls_took() -> None:
    async def scene() -> None:
        world = World(world=1, accumulate=PENDING)
        await world.up()
        await answered_after(world, 40)  # compiles, and is not measured
        for seconds in (3, 3, 3):
            await answered_after(world, seconds)
        await answered_after(world, 11.9)
        assert not world.lost
        await answered_after(world, 45, rollouts=2)  # another kind of call
        assert not world.lost
        await answered_after(world, 13)
        assert "learner ranks 0 of 1 did not answer train within 12 s" in world.lost[0]
        await world.up()
        await answered_after(world, 45)
        await answered_after(world, 45)
        assert len(world.lost) == 1, "what was measured before a loss for lateness does not count"

    played(scene())


def test_a_new_life_knows_how_long_calls_take_once_it_is_warm() -> None:
    async def scene() -> None:
        world = World(world=1, accumulate=PENDING)
        await world.up()
        for _ in range(5):
            await answered_after(world, 0.5)
        world.launcher.lives[-1][0].die()
        await settle()
        await world.up()
        await answered_after(world, 45)
        assert len(world.lost) == 1
        await answered_after(world, 5)
        assert "did not answer train within 4 s" in world.lost[1], "no less than step_s"

    played(scene())


@given(st.lists(st.floats(0.01, 500), min_size=1, max_size=60), st.booleans())
def test_limits_of_calls_follow_what_they_took(seconds: list[float], saves: bool) -> None:
    deadlines = Deadlines(start_s=600, answer_s=3600, step_s=120)
    limits, kind = CallLimits(deadlines), ("save" if saves else "TrainMicroBatch", 0)
    assert limits.limit_s(kind, warm=True) == 3600
    for took in seconds:
        limits.measured(kind, took)
    recent = sorted(seconds[-REMEMBERED:])
    limit_s = limits.limit_s(kind, warm=True)
    assert limits.limit_s(("other", 0), warm=True) == 3600
    assert limits.limit_s(kind, warm=False) >= 3600
    if len(recent) >= AGREE:
        assert max(deadlines.start_s if saves else 120, 4 * recent[(len(recent) - 1) // 2]) <= limit_s
        assert limit_s <= max(deadlines.start_s if saves else 120, 4 * recent[-1])


def test_a_late_answer_costs_the_life() -> None:
    async def scene() -> None:
        world = World(**{"accumulate 1": PENDING})
        launcher = await world.up()
        world.accumulate("a")
        await asyncio.sleep(49)
        assert not world.lost
        await asyncio.sleep(2)
        assert "learner ranks 1 of 2 did not answer train within 50 s" in world.lost[0]
        assert all(process.death.done() for process in launcher.lives[0])
        assert world.done == [MANIFEST]

    played(scene())


def test_errors_to_fix_end_the_run_as_they_are() -> None:
    async def scene() -> None:
        error = TrainingError("the gradient norm is nan")
        world = World(step=error)
        launcher = await world.up()
        world.ask(world.train(STEP))
        await asyncio.sleep(300)
        assert world.failed == [error]
        assert not world.lost
        assert all(process.death.done() for process in launcher.lives[0])

    played(scene())


def test_a_start_that_fails_is_reported_once_and_tried_again_ever_more_slowly() -> None:
    async def scene() -> None:
        world = World()
        world.launcher.refuses = 9
        await world.up()
        await asyncio.sleep(1000)
        (detail,) = world.notes
        assert "no reserved node has room" in detail
        waited = [later - earlier for earlier, later in itertools.pairwise(world.launcher.started_at_s)]
        assert waited == pytest.approx([1, 2, 4, 8, 16, 32, 60, 60, 60])
        assert world.done == [MANIFEST]
        assert not world.lost

    played(scene())


def test_a_process_that_dies_or_hangs_while_it_starts_is_started_again() -> None:
    async def scene() -> None:
        world = World(build=PENDING)
        launcher = await world.up()
        launcher.lives[0][0].die()
        await asyncio.sleep(0.5)
        launcher.answers = {"begin 1": PENDING}
        await asyncio.sleep(10)
        assert len(launcher.lives) == 2
        launcher.answers = {}
        await asyncio.sleep(30)
        assert world.done == [MANIFEST]
        (detail,) = world.notes
        assert "learner rank 0 did not start" in detail
        assert "log of 0" in detail

    played(scene())


def test_what_raises_in_every_life_ends_the_run() -> None:
    async def scene() -> None:
        world = World(accumulate=RuntimeError("a bug"))
        await world.up()
        for _ in range(3):
            world.accumulate("a")
            await asyncio.sleep(10)
            world.restore(None, 1)
            await asyncio.sleep(100)
        (error,) = world.failed
        assert isinstance(error, LearnerError)
        assert "3 times in a row: learner rank 0 failed: RuntimeError: a bug" in str(error)
        assert len(world.lost) == 2

    played(scene())


@pytest.mark.parametrize("left", [False, True], ids=["stayed", "preempted"])
@pytest.mark.parametrize("while_up", [True, False], ids=["working", "starting"])
def test_a_rank_killed_at_the_same_point_every_time_ends_the_run_if_its_nodes_stay(
    while_up: bool, left: bool
) -> None:
    """As by the kernel, for want of host memory: it leaves no error."""
    lives = 2 * STUCK_MAX

    async def scene() -> None:
        world = World(**{"accumulate" if while_up else "load_model": PENDING})
        world.launcher.left = set(range(1, lives + 1)) if left else set()
        world.restore(None, 1)
        while not world.failed and len(world.launcher.lives) < lives:
            await asyncio.sleep(70)
            world.accumulate("never")
            await settle()
            world.launcher.lives[-1][1].die()
            await settle()
            if while_up:
                world.restore(None, 1)
        if left:
            assert not world.failed
            return
        (error,) = world.failed
        assert isinstance(error, LearnerError)
        assert len(world.launcher.lives) == STUCK_MAX + 1
        assert "host memory" in str(error)
        assert "log of 1" in str(error)

    played(scene())


def test_lives_that_each_get_further_after_a_checkpoint_go_on() -> None:
    async def scene() -> None:
        world = World(accumulate=None)
        world.restore(None, 1)
        await settle()
        for number in range(100):
            world.accumulate(str(number))
            await settle()
        await world.group.save(Path("checkpoint"))
        for calls in range(1, 2 * STUCK_MAX):
            world.launcher.lives[-1][1].die()
            await settle()
            world.restore(None, 1)
            await asyncio.sleep(70)
            for number in range(calls):
                world.accumulate(f"{calls}.{number}")
                await settle()
        assert not world.failed

    played(scene())


def stuck_after(ends: Iterable[tuple[int, bool]], stay: Callable[[int], bool] = lambda _: True) -> int | None:
    """The life after which to give up. ``ends``: calls answered, and whether a rank failed, of each life."""
    failures = Failures()
    for life, (answered, failed) in enumerate(ends):
        failures.ended(life, answered=answered, raised=False, failed=failed)
        if failures.suspects and failures.judge([life for life in failures.suspects if stay(life)]):
            return life
    return None


def test_only_lives_that_get_no_further_and_whose_nodes_stay_are_counted() -> None:
    assert stuck_after([(7, True)] * 50) == STUCK_MAX + 1, "the first got further than any before"
    assert stuck_after([(0, False)] * 50) is None, "ended on purpose"
    assert stuck_after([(n, True) for n in range(50)]) is None
    assert stuck_after([(7, True)] * 50, lambda life: life % 2 == 0) == 2 * STUCK_MAX + 1
    assert stuck_after([(7, True)] * 50, lambda life: life < STUCK_MAX) is None
    further = [(n // STUCK_MAX, True) for n in range(50)]
    assert stuck_after(further) is None, "it gets further before there are too many"


def test_losses_in_a_row_slow_restarts_down_until_a_checkpoint() -> None:
    async def scene() -> None:
        world = World()
        for _ in range(4):
            world.restore(None, 1)
            await asyncio.sleep(100)
            world.launcher.lives[-1][0].die()
            await settle()
        lost_at_s = [100.0, 200.0, 300.0]
        pauses = [
            start - lost for start, lost in zip(world.launcher.started_at_s[1:], lost_at_s, strict=True)
        ]
        assert pauses == pytest.approx([0, 1, 2], abs=1e-3)
        world.restore(None, 1)
        await asyncio.sleep(100)
        world.ask(world.group.save(Path("state")), "saved")
        await settle()
        world.launcher.lives[-1][0].die()
        await settle()
        now = asyncio.get_running_loop().time()
        world.restore(None, 1)
        await settle()
        assert world.launcher.started_at_s[-1] == pytest.approx(now)

    played(scene())


@pytest.mark.parametrize("kind", FINAL)
def test_errors_to_fix_survive_the_way_from_another_process(kind: type[Exception]) -> None:
    error = ConfigError("the file", [Problem("a", "b", "c", "d")]) if kind is ConfigError else kind("text")
    again = pickle.loads(pickle.dumps(error))
    assert type(again) is kind
    assert str(again) == str(error)


def test_stop_ends_it_silently() -> None:
    async def scene() -> None:
        world = World(accumulate=PENDING)
        launcher = await world.up()
        world.accumulate("a")
        await world.group.stop()
        await asyncio.sleep(500)
        assert all(process.death.done() for process in launcher.lives[0])
        assert (world.lost, world.failed, world.notes) == ([], [], [])

    played(scene())


@pytest.mark.parametrize("world_size", [1, 3])
@given(data=st.data())
def test_each_life_ends_at_most_once_and_answers_only_while_it_lives(
    world_size: int, data: st.DataObject
) -> None:
    """Deaths, errors, silence and answers in any order: every restore leads to one manifest or one loss."""

    async def scene() -> None:
        world = World(world=world_size, accumulate=PENDING)
        expected_losses = 0
        for life in range(data.draw(st.integers(1, 3))):
            world.restore(None, life)
            await asyncio.sleep(10)
            assert world.group.is_up
            world.accumulate(f"life {life}")
            await settle()
            processes = world.launcher.lives[-1]
            before = len(world.lost)
            fates = data.draw(st.permutations(range(world_size)))
            trouble = False
            for rank in fates:
                fate = data.draw(st.sampled_from(["answer", "die", "raise", "silence"]))
                trouble = trouble or fate != "answer"
                process = processes[rank]
                asked = [future for future in process.waiting if not future.done()]
                if fate == "die":
                    process.die()
                elif asked and fate == "answer":
                    asked[0].set_result(None)
                elif asked and fate == "raise":
                    asked[0].set_exception(RuntimeError("a collective failed"))
                await asyncio.sleep(data.draw(st.sampled_from([0.0, 0.4, 2.0])))
            await asyncio.sleep(60)
            expected_losses += trouble
            ended = len(world.lost) + len(world.failed)
            assert ended == expected_losses
            assert (world.done[-1:] == [f"life {life}"]) == (not trouble)
            if world.failed:
                return
            assert len(world.lost) - before == trouble

    played(scene())


def test_a_learner_that_is_ended_is_lost_like_any_other() -> None:
    async def scene() -> None:
        world = World()
        launcher = await world.up()
        world.group.end("its node is about to be preempted")
        await settle()
        assert len(world.lost) == 1
        assert all(rank.death.done() for rank in launcher.lives[0])

    played(scene())
