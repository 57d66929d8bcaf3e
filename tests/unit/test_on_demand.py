"""When a learner on spot nodes takes a node on demand and gives it back; the commands that do it."""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import AsyncIterator
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spotlight.cluster.nodes import on_demand_nodes
from spotlight.cluster.nodes.listing import RayNode
from spotlight.cluster.nodes.on_demand_nodes import CommandMachines, OnDemandError, OnDemandNodes
from spotlight.cluster.scaling.node_notes import NodeNotes
from spotlight.config.load import build_config
from spotlight.scheduler.learner.learner_places import LearnerPlaces
from spotlight.scheduler.learner.on_demand_policy import OnDemandPolicy, OnDemandStep
from spotlight.scheduler.types import NodeKind
from spotlight_rewards.base.errors import ConfigError

AFTER_S, BACK_AFTER_S, START_S = 5.0, 4.0, 8.0
DAYS = st.lists(st.tuples(st.integers(0, 2), st.integers(1, 30)), min_size=1, max_size=8)
"""So many spot nodes for so many seconds, again and again."""


class World:
    """One rank, spot nodes that come and go, and machines on demand; a step is a second."""

    def __init__(self, delay_s: int | None) -> None:
        self.places = LearnerPlaces(1)
        self.policy = OnDemandPolicy(AFTER_S, BACK_AFTER_S, START_S)
        self.delay_s, self.now_s, self.made = delay_s, 0, 0
        self.coming: tuple[str, int] | None = None
        self.there: str | None = None
        self.decisions: list[OnDemandStep] = []
        self.waited_s = self.roomy_s = 0

    def step(self, spot: int) -> None:
        places, have = self.places, [name for name in self.places.slots if name.startswith("spot")]
        for name in have[spot:]:
            places.lose(name)
        for _ in range(spot - len(have)):
            self.made += 1
            places.join(f"spot-{self.made}", 1)
        if self.coming is not None and self.delay_s is not None:
            name, ordered_s = self.coming
            if self.now_s >= ordered_s + self.delay_s:
                self.there, self.coming = name, None
                places.join(name, 1, on_demand=True)
        self.decide()
        places.started(places.target)
        self.waited_s = 0 if places.target else self.waited_s + 1
        self.roomy_s = self.roomy_s + 1 if spot else 0
        self.now_s += 1

    def decide(self) -> None:
        places, there = self.places, self.there
        decision = self.policy.decide(
            self.now_s,
            waits=not places.target,
            spot_room=places.spot_room,
            is_there=there is not None,
            holds=there is not None and places.held(there) > 0,
        )
        if decision is not None:
            self.decisions.append(decision)
        match decision:
            case OnDemandStep.TAKE:
                assert self.coming is None
                assert self.there is None
                self.coming = f"on-demand-{self.now_s}", self.now_s
            case OnDemandStep.CANCEL:
                self.coming = None
            case OnDemandStep.LEAVE if there is not None:
                places.notice(there)
            case OnDemandStep.STAY if there is not None:
                places.cancel(there)
            case OnDemandStep.EMPTY if there is not None:
                assert not places.held(there)
                places.lose(there)
                self.there = None


@given(days=DAYS, delay_s=st.sampled_from([0, 1, 3, 7, None]))
def test_it_neither_waits_nor_pays_for_long(days: list[tuple[int, int]], delay_s: int | None) -> None:
    world = World(delay_s)
    for spot, seconds in days:
        for _ in range(seconds):
            world.step(spot)
            if delay_s is not None:
                assert world.waited_s <= AFTER_S + delay_s + 1
            if world.roomy_s > BACK_AFTER_S + START_S + 3:
                assert (world.coming, world.there) == (None, None)
    taken = world.decisions.count(OnDemandStep.TAKE)
    ended = world.decisions.count(OnDemandStep.EMPTY) + world.decisions.count(OnDemandStep.CANCEL)
    assert taken - ended == (world.coming is not None or world.there is not None)


def test_spot_nodes_come_first_and_short_waits_cost_nothing() -> None:
    places = LearnerPlaces(1)
    places.join("dear", 1, on_demand=True)
    assert places.target == {"dear": 1}
    places.started(places.target)
    places.join("spot", 1)
    assert places.target == {"dear": 1}, "a learner that runs does not move by itself"
    assert places.spot_room
    places.notice("dear")
    assert places.target == {"spot": 1}
    world = World(delay_s=1)
    for _ in range(20):
        for spot in (1, 0, 0, 0):
            world.step(spot)
    assert world.decisions == []


