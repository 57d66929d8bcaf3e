"""Models of how others run on spot nodes: what a loss costs, and what is paid."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime

import pytest

from spotlight.scheduler.events import NodeJoined, NodeLost
from spotlight.scheduler.types import Node, NodeId, NodeKind, Phase
from spotlight_plan.compare import SimulationTask, lasting, run_task
from spotlight_plan.scenarios.prepare import prepare
from spotlight_plan.scenarios.scenario_load import load_scenario
from spotlight_plan.scenarios.strategies import strategy_named
from spotlight_plan.scenarios.strategy_scenario import scenario_of
from spotlight_plan.simulation.scenario import NodeEvent, PriceChanged, SimulationResult
from spotlight_plan.simulation.spot_baselines import BaselineModel, replay

HOUR_USD = 36.0
CHECKPOINTS = BaselineModel(
    iterations=6, nodes=2, start_s=10.0, iteration_s=100.0, checkpoint_every=2,
    pause_s=30.0, boot_s=40.0, survives_one=False,
)  # fmt: skip
REDUNDANT = replace(CHECKPOINTS, survives_one=True, pause_s=5.0)


def joined(name: str) -> NodeJoined:
    return NodeJoined(Node(NodeId(name), NodeKind.SPOT, 2, "H100", HOUR_USD, False, True))


def lost(name: str) -> NodeLost:
    return NodeLost(NodeId(name))


BOTH: tuple[tuple[float, NodeEvent], ...] = ((0.0, joined("a")), (0.0, joined("b")))


def run(model: BaselineModel, *events: tuple[float, NodeEvent]) -> SimulationResult:
    return replay(model, (*BOTH, *events), 100_000.0)


def test_undisturbed_it_takes_its_start_and_its_iterations() -> None:
    result = run(CHECKPOINTS)
    assert result.finished
    assert result.end_s == pytest.approx(10 + 6 * 100)
    assert [one.end_s for one in result.iterations] == pytest.approx([110, 210, 310, 410, 510, 610])
    assert sum(result.phase_s.values()) == pytest.approx(4 * 610)
    assert sum(result.cost_usd.values()) == pytest.approx(2 * HOUR_USD * 610 / 3600)


def test_a_loss_costs_the_work_since_the_last_checkpoint_and_a_restart() -> None:
    result = run(CHECKPOINTS, (360.0, lost("b")))
    # Three and a half iterations are done, two are safe; four more on half of the nodes.
    assert result.end_s == pytest.approx(360 + 30 + 4 * 200)
    assert result.phase_s[NodeKind.SPOT, Phase.LOST] == pytest.approx(1.5 * 100 * 4)
    assert [one.iteration for one in result.iterations] == [0, 1, 2, 2, 3, 4, 5]
    assert [one.iteration for one in lasting(result.iterations)] == [0, 1, 2, 3, 4, 5]
    assert sum(one.cost_usd for one in result.iterations) == pytest.approx(sum(result.cost_usd.values()))


def test_a_neighbour_takes_over_unless_it_is_lost_as_well() -> None:
    alone = run(REDUNDANT, (360.0, lost("b")))
    assert alone.end_s == pytest.approx(360 + 5 + 2.5 * 200)
    assert (NodeKind.SPOT, Phase.LOST) not in alone.phase_s
    both = run(replace(REDUNDANT, nodes=3), (0.0, joined("c")), (360.0, lost("b")), (363.0, lost("c")))
    assert both.end_s == pytest.approx(363 + 5 + 4 * 300)


def test_a_node_that_joins_boots_first_and_is_paid_meanwhile() -> None:
    result = run(CHECKPOINTS, (210.0, lost("b")), (300.0, joined("c")))
    # A restart until 240, half an iteration in 100 s until 340, a pause of 30 s, 3.5 iterations.
    assert result.end_s == pytest.approx(340 + 30 + 350)
    assert result.phase_s[NodeKind.SPOT, Phase.SETUP] == pytest.approx(2 * 40)


def test_without_nodes_nothing_happens_and_nothing_is_paid() -> None:
    result = run(CHECKPOINTS, (210.0, lost("a")), (210.0, lost("b")), (1000.0, joined("c")))
    assert result.end_s == pytest.approx(1000 + 40 + 30 + 4 * 200)
    assert sum(result.cost_usd.values()) == pytest.approx(HOUR_USD * (2 * 210 + 70 + 800) / 3600)
    assert not run(CHECKPOINTS, (210.0, lost("a")), (210.0, lost("b"))).finished


def test_prices_over_time_are_paid() -> None:
    dearer = PriceChanged(NodeId("a"), 2 * HOUR_USD)
    result = run(CHECKPOINTS, (310.0, dearer))
    assert sum(result.cost_usd.values()) == pytest.approx(HOUR_USD * (2 * 610 + 300) / 3600)


def test_on_a_calm_trace_they_are_the_colocated_run_at_the_spot_price() -> None:
    small = ("workload.prompts=8", "run.iterations=6", "workload.evaluation=null", "trace.kind=always_on")
    names = ("colocated", "all_on_demand", "spot_checkpoints", "spot_redundancy")
    prepared = prepare(load_scenario("paper-512", small), names, datetime(2026, 11, 21, tzinfo=UTC))
    together, resident, ours, redundant = (run_task(SimulationTask(prepared, name)).outcome for name in names)
    assert together.iteration_s > resident.iteration_s + 30, "two switches of 17.5 s"
    assert ours.iteration_s == pytest.approx(together.iteration_s, rel=0.25), "on nodes of two, not of four"
    assert redundant.iteration_s > 1.02 * ours.iteration_s
    assert ours.iteration_usd / ours.iteration_s == pytest.approx(12 * 1.78 / 3600, rel=1e-3)
    assert sum(ours.gpu_s.values()) == pytest.approx(12 * 3600 * ours.simulated_h)


def test_they_pay_for_scorers_and_save_after_every_iteration_as_we_do() -> None:
    small = (
        "workload.prompts=8",
        "run.iterations=6",
        "workload.evaluation=null",
        "trace={kind: generated, mean_uptime_h: 0.05, mean_downtime_s: 10}",
    )
    names, now = ("spot_checkpoints", "all_spot"), datetime(2026, 11, 21, tzinfo=UTC)
    free, paid = (
        run_task(
            SimulationTask(prepare(load_scenario("paper-512", [*small, more]), names, now), names[0])
        ).outcome
        for more in ("rewards.usd_h=0", "rewards={scorers: 32, usd_h: 0.25}")
    )
    assert paid.other_usd == {"rewards": pytest.approx(8 * paid.simulated_h)}
    assert paid.simulated_usd - free.simulated_usd == pytest.approx(8 * paid.simulated_h)
    assert paid.iteration_usd - free.iteration_usd == pytest.approx(8 * paid.iteration_s / 3600)
    scenario = prepare(load_scenario("paper-512", small), names, now)
    assert {scenario_of(scenario, strategy_named(name)).plan.checkpoint_every for name in names} == {1}
    assert free.preemptions > 2
    assert free.lost_s < free.preemptions * 12 * free.iteration_s
