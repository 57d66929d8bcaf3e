"""The production policy for spot nodes in virtual time: a run takes as many nodes of a market as it asks for.

The market is the scenario's spot nodes. A node that is taken joins after a delay, one that is given back is
drained first, as on a notice, and one that the market takes away is replaced by another if there is one.
"""

from __future__ import annotations

import random
from dataclasses import replace

from spotlight.cluster.scaling.emulated_provider import SpotOffers
from spotlight.scheduler import effects as ef
from spotlight.scheduler import events as ev
from spotlight.scheduler.cluster.members import ABLE
from spotlight.scheduler.scaling.pace_meter import PaceMeter
from spotlight.scheduler.scaling.target_policy import Rest, TargetDecision, TargetPolicy
from spotlight.scheduler.types import Node, NodeId, NodeKind, Phase
from spotlight_plan.simulation.scenario import NodeEvent, Scenario
from spotlight_plan.simulation.virtual_driver import Simulation
from spotlight_plan.simulation.virtual_workers import Receipt

DRAIN_S = 30.0
_WORK = (Phase.ROLLOUT, Phase.EVALUATION)


class ScaledSimulation(Simulation):
    """A simulation whose spot nodes follow a deadline and a budget; spot nodes are alike.

    Attributes:
        asked: spot nodes asked for.
        changes: (iteration, before, after).
    """

    def __init__(
        self,
        scenario: Scenario,
        *,
        deadline_s: float | None = None,
        budget_usd: float | None = None,
        asked: int,
        nodes_max: int,
        delay_s: float = 60.0,
    ) -> None:
        super().__init__(scenario)
        joining = [event.node for _, event in scenario.nodes if isinstance(event, ev.NodeJoined)]
        self._like = next(node for node in joining if node.kind is NodeKind.SPOT)
        self._offered: dict[str, Node] = {}
        self._offers = SpotOffers(asked)
        self._deadline_s, self._budget_usd, self._delay_s = deadline_s, budget_usd, delay_s
        self.policy, self.meter = TargetPolicy(1, nodes_max), PaceMeter(300.0, 900.0)
        self.meter.begin(0.0, asked)
        self.asked = asked
        self.changes: list[tuple[int, int, int]] = []
        self.decisions: list[TargetDecision] = []
        self._worked_s = 0.0
        self._ending: set[str] = set()

    # -- the market ------------------------------------------------------------------------------------

    def happen(self, event: NodeEvent) -> None:
        """An event of the market, which the run hears of if it has the node."""
        match event:
            case ev.NodeJoined(node) if node.kind is NodeKind.SPOT:
                self._offered[node.id] = node
                self._offers.offered[node.id] = node.gpus
            case ev.NodeLost(name) if name in self._offered:
                del self._offered[name]
                if self._offers.withdraw(name):
                    super().happen(event)
            case ev.NodeNoticed(name) if name not in self._offers.taken:
                return
            case _:
                super().happen(event)
        self._take_offers()

    def _take_offers(self) -> None:
        while (taken := self._offers.take()) is not None:
            self.after(self._delay_s if self.now else 0.0, self._bring_in, taken[0])

    def _bring_in(self, name: str) -> None:
        if name in self._offers.taken and name not in self.places.machines:
            super().happen(ev.NodeJoined(self._offered[name]))

    # -- the run ---------------------------------------------------------------------------------------

    def observe(self, event: ev.Event, effects: list[ef.Effect], receipt: Receipt | None) -> None:
        """Every change of the workers is seen."""
        cluster = self.controller.cluster
        able = {
            name
            for name, worker in cluster.workers.items()
            if worker.state in ABLE and not cluster.hosts[worker.node].draining
        }
        nodes = {cluster.workers[name].node for name in able}
        spot = sum(cluster.hosts[node].node.kind is NodeKind.SPOT for node in nodes)
        self.meter.observe(self.now, len(able), spot)

    def _iteration_done(self) -> None:
        super()._iteration_done()
        worked_s = sum(spent for (_, phase), spent in self.accounts.seconds.items() if phase in _WORK)
        self.meter.end_iteration(self.now, worked_s - self._worked_s)
        self._worked_s = worked_s
        decision = self.policy.decide(self.rest(), self.meter)
        if decision is not None:
            self.decisions.append(decision)
            self._ask(decision.nodes)

    def rest(self) -> Rest:
        others = [node for node in self.nodes.values() if node.kind is not NodeKind.SPOT]
        return Rest(
            self.scenario.plan.iterations - self.controller.iteration - 1,
            None if self._deadline_s is None else self._deadline_s - self.now,
            None if self._budget_usd is None else self._budget_usd - self.accounts.total_usd,
            self.asked,
            sum(node.gpus for node in others if node.rolls_out),
            self._like.gpus,
            sum(node.price_usd_h for node in others),
            self._like.price_usd_h,
        )

    def _ask(self, nodes: int) -> None:
        if nodes == self.asked:
            return
        self.changes.append((self.controller.iteration, self.asked, nodes))
        self.meter.ask(self.now, nodes)
        self.asked = nodes
        for name in sorted(self._offers.taken & self.places.machines.keys())[nodes:]:
            self._ending.add(name)
            super().happen(ev.NodeNoticed(NodeId(name), self.now))
            self.after(DRAIN_S, self._give_back, name)
        present: set[str] = {*self.places.machines}
        self._offers.want(nodes, present, set())
        self._take_offers()

    def _give_back(self, name: str) -> None:
        if name not in self._offers.taken or name not in self.places.machines:
            return
        if self.asked >= len(self._offers.taken):
            super().happen(ev.NoticeCancelled(NodeId(name)))
            return
        self._offers.want(self.asked, {*self.places.machines}, {name})
        super().happen(ev.NodeLost(NodeId(name)))
        self._take_offers()


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