def test_a_learner_whose_spot_nodes_are_gone_again_stays() -> None:
    world = World(delay_s=0)
    while world.there is None:
        world.step(0)
    places, policy, there = world.places, world.policy, world.there
    places.join("spot", 1)
    decisions = [
        policy.decide(100.0 + second, waits=False, spot_room=places.spot_room, is_there=True, holds=True)
        for second in range(6)
    ]
    assert decisions == [None] * 4 + [OnDemandStep.LEAVE, None]
    places.notice(there)
    places.lose("spot")
    state = {"waits": False, "spot_room": places.spot_room, "is_there": True, "holds": True}
    assert policy.decide(107.0, **state) is OnDemandStep.STAY
    assert policy.decide(108.0, **state) is None


def test_commands_are_told_the_node_and_their_failure_is_reported(tmp_path: Path) -> None:
    note = f"{sys.executable} -c \"import os; print(os.environ['SPOTLIGHT_NODE'])\" >> {tmp_path}/log"
    machines = CommandMachines(f"echo $SPOTLIGHT_SLOTS >> {tmp_path}/log; {note}", note, timeout_s=30)
    machines.start("on-demand-1", 4)
    machines.stop("on-demand-1")
    assert (tmp_path / "log").read_text().split() == ["4", "on-demand-1", "on-demand-1"]
    failing = CommandMachines("echo no quota; exit 3", "sleep 30; true", timeout_s=0.2)
    with pytest.raises(
        OnDemandError, match=r"start ended with status 3; expected 0.*on-demand-2.*It said: no quota"
    ):
        failing.start("on-demand-2", 1)
    began_s = time.monotonic()
    with pytest.raises(OnDemandError, match=r"fleet\.on_demand\.stop was ended after 0.2 s; expected"):
        failing.stop("on-demand-2")
    assert time.monotonic() - began_s < 10, "what the shell had started was ended, too"


@dataclass
class Waiting:
    """A learner without a place."""

    places: LearnerPlaces = field(default_factory=lambda: LearnerPlaces(2))
    learner_waits: bool = True
    ends: list[str] = field(default_factory=list)

    def announce_end(self, node: RayNode, remaining_s: float) -> None:
        self.ends.append(node.name)

    def cancel_end(self, node: RayNode) -> None:
        self.ends.remove(node.name)


def looking_after(
    owner: Waiting, machines: CommandMachines, notes: NodeNotes | None = None
) -> tuple[OnDemandNodes, list[str]]:
    logged: list[str] = []
    nodes = OnDemandNodes(
        OnDemandPolicy(0.0, 0.0, 60.0), machines, owner, time.monotonic, slots=2, price_usd_h=8.0, move_s=9.0,
        record=lambda step, _, detail: logged.append(f"{step and step.value}: {detail}"), notes=notes,
    )  # fmt: skip
    return nodes, logged


def a_node(name: str) -> RayNode:
    return RayNode(f"ray-{name}", name, NodeKind.ON_DEMAND, 2, False, "cpu", "10.0.0.1", 1, "")


def test_a_run_that_ends_meanwhile_stops_what_was_being_started(tmp_path: Path) -> None:
    log = tmp_path / "log"
    machines = CommandMachines(
        f"sleep .5; echo up $SPOTLIGHT_SLOTS $SPOTLIGHT_NODE >> {log}",
        f"echo down $SPOTLIGHT_NODE >> {log}",
        30,
    )
    nodes, logged = looking_after(Waiting(), machines)

    async def run() -> None:
        task = asyncio.create_task(nodes.run())
        await asyncio.sleep(0.1)
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task

    asyncio.run(run())
    up, down = (line.split() for line in log.read_text().splitlines())
    assert up[:2] == ["up", "2"]
    assert down == ["down", up[2]]
    assert logged == ["take: no spot node has room for the learner; $8/h"]


