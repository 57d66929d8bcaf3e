"""Swarm testing: small configurations drawn from seeds, as different as the plan allows."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from typing import get_args

from spotlight.config.sections.algorithm import AdvantagesOver, SilentGroups, TrainPolicy
from spotlight.config.sections.evaluation import EvaluationConfig
from spotlight.config.sections.exploration import (
    ExplorationConfig,
    PlannerConfig,
    PreviewCostsConfig,
    PreviewTime,
    SeedPolicy,
)
from spotlight.config.sections.fleet import OnDemandConfig
from spotlight.config.sections.learner_section import UpdateSplit
from spotlight.config.sections.pipeline import NO_OVERLAP, PipelineConfig
from spotlight.scheduler.events import NodeJoined
from spotlight.scheduler.plan import ClusterPlan, FleetSettings, Plan, TrainingChoice
from spotlight.scheduler.types import Node, NodeId, NodeKind, WeightKind
from spotlight_plan.simulation.scenario import NodeEvent, PriceChanged, Scenario
from spotlight_plan.simulation.virtual_rewards import RewardModel
from tests.simulation.constant_costs import ConstantCosts
from tests.simulation.faults import Fault, FaultKind, draw_faults


@dataclass(frozen=True, slots=True)
class Trial:
    """A scenario, and what goes wrong in it.

    Attributes:
        poll_s: how often an idle group repeats its pull.
    """

    seed: int
    scenario: Scenario
    faults: tuple[Fault, ...]
    poll_s: float


def draw_trial(seed: int) -> Trial:
    """The trial of a seed."""
    source = random.Random(seed)
    degree_min = source.choice([1, 1, 1, 2])
    colocated = source.random() < 0.3
    trainers = source.choice([1, 1, 2])
    train_gpus = source.choice([1, 2])
    joined = [
        _node(f"r{n}", NodeKind.RESERVED, train_gpus * (degree_min if colocated else 1), True, colocated)
        for n in range(trainers)
    ]
    joined += [
        _node(f"s{n}", NodeKind.SPOT, degree_min * source.choice([1, 1, 2, 4]), False, True)
        for n in range(source.choice([1, 2, 3]))
    ]
    ranks = sum(node.gpus for node in joined if node.trains)
    plan = _draw_plan(seed, source, ranks, degree_min)
    joined, plan = _with_moving_learner(seed, joined, plan, degree_min)
    nodes: list[tuple[float, NodeEvent]] = [(0.0, NodeJoined(node)) for node in joined]
    scenario = Scenario(
        plan,
        ConstantCosts(
            source.choice([0.5, 2.0]),
            source.choice([0.1, 0.5]),
            4.0,
            source.choice([1, 2, 4]),
            source.choice([0.1, 0.5, 15.0]),
            random.Random(f"turns {seed}").choice([0.0, 0.7, 5.0]),
        ),
        tuple(nodes + _draw_prices(seed, joined)),
        train_prompts=source.choice([1, 2, 5]),
        test_prompts=source.choice([0, 1, 2]),
        seed=seed,
        noise=source.choice([0.0, 0.2]),
        commit_every=source.choice([1, 2, 3]),
        rewards=RewardModel(flat_share=0.3),
    )
    scenario = _with_machines(seed, scenario)
    faults = draw_faults(source, source.choice([0, 2, 6, 12, 20]), source.choice([60, 200, 500]))
    if source.random() < 0.4:
        bad = Fault(FaultKind.BAD_NETWORK, 1, source.random(), 300.0, source.choice([0.1, 0.3, 0.3]))
        faults = (bad, *faults)
    if source.random() < 0.3:
        faults = (Fault(FaultKind.SILENT_REWARDS, 1, source.random(), 300.0, 0.2), *faults)
    faults = (*faults, *_draw_moves(seed, plan))
    return Trial(seed, scenario, faults, poll_s=source.choice([5.0, 15.0]))


def divisors(heads: int, low: int, high: int) -> tuple[int, ...]:
    """Possible sequence-parallel degrees: divisors of ``heads`` from ``low`` to ``high``, ascending."""
    return tuple(degree for degree in range(low, high + 1) if heads % degree == 0)


def _with_machines(seed: int, scenario: Scenario) -> Scenario:
    """With machines that boot and nodes on demand, perhaps; drawn apart, so that it changes nothing else of a
    trial.
    """
    source = random.Random(f"machines {seed}")
    scenario = replace(scenario, boot_s=source.choice([0.0, 0.0, 3.0, 20.0]))
    plan = scenario.plan
    if not plan.cluster.learner_moves or source.random() < 0.4:
        return scenario
    name, even = _node("on-demand", NodeKind.ON_DEMAND, plan.ranks, False, True), source.random() < 0.3
    after_s, back_after_s = source.choice([0.0, 15.0, 60.0]), source.choice([0.0, 10.0, 60.0])
    on_demand = OnDemandConfig(after_s=after_s, back_after_s=back_after_s)
    fleet = FleetSettings(
        ranks_roll_out=source.random() < 0.5, even_ranks=even, on_demand=on_demand, move_s=3630.0
    )
    return replace(scenario, on_demand=name, plan=replace(plan, fleet=fleet))


def _draw_prices(seed: int, nodes: list[Node]) -> list[tuple[float, NodeEvent]]:
    """Spot prices that move; drawn apart, so that they change nothing else of a trial."""
    source = random.Random(f"prices {seed}")
    spot = [node for node in nodes if node.kind is NodeKind.SPOT]
    times_s = sorted(source.uniform(0.0, 300.0) for _ in range(source.choice([0, 0, 4, 12])))
    changes: list[tuple[float, NodeEvent]] = []
    for at_s in times_s:
        node = source.choice(spot)
        changes.append((at_s, PriceChanged(node.id, node.price_usd_h * source.uniform(0.5, 2.0))))
    return changes


def _node(name: str, kind: NodeKind, gpus: int, trains: bool, rolls_out: bool) -> Node:
    price_usd_h = (10.0 if kind is NodeKind.RESERVED else 3.0) * gpus
    return Node(NodeId(name), kind, gpus, "H100", price_usd_h, trains, rolls_out)


def _draw_plan(seed: int, source: random.Random, ranks: int, degree_min: int) -> Plan:
    group_size = source.choice([2, 3, 4])
    times: list[PreviewTime | None] = [None, None, "critical_path", "idle", "idle"]
    explore = source.choice(times)
    more, steps = source.choice([0, 2, 4]), source.choice([2, 3])
    pipeline, bounded = _draw_pipeline(seed, explore)
    plan = Plan(
        run_seed=source.randrange(2**31),
        iterations=source.choice([2, 3, 4, 5]),
        prompts_per_iteration=source.choice([1, 2, 3]),
        group_size=group_size,
        rollout_steps=source.choice([2, 4, 8]),
        evaluation=EvaluationConfig(
            steps=source.choice([2, 5]), images_per_prompt=1, every=source.choice([1, 2])
        ),
        updates_per_batch=source.choice([1, 2]),
        micro_batch_size=ranks * source.choice([1, 2]),
        checkpoint_every=source.choice([1, 2, 3]),
        lease_s=source.choice([15.0, 30.0]),
        max_drop_share=1.0,
        ranks=ranks,
        cluster=ClusterPlan(
            pixels=source.choice([512 * 512, 1280 * 1280]),
            heads=24,
            degrees=divisors(24, degree_min, source.choice([degree_min, 4])),
            tail_steps=1,
            answer_s=5.0,
            start_s=30.0,
            drain_margin_s=source.choice([3.0, 25.0]),
            publishes=source.choice([WeightKind.ADAPTER, WeightKind.FULL]),
        ),
        exploration=None if explore is None else _draw_exploration(seed, explore, group_size, more, steps),
        keeps_previews=explore == "critical_path" and random.Random(f"keeps {seed}").random() < 0.8,
        pipeline=pipeline,
        bounded=bounded,
        choice=_draw_choice(seed, group_size, pipeline),
    )
    return _with_divided_groups(seed, _with_whole_groups(seed, plan))


def _with_moving_learner(
    seed: int, joined: list[Node], plan: Plan, degree_min: int
) -> tuple[list[Node], Plan]:
    """With the learner on spot nodes, perhaps; drawn apart, so that it changes nothing else of a trial."""
    source = random.Random(f"spot learner {seed}")
    if plan.ranks % degree_min or source.random() < 0.7:
        return joined, plan
    shares = plan.ranks // degree_min
    gpus = degree_min * source.choice([1, shares, shares + 1, 3])
    spare = source.choice([1, 1, 2, 3])
    spot = [_node(f"s{n}", NodeKind.SPOT, gpus, False, True) for n in range(plan.ranks // gpus + spare)]
    reserved = [_node("r0", NodeKind.RESERVED, degree_min, False, True)] if source.random() < 0.3 else []
    fewer = random.Random(f"fewer ranks {seed}").choice([None, *divisors(plan.ranks, 1, plan.ranks)])
    if fewer is not None and (fewer % degree_min or plan.whole_groups):
        fewer = None
    moves = replace(plan.cluster, learner_moves=True, learner_ranks_min=fewer)
    return [*reserved, *spot], replace(plan, cluster=moves, checkpoint_every=1)


def _draw_moves(seed: int, plan: Plan) -> tuple[Fault, ...]:
    """What makes a learner that moves do so; drawn apart, so that it changes nothing else of a trial."""
    if not plan.cluster.learner_moves:
        return ()
    source = random.Random(f"moves {seed}")
    drawn = [FaultKind.NOTICE, FaultKind.CRASH_LEARNER, FaultKind.NOTICE_LEARNER]
    kinds = source.choices(drawn, k=source.choice([4, 8, 16]))
    faults = [
        Fault(kind, source.randrange(1, 300), source.random(), source.choice([7.0, 20.0, 28.0, 30.0]), 0.0)
        for kind in kinds
    ]
    if source.random() < 0.3:  # before the run has started
        faults += [
            replace(faults[0], kind=FaultKind.NOTICE, after_events=source.randrange(1, 4), seconds=120.0)
        ]
    return tuple(sorted(faults, key=lambda fault: fault.after_events))


def _with_whole_groups(seed: int, plan: Plan) -> Plan:
    """With a loss that compares the samples of a group, perhaps; drawn apart, so that it changes nothing else
    of a trial.
    """
    source = random.Random(f"groups {seed}")
    group = plan.choice.of_group(plan.group_size)
    if plan.pipeline.axis != "none" or group % plan.ranks or source.random() < 0.5:
        return plan
    return replace(plan, whole_groups=True, micro_batch_size=group * source.choice([1, 2]))


def _with_divided_groups(seed: int, plan: Plan) -> Plan:
    """With groups divided among updates, perhaps; drawn apart, so that it changes nothing else of a trial."""
    if plan.updates_per_batch == 1 or plan.whole_groups or plan.pipeline.trains_parts:
        return plan
    return replace(plan, update_split=random.Random(f"updates {seed}").choice(get_args(UpdateSplit)))


def _draw_choice(seed: int, group_size: int, pipeline: PipelineConfig) -> TrainingChoice:
    """What is trained of what was generated; drawn apart, so that it changes nothing else of a trial."""
    source = random.Random(f"choice {seed}")
    samples = source.choice([None, 2, 3]) if pipeline.waits_for_groups and group_size > 2 else None
    policy = source.choice(get_args(TrainPolicy))
    over, silent = source.choice(get_args(AdvantagesOver)), source.choice(get_args(SilentGroups))
    return TrainingChoice(samples, policy, over, silent)


def _draw_pipeline(seed: int, explore: PreviewTime | None) -> tuple[PipelineConfig, bool]:
    """What overlaps, and ``Plan.bounded``; drawn apart, so that it changes nothing else of a trial."""
    source = random.Random(f"pipeline {seed}")
    if source.random() < 0.3:
        return NO_OVERLAP, False
    baseline = source.choice(["group", "slice"] + ["exploration"] * (explore is not None))
    share = source.choice([0.0, 0.5, 1.0])
    axis = source.choice(["none", "prompt", "generation"])
    slice_size = source.choice([3, 4] if baseline == "slice" else [1, 2, 3])
    bounded, switch_s = source.random() < 0.6, source.choice([0.0, 0.7, 5.0])
    # Early rollouts need their seeds before previews on the critical path have chosen them.
    share = 0.0 if explore == "critical_path" else share
    pipeline = {"axis": axis, "slice_size": slice_size, "baseline": baseline, "switch_s": switch_s}
    return PipelineConfig.model_validate(pipeline | {"next_share": share}), bounded


def _draw_exploration(
    seed: int, where: PreviewTime, group_size: int, more: int, steps: int
) -> ExplorationConfig:
    """How seeds are chosen; drawn apart, so that it changes nothing else of a trial."""
    source = random.Random(f"exploration {seed}")
    planner = None
    if source.random() < 0.4:
        counts = tuple(sorted({group_size, group_size + 2, group_size + more}))
        costs = PreviewCostsConfig(
            step_s=0.5, fixed_s=0.5, reward_s=0.5, window_s=source.choice([None, 20.0])
        )
        planner = PlannerConfig(
            seed_counts=counts,
            step_counts=(2, 3),
            alpha=source.choice([0.0, 1.0]),
            caution=source.choice([0.0, 1.0]),
            costs=costs,
        )
    policy = source.choice((*get_args(SeedPolicy), "max_variance"))
    deepest = source.choice([0, 2, 12]) if where == "idle" else None
    spares, sampled = source.choice([0, 0, 1, 3]), source.choice([0, 1, 2])
    return ExplorationConfig(
        where=where,
        seeds_per_prompt=group_size + more,
        steps=steps,
        policy=policy,
        spare_prompts=spares,
        sampled_prompts=sampled,
        planner=planner,
        seeds_per_prompt_max=None if deepest is None else group_size + 4 + deepest,
    )
