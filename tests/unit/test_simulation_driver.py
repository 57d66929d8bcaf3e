"""A run in virtual time: every GPU-second is accounted for, exploration fills idle time, prices change."""

from __future__ import annotations

import dataclasses
import gc
import random
import statistics

import pytest
from tests.simulation.constant_costs import ConstantCosts

from spotlight.config.sections.evaluation import EvaluationConfig
from spotlight.config.sections.exploration import ExplorationConfig, PreviewTime
from spotlight.scheduler.events import NodeJoined, NodeLost
from spotlight.scheduler.plan import ClusterPlan, Plan
from spotlight.scheduler.types import Node, NodeId, NodeKind, Phase
from spotlight_plan.simulation.disturbances import TimingNoise
from spotlight_plan.simulation.scenario import NodeEvent, PriceChanged, Scenario, SimulationResult
from spotlight_plan.simulation.virtual_driver import Simulation, simulate

RESERVED = Node(NodeId("r"), NodeKind.RESERVED, 2, "H100", 20.0, True, False)
SPOT = [Node(NodeId(f"s{n}"), NodeKind.SPOT, 2, "H100", 7.2, False, True) for n in range(2)]
PLAN = Plan(
    run_seed=0, iterations=3, prompts_per_iteration=4, group_size=4, rollout_steps=10,
    evaluation=EvaluationConfig(steps=10, images_per_prompt=1, every=2),
    updates_per_batch=2, micro_batch_size=4, checkpoint_every=1,
    lease_s=60.0, max_drop_share=None, ranks=2, cluster=ClusterPlan(heads=24, degrees=(1, 2, 3, 4)),
)  # fmt: skip
JOINED: tuple[tuple[float, NodeEvent], ...] = tuple((0.0, NodeJoined(node)) for node in (RESERVED, *SPOT))
SCENARIO = Scenario(PLAN, ConstantCosts(), JOINED, train_prompts=6, test_prompts=2, timelines=True)


def seconds(result: SimulationResult, phase: Phase) -> float:
    return sum(spent for (_, which), spent in result.phase_s.items() if which is phase)


def exploring(where: PreviewTime | None) -> SimulationResult:
    most = 8 if where == "idle" else None
    exploration = (
        None
        if where is None
        else ExplorationConfig(where=where, seeds_per_prompt=8, steps=4, seeds_per_prompt_max=most)
    )
    return simulate(dataclasses.replace(SCENARIO, plan=dataclasses.replace(PLAN, exploration=exploration)))


def test_a_run_ends_and_its_timelines_have_no_gaps() -> None:
    result = exploring(None)
    assert result.finished
    assert (result.trained, result.evaluated, result.dropped) == (48, 6, 0)
    assert [iteration.iteration for iteration in result.iterations] == [0, 1, 2]
    assert len(result.gpus) == 6
    for gpu in result.gpus:
        assert gpu.segments[0].start_s == 0.0
        assert gpu.segments[-1].end_s == result.end_s
        for before, after in zip(gpu.segments, gpu.segments[1:], strict=False):
            assert before.end_s == after.start_s
    drawn = sum(segment.end_s - segment.start_s for gpu in result.gpus for segment in gpu.segments)
    assert drawn == pytest.approx(sum(result.phase_s.values())) == pytest.approx(6 * result.end_s)
    assert seconds(result, Phase.LOST) == pytest.approx(0.0, abs=1e-6)
    usd = result.end_s / 3600 * (20.0 + 2 * 7.2)
    assert sum(result.cost_usd.values()) == pytest.approx(usd)


def test_exploration_fills_idle_time_or_makes_iterations_longer() -> None:
    without, critical, idle = exploring(None), exploring("critical_path"), exploring("idle")
    assert without.explored == 0
    assert critical.explored == 3 * 4 * 8
    assert 0 < idle.explored <= 2 * 4 * 8
    assert critical.end_s > without.end_s
    assert idle.end_s < critical.end_s
    assert seconds(idle, Phase.IDLE) < seconds(without, Phase.IDLE)
    assert without.trained == critical.trained == idle.trained


def test_equal_scenarios_give_equal_runs() -> None:
    noisy = dataclasses.replace(SCENARIO, noise=0.2, seed=3)
    first = simulate(noisy)
    assert first == simulate(noisy)
    assert first != simulate(dataclasses.replace(noisy, seed=4))