def test_a_node_is_stopped_once_empty_and_again_if_that_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(on_demand_nodes, "LOOK_S", 0.01)
    monkeypatch.setattr(on_demand_nodes, "RETRY_S", 0.05)
    log, owner, node = tmp_path / "log", Waiting(learner_waits=False), a_node("on-demand-1")
    fails_once = f"echo $SPOTLIGHT_NODE >> {log}; test $(wc -l < {log}) -ge 2"
    nodes, logged = looking_after(owner, CommandMachines("true", fails_once, 30))

    async def run() -> None:
        task = asyncio.create_task(nodes.run())
        nodes.joined(node)  # one that an earlier attempt took
        while not owner.ends:
            await asyncio.sleep(0.01)
        nodes.emptied(node)
        while log.read_text().split() != [node.name] * 2 if log.exists() else True:
            await asyncio.sleep(0.01)
        nodes.lost(node)
        await asyncio.sleep(0.1)
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task

    asyncio.run(asyncio.wait_for(run(), 30))
    assert log.read_text().split() == [node.name] * 2, "not a third time"
    assert logged[0] == "empty: the learner is on spot nodes; $8/h"
    assert "fleet.on_demand.stop ended with status 1" in logged[1]
    assert len(logged) == 2


async def looked_after(nodes: OnDemandNodes, steps: AsyncIterator[None]) -> None:
    """Run ``steps`` beside the nodes' own loop, then end the run."""
    task = asyncio.create_task(nodes.run())
    async for _ in steps:
        await asyncio.sleep(0.05)
    task.cancel()
    with suppress(asyncio.CancelledError):
        await task


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(on_demand_nodes, "LOOK_S", 0.01)
    monkeypatch.setattr(on_demand_nodes, "RETRY_S", 0.05)


def test_a_node_of_an_attempt_before_is_used_and_the_one_being_started_is_stopped(
    quick: None, tmp_path: Path
) -> None:
    log, owner = tmp_path / "log", Waiting()
    machines = CommandMachines(
        f"sleep .3; echo start $SPOTLIGHT_NODE >> {log}", f"echo stop $SPOTLIGHT_NODE >> {log}", 30
    )
    nodes, _ = looking_after(owner, machines)

    async def steps() -> AsyncIterator[None]:
        yield
        nodes.joined(a_node("older"))
        owner.learner_waits = False
        yield
        nodes.joined(a_node("later"))
        yield
        assert "later" in owner.ends
        assert "older" not in owner.ends[: owner.ends.index("later")]

    asyncio.run(asyncio.wait_for(looked_after(nodes, steps()), 30))
    words = [line.split() for line in log.read_text().splitlines()]
    started = [name for what, name in words if what == "start"]
    stopped = [name for what, name in words if what == "stop"]
    assert len(started) == 1
    assert sorted(stopped) == sorted(["older", "later", *started])
    assert words.index(["start", started[0]]) < words.index(["stop", started[0]])


def test_a_start_that_fails_is_reported_once_and_not_tried_again_at_once(quick: None, tmp_path: Path) -> None:
    log = tmp_path / "log"
    machines = CommandMachines(f"echo start >> {log}; exit 3", f"echo stop >> {log}; exit 1", 30)
    nodes, logged = looking_after(Waiting(), machines)

    async def steps() -> AsyncIterator[None]:
        for _ in range(10):
            yield

    asyncio.run(asyncio.wait_for(looked_after(nodes, steps()), 30))
    assert log.read_text().split() == ["start", "stop"]
    assert [each.partition(":")[0] for each in logged] == ["take", "None", "cancel"]
    assert "ended with status 3" in logged[1]


def test_a_node_that_comes_too_late_or_too_small_is_not_used(quick: None, tmp_path: Path) -> None:
    log, owner = tmp_path / "log", Waiting()
    machines = CommandMachines(f"echo $SPOTLIGHT_NODE >> {log}", f"test -e {tmp_path}/works", 30)
    nodes, logged = looking_after(owner, machines)
    nodes.policy.start_s = 0.1

    async def steps() -> AsyncIterator[None]:
        while "cancel" not in "".join(logged):
            yield
        (late,) = log.read_text().split()
        nodes.joined(a_node(late))  # its stop failed
        assert owner.ends == [late]
        nodes.joined(replace(a_node("small"), slots=1))
        assert owner.ends == [late, "small"]
        yield
        (tmp_path / "works").touch()

    asyncio.run(asyncio.wait_for(looked_after(nodes, steps()), 30))
    assert "None: it brings 1 slots; expected 2 (fleet.learner_ranks): change fleet.on_demand.start" in logged
    assert not [each for each in logged if "by hand (fleet" in each], "the stops worked in the end"


