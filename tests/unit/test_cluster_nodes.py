"""What the controller and the scaler learn of nodes that end for two reasons, and that hold the learner."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable

import pytest

from spotlight.cluster.cluster_nodes import ClusterNodes, Site
from spotlight.cluster.nodes.facts import NodeFacts
from spotlight.cluster.nodes.listing import RayNode
from spotlight.cluster.nodes.node_prices import LearnerSlots
from spotlight.cluster.scaling.run_scaling import count_workforce
from spotlight.config.load import load_config
from spotlight.scheduler import events as ev
from spotlight.scheduler.cluster.cluster import Cluster
from spotlight.scheduler.cluster.queue import PullQueue
from spotlight.scheduler.plan import ClusterPlan
from spotlight.scheduler.types import NodeId, NodeKind, PolicyVersion

FACTS = NodeFacts("1", "3.11", "2", "host", (), 0, "", 1)


def ray_node(name: str, kind: NodeKind = NodeKind.SPOT, slots: int = 2) -> RayNode:
    return RayNode(f"ray-{name}", name, kind, slots, False, "cpu", "10.0.0.1", 1, "/tmp")


class World:
    """Nodes, and a cluster of the controller that is told of them."""

    def __init__(self, *overrides: str) -> None:
        config = load_config(None, ["fleet.driver=ray", "fleet.spot.price_usd_h=1", *overrides])
        head = ray_node("head", NodeKind.RESERVED, config.fleet.reserved_ranks)
        site = Site(head.ray_id, "127.0.0.1", [head], None, None, LearnerSlots({}))
        self.cluster = Cluster(ClusterPlan(learner_moves=True), PullQueue(60.0), 0, PolicyVersion(0))
        self.nodes = ClusterNodes(config, site, self.put, self.fail, lambda _: None, time.monotonic)
        self.join(head)

    def put(self, event: ev.Event) -> None:
        self.cluster.handle(event)  # type: ignore[arg-type]

    def fail(self, error: Exception) -> None:
        raise error

    def join(self, node: RayNode) -> RayNode:
        self.nodes._join(node, FACTS)
        return node

    def due_s(self, name: str) -> float | None:
        """Seconds until a node ends, as the controller knows it."""
        end_s = self.cluster.hosts[NodeId(name)].deadline_s
        return None if end_s is None else end_s - time.monotonic()

    async def cloud(self, then: Callable[..., None], *args: object) -> None:
        then(*args)
        await asyncio.sleep(0)


def test_the_earlier_end_of_a_node_holds_and_a_notice_outlives_a_change_of_mind() -> None:
    async def run() -> None:
        world = World()
        nodes, spot = world.nodes, world.join(ray_node("spot"))
        nodes.announce_end(spot, 4000.0)
        assert world.due_s("spot") == pytest.approx(4000.0, abs=5)
        await world.cloud(nodes.noticed, spot, 30.0, "")
        assert world.due_s("spot") == pytest.approx(30.0, abs=5)
        nodes.announce_end(spot, 4000.0)
        assert world.due_s("spot") == pytest.approx(30.0, abs=5)
        nodes.cancel_end(spot)
        assert world.due_s("spot") == pytest.approx(30.0, abs=5), "the cloud takes it nevertheless"
        nodes.announce_end(spot, 0.0)
        await world.cloud(nodes.notice_cancelled, spot, "")
        assert world.due_s("spot") == pytest.approx(0.0, abs=5), "it is given back nevertheless"
        nodes.cancel_end(spot)
        assert world.due_s("spot") is None
        nodes.announce_end(spot, 0.0)
        await world.cloud(nodes.lost, spot)
        world.join(spot)
        assert world.due_s("spot") is None
        nodes.cancel_end(spot)

    asyncio.run(run())


def test_a_node_that_the_learner_is_leaving_holds_it_still() -> None:
    async def run() -> None:
        world = World("fleet.learner_placement=spot", "fleet.spot.nodes=3")
        nodes, one = world.nodes, world.join(ray_node("one"))
        other = world.join(ray_node("other"))
        (first,) = [node for node in (one, other) if nodes.holds_learner(node)]
        second = other if first is one else one
        nodes.learner_started({first.ray_id: 1})
        nodes.announce_end(first, 4000.0)
        assert nodes.holds_learner(first), "until it has moved"
        assert nodes.holds_learner(second)
        nodes.learner_started({second.ray_id: 1})
        assert not nodes.holds_learner(first)
        # What is left on a node that is drained holds no rank: two slots roll out, but for the learner's.
        force = count_workforce(world.cluster, nodes, 2, 2.0)
        assert (force.other_workers, force.node_workers) == (-1.0, 2.0)
        assert force.node_usd_h == 2.0
        assert math.isclose(force.other_usd_h, 0.0)

    asyncio.run(run())


def test_nodes_that_the_learner_does_not_move_to_after_all_are_reported() -> None:
    async def run() -> None:
        ranks = (
            "fleet.learner_ranks=2",
            "fleet.learner_ranks_min=1",
            "fleet.learner_grows_after_s=0",
            "learner.micro_batch_size=48",
        )
        world = World("fleet.learner_placement=spot", "fleet.spot.nodes=4", *ranks)
        nodes, unplaced = world.nodes, list[str]()
        nodes.no_place = unplaced.append
        first = world.join(ray_node("first", slots=1))
        for name in ("second", "third", "fourth"):
            world.join(ray_node(name, slots=1))
        nodes.places.target = {first.ray_id: 1}
        nodes.learner_started({first.ray_id: 1})
        await asyncio.sleep(0.05)
        larger = {*nodes.places.target}
        assert len(larger) == 2
        unplaced.clear()
        nodes.announce_end(next(node for node in nodes.spot_nodes if node.ray_id in larger), 30.0)
        assert set(unplaced) == larger
        assert nodes.holds_learner(first)

    asyncio.run(run())