def test_a_simulation_leaves_no_cycles_so_that_it_may_pause_their_collection() -> None:
    lost: tuple[tuple[float, NodeEvent], ...] = ((20.0, NodeLost(SPOT[0].id)),)
    exploration = ExplorationConfig(where="idle", seeds_per_prompt=8, steps=4)
    plan = dataclasses.replace(PLAN, iterations=30, exploration=exploration)
    simulation = Simulation(dataclasses.replace(SCENARIO, plan=plan, nodes=(*JOINED, *lost)))
    gc.collect()
    gc.disable()
    try:
        simulation.begin()
        while simulation.step():
            pass
        assert simulation.result().events > 1000
        assert gc.collect() < 100, "objects that only a collection frees would fill the memory"
    finally:
        gc.enable()


def test_collection_goes_on_after_a_simulation() -> None:
    simulate(SCENARIO)
    assert gc.isenabled()


def trained_s(ranks: int, noise: float, slow: dict[NodeId, float] | None = None) -> float:
    """Time of each learner GPU in training, of a run with a reserved node for every two ranks."""
    nodes = [dataclasses.replace(RESERVED, id=NodeId(f"r{n}")) for n in range(ranks // 2)]
    joined = tuple((0.0, NodeJoined(node)) for node in (*nodes, *SPOT))
    plan = dataclasses.replace(PLAN, ranks=ranks, micro_batch_size=ranks)
    simulation = Simulation(dataclasses.replace(SCENARIO, plan=plan, nodes=joined, noise=noise))
    simulation.slow.update(slow or {})
    simulation.begin()
    while simulation.step():
        pass
    assert simulation.finish is not None
    assert simulation.finish.error is None
    return seconds(simulation.result(), Phase.TRAINING) / ranks


def test_training_waits_for_the_slowest_rank() -> None:
    assert trained_s(4, 0.3) > 1.1 * trained_s(4, 0.0), "the slowest of four is slower than the mean"
    slow = trained_s(4, 0.0, {NodeId("r1"): 3.0})
    assert slow == pytest.approx(3 * trained_s(4, 0.0)), "half of the ranks wait for the other half"


@pytest.mark.parametrize("count", [1, 4, 64])
def test_the_slowest_of_many_is_as_slow_as_if_each_were_drawn(count: int) -> None:
    noise, each = TimingNoise(0, "learner", 0.3), random.Random(1)
    direct = [max(each.lognormvariate(0.0, 0.3) for _ in range(count)) for _ in range(4000)]
    drawn = [noise.slowest(count) for _ in range(4000)]
    assert statistics.mean(drawn) == pytest.approx(statistics.mean(direct), rel=0.03)
    assert statistics.quantiles(drawn) == pytest.approx(statistics.quantiles(direct), rel=0.04)
    assert TimingNoise(0, "rewards", 0.0).slowest(count) == 1.0


def test_rewards_arrive_with_noise() -> None:
    costs = ConstantCosts(step_s=1e-9, small_s=1e-9, large_s=1e-9, answer_s=10.0)
    exact = simulate(dataclasses.replace(SCENARIO, costs=costs)).end_s
    assert simulate(dataclasses.replace(SCENARIO, costs=costs, noise=0.3)).end_s > 1.1 * exact


def test_a_preemption_loses_what_was_not_committed_and_the_node_is_billed_no_more() -> None:
    events = (*JOINED, (14.0, NodeLost(SPOT[0].id)), (40.0, NodeJoined(SPOT[0])))
    result = simulate(dataclasses.replace(SCENARIO, nodes=events))
    assert result.finished
    assert result.preemptions == 1
    lost = seconds(result, Phase.LOST)
    assert 0 < lost <= 2 * SCENARIO.commit_every * 1.0
    assert sum(result.phase_s.values()) == pytest.approx(6 * result.end_s - 2 * 26.0)


def test_prices_change_while_a_node_is_rented() -> None:
    changed = (*JOINED, (10.0, PriceChanged(SPOT[0].id, 72.0)))
    plain, dearer = simulate(SCENARIO), simulate(dataclasses.replace(SCENARIO, nodes=changed))
    assert plain.end_s == dearer.end_s
    more = sum(dearer.cost_usd.values()) - sum(plain.cost_usd.values())
    assert more == pytest.approx((plain.end_s - 10.0) / 3600 * (72.0 - 7.2))


@pytest.mark.parametrize(
    ("nodes", "error"),
    [
        (JOINED[1:], "give plan.ranks their number"),
        (JOINED[:1], "no node rolls out"),
        (((5.0, JOINED[0][1]), (0.0, JOINED[1][1])), "ordered by time"),
    ],
)
def test_impossible_scenarios_are_refused(nodes: tuple[tuple[float, NodeEvent], ...], error: str) -> None:
    with pytest.raises(ValueError, match=error):
        dataclasses.replace(SCENARIO, nodes=nodes)
