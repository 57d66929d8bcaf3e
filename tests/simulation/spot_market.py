"""A market of spot nodes that come and go, for runs that take as many of them as they want."""

from __future__ import annotations

import random
from dataclasses import replace

from spotlight.scheduler import events as ev
from spotlight.scheduler.types import Node, NodeId
from spotlight_plan.simulation.scenario import NodeEvent


def market(
    like: Node, nodes: int, horizon_s: float, life_s: float, seed: int
) -> list[tuple[float, NodeEvent]]:
    """Events of so many places for spot nodes, which live for ``life_s`` on average and come back at once."""
    chance = random.Random(seed)
    events: list[tuple[float, NodeEvent]] = []
    for place in range(nodes):
        at_s, life = 0.0, 0
        while at_s < horizon_s:
            node = replace(like, id=NodeId(f"spot-{place:02}-{life}"))
            events.append((at_s, ev.NodeJoined(node)))
            at_s += chance.expovariate(1 / life_s)
            events.append((at_s, ev.NodeLost(node.id)))
            life += 1
    return sorted(events, key=lambda each: each[0])
