"""What is wanted reaches the provider, whatever fails meanwhile: what could not be done is done later."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

import pytest

from spotlight.cluster.nodes.listing import RayNode
from spotlight.cluster.scaling import node_supply
from spotlight.cluster.scaling.node_supply import NodeSupply
from spotlight.scheduler import events as ev
from spotlight.scheduler.types import NodeKind
from spotlight_fleet.providers.node_provider import ProviderError


@dataclass
class World:
    """A provider, the nodes that it provides, and what is reported."""

    level: int = 2
    fails: str = ""
    at_once: int = 100
    joined: bool = True
    nodes: list[RayNode] = field(default_factory=list)
    asked_for: list[tuple[int, tuple[str, ...]]] = field(default_factory=list)
    calls: list[str] = field(default_factory=list)
    events: list[ev.Event] = field(default_factory=list)
    said: list[str] = field(default_factory=list)
    made: int = 0
    clock_s: float = 0.0
    held: threading.Event = field(default_factory=threading.Event)
    """A request is answered once this is set."""

    def __post_init__(self) -> None:
        self.provide()
        self.held.set()

    def provide(self) -> None:
        while len(self.nodes) < self.level:
            self.made += 1
            name = f"spot-{self.made}"
            self.nodes.append(RayNode(f"ray-{name}", name, NodeKind.SPOT, 1, False, "cpu", "10.0.0.1", 1, ""))

    def asked(self, present: Sequence[RayNode]) -> int:
        self.require()
        return self.level

    def ask(self, nodes: int, present: Sequence[RayNode], leaving: Sequence[RayNode]) -> int:
        self.asked_for.append((nodes, tuple(node.name for node in leaving)))
        self.calls.append("ask")
        self.held.wait()
        self.calls.append("asked")
        self.require()
        nodes = min(nodes, self.level + self.at_once)
        ending = [node for node in self.nodes if node in leaving][: max(0, len(self.nodes) - nodes)]
        self.nodes = [node for node in self.nodes if node not in ending]
        self.level = max(nodes, len(self.nodes))
        self.provide()
        return self.level

    def close(self) -> None:
        self.calls.append("close")
        self.require()

    def require(self) -> None:
        if self.fails:
            raise ProviderError(self.fails)

    def supply(self, retry_s: float = 0.05, awaited: Callable[[], bool] = lambda: False) -> NodeSupply:
        return NodeSupply(
            NodeKind.SPOT, self, lambda: self.nodes if self.joined else [], self.events.append,
            self.said.append, lambda: self.clock_s, retry_s, awaited,
        )  # fmt: skip


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(node_supply, "LOOK_S", 0.01)


def beside(supply: NodeSupply, steps: AsyncIterator[bool]) -> None:
    """Run the supply while each condition that ``steps`` yields is not true yet."""

    async def run() -> None:
        task = asyncio.create_task(supply.run())
        async for done in steps:
            if not done:
                await asyncio.sleep(0.01)
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task

    asyncio.run(asyncio.wait_for(run(), 120))


def test_what_is_provided_is_reported_first_and_again_when_it_changes() -> None:
    world = World()
    supply = world.supply(retry_s=1e9)

    async def steps() -> AsyncIterator[bool]:
        while not world.events:
            yield False
        supply.want(4, ())
        while len(world.nodes) < 4:
            yield False
        supply.want(3, ("spot-2",))
        while len(world.events) < 3:
            yield False

    beside(supply, steps())
    spot = NodeKind.SPOT
    assert world.events == [
        ev.NodesProvided(spot, 2),
        ev.NodesProvided(spot, 4, 4),
        ev.NodesProvided(spot, 3, 3),
    ]
    assert world.asked_for == [(4, ()), (3, ("spot-2",))]
    assert [node.name for node in world.nodes] == ["spot-1", "spot-3", "spot-4"]
    assert world.calls[-1] == "close"


def test_a_provider_that_fails_is_asked_again_and_reported_once() -> None:
    world = World(fails="the API is down")
    supply = world.supply()

    async def steps() -> AsyncIterator[bool]:
        while not world.said:
            yield False
        world.fails = ""
        while not world.events:
            yield False
        world.fails = "no quota"
        supply.want(5, ())
        while len(world.asked_for) < 3:
            yield False
        assert world.events[-1] == ev.NodesProvided(NodeKind.SPOT, 2, 5), "so that a policy can give up"
        world.fails = ""
        while len(world.nodes) < 5:
            yield False

    beside(supply, steps())
    assert world.said == [
        "failed, tried again in 0.05 s: the API is down",
        "failed, tried again in 0.05 s: no quota",
    ]


def test_a_run_that_ends_while_nodes_are_asked_for_gives_back_what_that_brings() -> None:
    world = World()
    supply = world.supply()
    world.held.clear()
    supply.want(4, ())

    async def steps() -> AsyncIterator[bool]:
        while not world.calls:
            yield False
        asyncio.get_running_loop().call_soon(world.held.set)  # once the run is cancelled

    beside(supply, steps())
    assert world.calls == ["ask", "asked", "close"]


@pytest.mark.parametrize("how", ["settled", "late"])
def test_nodes_that_were_there_before_the_run_are_waited_for(how: str) -> None:
    world, awaited = World(level=1, joined=False), [True]
    supply = world.supply(awaited=lambda: bool(awaited))

    async def steps() -> AsyncIterator[bool]:
        for _ in range(10):
            yield False
        assert not world.events
        if how == "settled":
            awaited.clear()
        else:
            world.clock_s += node_supply.JOIN_S
        while not world.events:
            yield False

    beside(supply, steps())


def test_a_provider_that_does_a_part_at_a_time_is_asked_again_at_once() -> None:
    world = World(level=1, at_once=1)
    supply = world.supply(retry_s=1e9)
    supply.want(4, ())

    async def steps() -> AsyncIterator[bool]:
        while len(world.nodes) < 4:
            yield False

    beside(supply, steps())
    assert world.asked_for == [(4, ())] * 3


def test_what_is_not_given_back_at_the_end_is_reported() -> None:
    world = World()

    async def steps() -> AsyncIterator[bool]:
        while not world.events:
            yield False
        world.fails = "spot-1 may still cost money"

    beside(world.supply(), steps())
    assert world.said == ["not all spot nodes are given back: spot-1 may still cost money"]
