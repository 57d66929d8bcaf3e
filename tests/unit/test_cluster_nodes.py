"""Ray's nodes as the controller's machines, and where their processes go."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence

import pytest

from spotlight.cluster.cluster_nodes import ClusterNodes, Site
from spotlight.cluster.nodes.listing import SHARE, LearnerSlots, RayNode
from spotlight.cluster.remote_calls import Notify, RayLostError
from spotlight.config.load import load_config
from spotlight.scheduler import effects as ef
from spotlight.scheduler import events as ev
from spotlight.scheduler.fleet.fleet_machine import split_machine
from spotlight.scheduler.types import NodeId, NodeKind
from spotlight_fleet.facts import NodeFacts

FACTS = NodeFacts("1", "3.11", "2", "host", (), 0, "", 1)
SPOT = NodeId("spot")
MOVES = ("fleet.learner_placement=spot", "fleet.spot.nodes=5", "learner.micro_batch_size=48")


def ray_node(name: str, kind: NodeKind = NodeKind.SPOT, slots: int = 2, *, life: int = 1) -> RayNode:
    return RayNode(f"ray-{name}-{life}", name, kind, slots, True, "L4", "10.0.0.1", 1, "/tmp")


class World:
    """Nodes, and a head that does as it is told; call it within an event loop."""

    def __init__(self, *overrides: str, there: Sequence[RayNode] = ()) -> None:
        config = load_config(None, ["fleet.driver=ray", "fleet.spot.price_usd_h=1", *overrides])
        self.head = ray_node("head", NodeKind.RESERVED, 1)
        self.notes: list[str] = []
        self.given_up: list[Exception] = []
        slots = LearnerSlots({})
        nodes = [self.head, *there]
        self.site = Site(self.head.ray_id, "127.0.0.1", nodes, None, None, slots, self.give_up)
        self.events: list[ev.Event] = []
        self.nodes = ClusterNodes(
            config, self.site, self.events.append, self.fail, self.notes.append, time.monotonic
        )

    def fail(self, error: Exception) -> None:
        raise error

    def give_up(self, error: Exception, say: Notify) -> None:
        self.given_up.append(error)

    async def happen(self) -> None:
        """Let what the membership's thread said arrive; then the head handles it."""
        await asyncio.sleep(0)
        for event in self.events:
            if isinstance(event, ev.NodeJoined):
                self.nodes.enter(event.node)
            elif isinstance(event, ev.NodeLost):
                self.nodes.forget(event.node)
        self.events.clear()

    def assign(self, ranks: int) -> list[NodeId]:
        (whole,) = self.nodes.parts[SPOT]
        parts = split_machine(whole, ranks, ranks_roll_out=True)
        return self.nodes.assign(ef.AssignRoles(SPOT, parts))


def test_a_silent_ray_is_told_before_it_is_lost_and_one_that_is_lost_is_told_at_once() -> None:
    async def run() -> None:
        world = World()
        world.nodes.told("Ray does not answer")
        await world.happen()
        assert world.notes == ["Ray does not answer"]
        failed: list[Exception] = []
        world.nodes._fail = failed.append
        world.nodes.ray_lost("Ray is dead")
        assert [str(error) for error in world.given_up] == [str(RayLostError("Ray is dead"))]
        await world.happen()
        assert world.notes[1:] == ["ending the run: Ray is dead"]
        assert failed == world.given_up

    asyncio.run(run())


def test_a_machine_that_is_divided_has_a_place_for_each_part() -> None:
    async def run() -> None:
        world = World(*MOVES)
        world.nodes.joined(ray_node("spot", slots=3), FACTS)
        await world.happen()
        (machine,) = world.nodes.parts[SPOT]
        assert (machine.price_usd_h, machine.trains, machine.rolls_out) == (3.0, False, True)
        assert world.assign(1) == [SPOT]
        learner, rollout = (world.nodes.placements[NodeId(f"spot/{name}")] for name in ("learner", "rollout"))
        assert (learner.share, rollout.share) == (SHARE, 1.0)
        assert SPOT not in world.nodes.placements
        assert world.nodes.forget(SPOT) == ["spot/learner", "spot/rollout"]
        assert not world.nodes.placements
        assert world.nodes.assign(ef.AssignRoles(SPOT, (machine,))) == [], "it is gone"

    asyncio.run(run())


def test_a_node_that_is_back_at_once_is_another_machine_of_the_same_name() -> None:
    async def run() -> None:
        world = World()
        first, again = ray_node("spot"), ray_node("spot", life=2)
        world.nodes.joined(first, FACTS)
        await world.happen()
        world.nodes.happened(ev.NodeLost(SPOT))
        world.nodes.joined(again, FACTS)
        await world.happen()
        assert world.nodes.machines[SPOT] == again
        assert world.nodes.of_kind(NodeKind.SPOT) == [again]
        assert world.nodes.placements[SPOT].ray_id == again.ray_id

    asyncio.run(run())


def test_the_learner_goes_where_the_controller_says_and_waits_where_there_is_no_room() -> None:
    async def run() -> None:
        world = World(*MOVES, "fleet.learner_ranks=2")
        world.nodes.joined(ray_node("spot"), FACTS)
        await world.happen()
        assert world.nodes.learner_waits
        with pytest.raises(LookupError):
            world.nodes.learner_placements()
        world.nodes.place_learner({SPOT: 2})
        assert not world.nodes.learner_waits
        ray_id = world.nodes.machines[SPOT].ray_id
        assert [each.node for each in world.nodes.learner_placements()] == [ray_id] * 2
        assert world.nodes.learner_ranks_at() == {ray_id: 2}
        ranks = world.nodes.ranks_by_machine({ray_id: 2, "ray-gone": 1})
        assert world.nodes.prices_of(ranks) == [("spot", 2.0)]
        world.nodes.place_learner({})
        assert world.nodes.learner_waits

    asyncio.run(run())


def test_nodes_that_were_there_at_the_start_are_awaited_until_they_join_or_are_gone() -> None:
    async def run() -> None:
        one, two = ray_node("one"), ray_node("two")
        world = World(there=[one, two, ray_node("without-slots", slots=0)])
        assert world.nodes.awaits(NodeKind.SPOT)
        assert not world.nodes.awaits(NodeKind.ON_DEMAND)
        world.nodes.joined(one, FACTS)
        await world.happen()
        assert world.nodes.awaits(NodeKind.SPOT)
        world.nodes.happened(ev.NodeLost(NodeId(two.name)))
        await world.happen()
        assert not world.nodes.awaits(NodeKind.SPOT)

    asyncio.run(run())


def test_a_standstill_and_too_small_a_node_on_demand_are_reported_once() -> None:
    async def run() -> None:
        world = World(*MOVES, "fleet.learner_placement=spot_then_on_demand", "fleet.learner_ranks=2")
        for _ in range(2):
            world.nodes.report_standstill()
        assert world.notes == ["waiting for nodes that roll out"]
        world.nodes.joined(ray_node("dear", NodeKind.ON_DEMAND, 1), FACTS)
        await world.happen()
        world.nodes.report_standstill()
        assert "dear brings 1 slots; expected 2 (fleet.learner_ranks)" in world.notes[1]
        assert len(world.notes) == 2

    asyncio.run(run())
