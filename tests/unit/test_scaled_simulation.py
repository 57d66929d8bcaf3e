"""A deadline and a budget are held in virtual time, on a market whose nodes vanish."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest
from tests.simulation.constant_costs import ConstantCosts
from tests.simulation.spot_market import market

from spotlight.config.sections.evaluation import EvaluationConfig
from spotlight.config.sections.target import TargetConfig
from spotlight.scheduler.events import NodeJoined
from spotlight.scheduler.plan import ClusterPlan, FleetSettings, Plan
from spotlight.scheduler.policies.target.choose_nodes import TargetDecision
from spotlight.scheduler.policies.target.hold_target import HoldTarget
from spotlight.scheduler.types import Node, NodeId, NodeKind
from spotlight_plan.simulation.scenario import Scenario, SimulationResult
from spotlight_plan.simulation.virtual_driver import Simulation

RESERVED = Node(NodeId("r"), NodeKind.RESERVED, 2, "H100", 20.0, True, False)
SPOT = Node(NodeId("s"), NodeKind.SPOT, 2, "H100", 5.0, False, True)
PLAN = Plan(
    run_seed=0, iterations=40, prompts_per_iteration=8, group_size=16, rollout_steps=10,
    evaluation=EvaluationConfig(steps=10, images_per_prompt=2, every=10),
    updates_per_batch=1, micro_batch_size=32, checkpoint_every=1,
    lease_s=60.0, max_drop_share=None, ranks=2, cluster=ClusterPlan(heads=24, degrees=(1,)),
)  # fmt: skip
COSTS = ConstantCosts(step_s=1.0, small_s=0.5, large_s=4.0, batch=2)
NODES_MAX = 10
SEEDS = [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in (1, 2, 3))]


def scenario(seed: int, places: int = NODES_MAX, life_s: float = 1800.0) -> Scenario:
    events = [(0.0, NodeJoined(RESERVED)), *market(SPOT, places, 60_000.0, life_s, seed)]
    return Scenario(PLAN, COSTS, tuple(events), train_prompts=16, test_prompts=4, seed=seed, noise=0.1)


class Scaled(Simulation):
    """A simulation whose spot nodes follow a goal.

    Attributes:
        changes: (iteration, before, after).
    """

    def __init__(
        self,
        scenario: Scenario,
        *,
        deadline_s: float | None = None,
        budget_usd: float | None = None,
        asked: int,
        nodes_min: int = 1,
        nodes_max: int = NODES_MAX,
    ) -> None:
        hours = None if deadline_s is None else deadline_s / 3600
        target = TargetConfig(
            deadline_h=hours, budget_usd=budget_usd, nodes_min=nodes_min, nodes_max=nodes_max, report_s=1e9
        )
        spot = FleetSettings(target=target, spot_gpus=SPOT.gpus, spot_usd_h=SPOT.price_usd_h, drain_s=30.0)
        super().__init__(replace(scenario, plan=replace(scenario.plan, fleet=spot), spot_first=asked))
        policy, _ = self.controller.fleet.policies
        assert isinstance(policy, HoldTarget)
        self.target, self.decisions = policy, list[TargetDecision]()
        self.changes: list[tuple[int, int, int]] = []
        self.asked = asked

    def step(self) -> bool:
        goes_on = super().step()
        if self.target.decision is not None and self.target.decision not in self.decisions[-1:]:
            self.decisions.append(self.target.decision)
        if (wanted := self.target.supply.wanted) not in (None, self.asked):
            assert wanted is not None
            self.changes.append((self.controller.iteration, self.asked, wanted))
            self.asked = wanted
        return goes_on


@cache
def with_nodes(nodes: int) -> SimulationResult:
    """A run that has so many places for nodes from the beginning to the end."""
    return finished(Scaled(scenario(0, nodes), asked=nodes, nodes_min=nodes, nodes_max=nodes, budget_usd=1e6))


def finished(simulation: Scaled) -> SimulationResult:
    simulation.begin()
    while simulation.step():
        pass
    result = simulation.result()
    assert result.finished, result.error
    assert result.trained == 40 * 8 * 16
    return result


def usd(result: SimulationResult) -> float:
    return sum(result.cost_usd.values())


@pytest.mark.parametrize("seed", SEEDS)
def test_a_deadline_is_held_where_it_can_be_and_no_more_is_paid_than_it_takes(seed: int) -> None:
    slow, fast = with_nodes(2), with_nodes(NODES_MAX)
    for share in (0.3, 0.6):
        deadline_s = fast.end_s + share * (slow.end_s - fast.end_s)
        simulation = Scaled(scenario(seed), deadline_s=deadline_s, asked=2)
        result = finished(simulation)
        assert result.end_s <= deadline_s, simulation.changes
        needed = next(n for n in range(2, NODES_MAX + 1) if with_nodes(n).end_s <= deadline_s)
        assert usd(result) <= 1.15 * max(usd(with_nodes(n)) for n in (2, needed)), simulation.changes
        assert simulation.changes
        early = 1 - result.end_s / deadline_s
        print(f"seed {seed}: {early:.1%} early, {simulation.changes}, ${usd(result):.2f}")


@pytest.mark.parametrize("seed", SEEDS)
def test_a_budget_is_held_and_the_run_is_as_fast_as_it_allows(seed: int) -> None:
    costs = {nodes: usd(with_nodes(nodes)) for nodes in (1, 2, 4, 6, 8, NODES_MAX)}
    budget = 1.15 * min(costs.values())
    simulation = Scaled(scenario(seed), budget_usd=budget, asked=2)
    result = finished(simulation)
    assert usd(result) <= budget, simulation.changes
    assert result.end_s < with_nodes(2).end_s
    print(f"seed {seed}: ${usd(result):.2f} of ${budget:.2f}, {result.end_s:.0f} s, {simulation.changes}")


def test_what_is_out_of_reach_is_known_early() -> None:
    deadline_s = 0.7 * with_nodes(NODES_MAX).end_s
    simulation = Scaled(scenario(1), deadline_s=deadline_s, asked=2)
    result = finished(simulation)
    assert result.end_s > deadline_s
    assert not any(decision.reachable for decision in simulation.decisions)
    assert simulation.asked >= NODES_MAX - 1


def test_forecasts_hold_what_happens() -> None:
    simulation = Scaled(scenario(2), deadline_s=1e6, asked=6, nodes_min=6, nodes_max=6)
    ends: list[tuple[float, float, float]] = []
    simulation.begin()
    while simulation.step():
        if len(simulation.decisions) > len(ends):
            low, high = simulation.decisions[-1].now.range_s
            ends.append((simulation.now, simulation.now + low, simulation.now + high))
    inside = [low <= simulation.now <= high for _, low, high in ends]
    assert len(inside) > 30
    assert sum(inside) >= 0.8 * len(inside), ends


def test_a_node_less_of_the_market_changes_nothing_that_is_trained() -> None:
    one = finished(Scaled(scenario(0), deadline_s=5000.0, asked=2))
    calm = replace(scenario(0), nodes=scenario(0, life_s=1e9).nodes)
    other = finished(Scaled(calm, deadline_s=9000.0, asked=4))
    assert (one.trained, one.evaluated, one.dropped) == (other.trained, other.evaluated, other.dropped)