def test_a_node_that_joins_after_it_was_stopped_is_stopped_again(quick: None, tmp_path: Path) -> None:
    log, owner = tmp_path / "log", Waiting()
    nodes, _ = looking_after(owner, CommandMachines("true", f"echo $SPOTLIGHT_NODE >> {log}", 30))
    nodes.policy.start_s = 0.1

    async def steps() -> AsyncIterator[None]:
        while not log.exists():
            yield
        (late,) = log.read_text().split()
        nodes.joined(a_node(f"{late}~ab12cd"))  # its cloud was still making it; Ray knows the name already
        assert owner.ends == [late]
        while log.read_text().split() != [late, late]:
            yield

    asyncio.run(asyncio.wait_for(looked_after(nodes, steps()), 30))


def test_a_node_that_a_killed_head_had_taken_is_used_or_stopped(quick: None, tmp_path: Path) -> None:
    log, notes = tmp_path / "log", NodeNotes(tmp_path / "taken.json")
    machines = CommandMachines(f"echo start >> {log}", f"echo $SPOTLIGHT_NODE >> {log}", 30)

    async def killed() -> None:
        for _ in range(2):
            nodes, _ = looking_after(Waiting(), machines, notes)
            await nodes._look()
            await asyncio.sleep(0.1)

    asyncio.run(killed())
    used, stays_away = notes.read()
    nodes, _ = looking_after(Waiting(learner_waits=False), machines, notes)
    nodes.policy.start_s = 0.3

    async def steps() -> AsyncIterator[None]:
        nodes.joined(a_node(used))
        while log.read_text().split() != ["start", "start", stays_away]:
            assert time.monotonic() < end_s, log.read_text()
            yield
        assert notes.read() == [used]

    end_s = time.monotonic() + 20
    asyncio.run(asyncio.wait_for(looked_after(nodes, steps()), 30))
    assert log.read_text().split()[3:] == [used], "at the end"
    assert notes.read() == []


def test_a_run_that_is_ended_at_once_stops_what_was_being_started(tmp_path: Path) -> None:
    """A second Ctrl-C: asyncio cancels every task there is."""
    log = tmp_path / "log"
    machines = CommandMachines(f"sleep .5; echo up >> {log}", f"echo down >> {log}", 30)
    nodes, _ = looking_after(Waiting(), machines)

    async def run() -> None:
        task = asyncio.create_task(nodes.run())
        await asyncio.sleep(0.2)
        for each in asyncio.all_tasks() - {asyncio.current_task()}:
            each.cancel()
        with suppress(asyncio.CancelledError):
            await task

    asyncio.run(run())
    assert log.read_text().split() == ["up", "down"]


def test_what_cannot_be_stopped_is_reported_at_the_end(quick: None) -> None:
    nodes, logged = looking_after(Waiting(), CommandMachines("true", "exit 1", 30))

    async def steps() -> AsyncIterator[None]:
        yield
        yield

    asyncio.run(asyncio.wait_for(looked_after(nodes, steps()), 30))
    assert logged[-1] == "None: it may still cost money: stop it by hand (fleet.on_demand.stop)"
    assert len([each for each in logged if "ended with status 1" in each]) == 1


@pytest.mark.parametrize(
    ("changes", "key", "remedy"),
    [
        ({"on_demand": {"after_s": 9}}, "fleet.on_demand", "Set fleet.learner_placement=spot_then_on_demand"),
        ({"learner_placement": "spot_then_on_demand", "on_demand": {"stop": "true"}}, "fleet.on_demand.stop",
         "leave it out"),
        ({"learner_placement": "spot_then_on_demand", "address": "auto"}, "fleet.on_demand.start",
         "Give the shell command of your cloud"),
    ],
)  # fmt: skip
def test_keys_that_do_not_go_together_are_refused(changes: dict[str, object], key: str, remedy: str) -> None:
    fleet = {"driver": "ray"} | ({} if "address" in changes else {"spot": {"nodes": 3}}) | changes
    with pytest.raises(ConfigError, match=rf"{key}: found.*{remedy}"):
        build_config({"fleet": fleet, "learner": {"mode": "lora"}}, "the test")
