"""A second learner, formed beside one that must leave its nodes. No Ray, virtual time."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from fake_learner import PENDING, START, World, pending
from virtual_time import played, settle

from spotlight.cluster.learner.life import RankActor
from spotlight.cluster.learner_driver import LearnerDriver
from spotlight.scheduler import events as ev


def test_a_second_learner_is_formed_beside_the_first_and_takes_over() -> None:
    async def scene() -> None:
        world = World()
        launcher = await world.up(Path("before"))
        world.ask(world.group.form_second(), "formed")
        await settle()
        assert world.done[-1] == "formed"
        first, second = launcher.lives
        assert launcher.beside == [None, 1], "the nodes of the first are taken"
        assert [rank.called for rank in second][1] == START[:5]
        assert world.group.is_up
        assert world.group.working_life == 1
        world.restore(Path("now"))
        await settle()
        assert len(launcher.lives) == 2
        assert second[1].called[-2:] == ["load", "publish"]
        assert (world.group.working_life, world.group.is_up) == (2, True)
        assert all(rank.death.done() for rank in first)
        assert not world.lost, "it was not lost"

    played(scene())


def test_a_second_learner_that_dies_leaves_the_first_alone_and_is_replaced_when_needed() -> None:
    async def scene() -> None:
        world = World()
        launcher = await world.up()
        world.ask(world.group.form_second(), "formed")
        await settle()
        launcher.lives[1][0].die()
        await settle()
        assert world.group.is_up
        assert launcher.lives[1][1].death.done(), "no slot is held for nobody"
        assert world.group._second is None
        launcher.lives[0][1].die()
        await settle()
        assert len(world.lost) == 1
        world.restore()
        await settle()
        assert world.group.is_up
        assert len(launcher.lives) == 3

    played(scene())


@pytest.mark.parametrize("formed", [True, False])
def test_a_second_learner_that_is_not_needed_any_more_holds_no_slot(formed: bool) -> None:
    async def scene() -> None:
        world = World()
        launcher = await world.up()
        if not formed:
            world.launcher.answers["build"] = PENDING
        world.ask(world.group.form_second(), "formed")
        await settle()
        world.group.leave("node of life 1")
        await settle()
        assert not any(rank.death.done() for rank in launcher.lives[1])
        world.group.leave("node of life 2")
        await settle()
        assert all(rank.death.done() for rank in launcher.lives[1])
        assert world.group._second is None
        assert ("formed" in world.done) == formed
        assert world.group.is_up
        world.group.leave("node of life 2")
        assert world.group.is_up

    played(scene())


def test_a_second_learner_that_does_not_start_is_reported_once() -> None:
    async def scene() -> None:
        world = World()
        launcher = await world.up()
        launcher.refuses = 1
        world.ask(world.group.form_second(), "formed")
        await settle()
        assert world.group.is_up
        assert "formed" not in world.done
        assert len([note for note in world.notes if "second learner" in note]) == 1

    played(scene())


def test_each_second_learner_that_fails_is_reported_by_its_number() -> None:
    async def scene() -> None:
        world, events = World(), list[ev.Event]()
        launcher = await world.up()
        rest: Any = [None] * 4
        driver = LearnerDriver(rest[0], world.group, *rest[:3], (), events.append, world.notes.append)
        launcher.answers["build"] = PENDING
        world.ask(driver.prepare_second(1), "first")
        await settle()
        world.ask(driver.prepare_second(2), "second")
        await settle()
        assert events == [ev.LearnerPrepared(1, formed=False)]
        launcher.lives[-1][0].die()
        await settle()
        assert events[1:] == [ev.LearnerPrepared(2, formed=False)]

    played(scene())


def test_a_second_learner_that_waits_for_room_holds_nothing_up() -> None:
    async def scene() -> None:
        world = World()
        launcher = await world.up()
        start = launcher.start

        async def never(life: int) -> Sequence[RankActor]:
            await pending()
            raise AssertionError("unreachable")

        launcher.start = never  # type: ignore[method-assign]
        world.ask(world.group.form_second(), "formed")
        await settle()
        launcher.start = start  # type: ignore[method-assign]
        world.ask(world.group.form_second(), "formed again")
        await settle()
        assert world.done[-1] == "formed again"
        assert "formed" not in world.done
        assert not world.failed
        world.ask(world.group.stop(), "stopped")
        await settle()
        assert world.done[-1] == "stopped"

    played(scene())
