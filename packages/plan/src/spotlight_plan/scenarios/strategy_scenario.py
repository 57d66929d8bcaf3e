"""One strategy's scenario, of what was read: the simulator's input. Pure."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import lru_cache

from spotlight.config.sections.evaluation import NO_EVALUATION, EvaluationConfig
from spotlight.config.sections.exploration import (
    BanditConfig,
    ExplorationConfig,
    PlannerConfig,
    PreviewCostsConfig,
    SeedChoiceConfig,
)
from spotlight.config.sections.fleet import FleetConfig, OnDemandConfig
from spotlight.config.sections.target import TargetConfig
from spotlight.scheduler.events import NodeJoined
from spotlight.scheduler.plan import ClusterPlan, FleetSettings, Plan, TrainingChoice, latent_frames
from spotlight.scheduler.types import Node, NodeId, NodeKind, WeightKind
from spotlight_plan.scenarios.prepared_scenario import Prepared
from spotlight_plan.scenarios.pricing import PriceTag
from spotlight_plan.scenarios.profile import Profile, learner_bytes, require_memory, timesteps_that_fit
from spotlight_plan.scenarios.profile_costs import LearnerShape, ProfileCosts, ProfiledWorkload, sp_degrees
from spotlight_plan.scenarios.scenario_file import ScenarioFile
from spotlight_plan.scenarios.scenario_sections import Pool
from spotlight_plan.scenarios.side_costs import egress_of, standing_usd_h
from spotlight_plan.scenarios.strategies import PipelinePart, SpotPlaces, Strategy
from spotlight_plan.simulation.scenario import NodeEvent, Scenario
from spotlight_plan.simulation.virtual_rewards import RewardModel
from spotlight_rewards.base.errors import ConfigError, Problem

_LEARNER_S = FleetConfig().learner_s
# Of equal settings the same: a plan asks for those of thousands of ways.
_evaluation = lru_cache(maxsize=128)(EvaluationConfig)
_on_demand = lru_cache(maxsize=128)(OnDemandConfig)
_explores = lru_cache(maxsize=128)(ExplorationConfig)
_PROMPTS_FACTOR = 4
"""Simulated prompts per prompt of an iteration; does not affect the result."""


@dataclass(frozen=True, slots=True)
class Terms:
    """What a strategy's iterations consist of and last, whenever its spot nodes come and go.

    Attributes:
        rolls_out: GPU types that do.
        boot_s: of a node.
    """

    costs: ProfileCosts
    plan: Plan
    rolls_out: tuple[str, ...]
    boot_s: float


def terms_of(prepared: Prepared, strategy: Strategy) -> Terms:
    """Costs and plan of one strategy.

    Raises:
        ConfigError: the profile lacks a figure, or the model does not fit.
    """
    file = prepared.file.run_as(strategy)
    prepared, ranks = replace(prepared, file=file), ranks_of(prepared, strategy)
    denoising = dict.fromkeys(node.gpu_type for node in standing_nodes(prepared, strategy) if node.rolls_out)
    if comes_and_goes(strategy) and prepared.trace_of(strategy).events:  # the first one is an arrival
        denoising[file.cluster.spot.gpu_type] = None
    if not denoising:
        found, remedy = "no spot node in all the time", "Take another, or set cluster.reserved.rolls_out."
        raise ConfigError(
            prepared.trace.source,
            [Problem("trace", found, f"one that rolls out, for {strategy.name}", remedy)],
        )
    rolls_out = tuple(denoising)
    costs = _costs(prepared, strategy, rolls_out, ranks)
    boot_s = costs.boot_s() if file.cluster.boot_s is None else file.cluster.boot_s
    return Terms(costs, _plan(prepared, strategy, costs, rolls_out, ranks), rolls_out, boot_s)


def scenario_of(prepared: Prepared, strategy: Strategy, *, timelines: bool = False) -> Scenario:
    """Build one strategy's scenario.

    Raises:
        ConfigError: as :func:`terms_of`.
    """
    terms, file = terms_of(prepared, strategy), prepared.file.run_as(strategy)
    prepared, work = replace(prepared, file=file), file.workload
    model = file.exploration.rewards if file.exploration else None
    return Scenario(
        plan=terms.plan,
        costs=terms.costs,
        nodes=node_events(prepared, strategy),
        train_prompts=_PROMPTS_FACTOR * work.prompts,
        test_prompts=work.evaluation.prompts if work.evaluation else 0,
        seed=file.run.seed,
        noise=file.run.noise,
        commit_every=file.run.commit_every,
        until_s=file.run.until_h * 3600,
        rewards=RewardModel(**model.model_dump()) if model else RewardModel(),
        timelines=timelines,
        on_demand=on_demand_node(prepared) if strategy.placement == "spot_then_on_demand" else None,
        boot_s=terms.boot_s,
        egress=egress_of(file, prepared.profile, prepared.pricing, strategy),
        standing_usd_h=standing_usd_h(file, prepared.profile, strategy),
        spot_first=file.target.nodes_first,
    )


def ranks_of(prepared: Prepared, strategy: Strategy) -> int:
    """GPUs that train."""
    if strategy.learner_moves:
        return prepared.file.ranks
    return sum(node.gpus for node in standing_nodes(prepared, strategy) if node.trains)


def on_demand_node(prepared: Prepared) -> Node:
    """The whole machines that a learner on spot nodes takes on demand, as one node."""
    file, tag = prepared.file, prepared.pricing.on_demand
    assert tag is not None, "prepared for a strategy that takes a node on demand"
    spot = file.cluster.spot
    gpus = math.ceil(file.ranks / spot.gpus_per_node) * spot.gpus_per_node  # of whole machines
    price, kind = tag.usd_gpu_h * gpus, NodeKind.ON_DEMAND
    return Node(NodeId("on-demand"), kind, gpus, spot.gpu_type, price, trains=False, rolls_out=True)


def _fleet_plan(
    prepared: Prepared, strategy: Strategy, cluster: ClusterPlan, costs: ProfileCosts
) -> FleetSettings:
    file, tag = prepared.file, prepared.pricing.spot
    wish = file.learner.on_demand
    takes = strategy.placement == "spot_then_on_demand"
    return FleetSettings(
        ranks_roll_out=strategy.trainers_roll_out(file.cluster.reserved.rolls_out),
        even_ranks=file.learner.shard == "node",
        on_demand=_on_demand(after_s=wish.after_s, back_after_s=wish.back_after_s) if takes else None,
        move_s=cluster.start_s + _LEARNER_S,
        target=_target(file, strategy, costs),
        spot_gpus=file.cluster.spot.gpus_per_node,
        spot_usd_h=0.0 if tag is None else tag.usd_gpu_h * file.cluster.spot.gpus_per_node,
    )


def _target(file: ScenarioFile, strategy: Strategy, costs: ProfileCosts) -> TargetConfig | None:
    if strategy.places is not SpotPlaces.SPOT or strategy.baseline is not None:
        return None
    boot_s = costs.boot_s() if file.cluster.boot_s is None else file.cluster.boot_s
    return file.target.for_nodes(file.spot_nodes(strategy), boot_s + costs.worker_start_s())


def _learner_shape(file: ScenarioFile, strategy: Strategy, ranks: int) -> LearnerShape:
    pools = file.cluster
    gpus = (pools.spot if strategy.is_all_spot else pools.reserved).gpus_per_node
    if strategy.places is SpotPlaces.ON_DEMAND and pools.spot.gpu_type == pools.reserved.gpu_type:
        gpus = min(gpus, pools.spot.gpus_per_node)
    return LearnerShape(ranks, gpus, file.learner.shard, file.workload.micro_batch_per_gpu)


def _costs(prepared: Prepared, strategy: Strategy, denoising: tuple[str, ...], ranks: int) -> ProfileCosts:
    work, learner_gpu = prepared.file.workload, prepared.file.learner_gpu(strategy)
    per_pass = timesteps_per_pass(prepared, strategy, ranks)
    require_memory(
        prepared.profile,
        rollout_gpus=denoising,
        learner_gpu=learner_gpu,
        ranks=_learner_shape(prepared.file, strategy, ranks).parts,
        timesteps_per_pass=per_pass,
    )
    workload = ProfiledWorkload(
        pixels=prepared.file.pixels,
        trained_timesteps=work.trained_timesteps,
        learner_gpu=learner_gpu,
        guidance=work.guidance,
        recomputes_log_probs=work.recomputes_log_probs,
        timesteps_per_pass=per_pass,
        resident=work.resident and not strategy.switches,
        scorers=prepared.file.rewards.scorers,
        learner=_learner_shape(prepared.file, strategy, ranks),
    )
    return ProfileCosts(prepared.profile, workload)


def _plan(
    prepared: Prepared, strategy: Strategy, costs: ProfileCosts, denoising: tuple[str, ...], ranks: int
) -> Plan:
    file, work, test = prepared.file, prepared.file.workload, prepared.file.workload.evaluation
    cluster = replace(_cluster_plan(prepared, costs, denoising), learner_moves=strategy.learner_moves)
    return Plan(
        run_seed=file.run.seed,
        iterations=file.run.iterations,
        prompts_per_iteration=work.prompts,
        group_size=work.group_size,
        rollout_steps=work.steps,
        evaluation=NO_EVALUATION
        if test is None
        else _evaluation(every=test.every, images_per_prompt=test.images_per_prompt, steps=test.steps),
        updates_per_batch=work.updates_per_batch,
        micro_batch_size=ranks * work.micro_batch_per_gpu,
        checkpoint_every=1 if strategy.is_all_spot else work.checkpoint_every,
        lease_s=_lease_s(costs, denoising, file),
        max_drop_share=0.5,  # uneven ranks leave samples over by design
        ranks=ranks,
        cluster=cluster,
        fleet=_fleet_plan(prepared, strategy, cluster, costs),
        exploration=_exploration(file, strategy, costs, denoising[0], ranks),
        keeps_previews=strategy.explore == "critical_path",
        pipeline=file.pipeline.of(strategy, costs.switch_s()),
        bounded=PipelinePart.TAG in strategy.parts,
        choice=TrainingChoice(work.train_samples),
    )


def bytes_of_both(prepared: Prepared, strategy: Strategy) -> float:
    """Least memory of a GPU with both a training and a rollout process resident; 0 if none has both."""
    nodes = [event.node for _, event in node_events(prepared, strategy) if isinstance(event, NodeJoined)]
    moving = strategy.learner_moves and strategy.trainers_roll_out(prepared.file.cluster.reserved.rolls_out)
    if not moving and not any(node.trains and node.rolls_out for node in nodes):
        return 0.0
    ranks = ranks_of(prepared, strategy)
    asked = prepared.file.workload.timesteps_per_pass  # if null, only as many as fit are taken
    per_pass = 1 if asked is None else timesteps_per_pass(prepared, strategy, ranks)
    parts = _learner_shape(prepared.file, strategy, ranks).parts
    return prepared.profile.memory.rollout_bytes.value + learner_bytes(prepared.profile, parts, per_pass)


def timesteps_per_pass(prepared: Prepared, strategy: Strategy, ranks: int) -> int:
    """The setting, with ``+tsp``; if null, as many as fit on a learner GPU."""
    work, reserved = prepared.file.workload, prepared.file.cluster.reserved
    if PipelinePart.TSP not in strategy.parts:
        return 1
    if work.timesteps_per_pass is not None:
        return min(work.timesteps_per_pass, work.trained_timesteps)
    both = work.resident and not strategy.switches and strategy.trainers_roll_out(reserved.rolls_out)
    held = prepared.profile.memory.rollout_bytes.value if both else 0.0
    gpu = prepared.file.learner_gpu(strategy)
    parts = _learner_shape(prepared.file, strategy, ranks).parts
    return timesteps_that_fit(prepared.profile, gpu, parts, work.trained_timesteps, held)


def node_events(prepared: Prepared, strategy: Strategy) -> tuple[tuple[float, NodeEvent], ...]:
    """Node events of a strategy: reserved nodes, and whatever takes the places of the spot nodes."""
    joining = tuple((0.0, NodeJoined(node)) for node in standing_nodes(prepared, strategy))
    return joining + (prepared.spot_nodes(strategy) if comes_and_goes(strategy) else ())


def comes_and_goes(strategy: Strategy) -> bool:
    """Whether spot nodes are those of the trace."""
    return strategy.places is SpotPlaces.SPOT and strategy.baseline is None


def standing_nodes(prepared: Prepared, strategy: Strategy) -> list[Node]:
    """Nodes that are there from the start to the end."""
    cluster, pricing = prepared.file.cluster, prepared.pricing
    reserved, spot = cluster.reserved, cluster.spot
    both = strategy.trainers_roll_out(reserved.rolls_out)
    if strategy.baseline is not None:  # the undisturbed run that its model takes
        price = pricing.spot or PriceTag(0.0, "the trace's")
        return [
            _standing(f"spot:{n}", spot, price, trains=True, rolls_out=True)
            for n in range(prepared.file.spot_nodes(strategy))
        ]
    nodes: list[Node] = []
    if not strategy.is_all_spot:
        assert pricing.reserved is not None, "prepared for a strategy with reserved nodes"
        nodes += (
            _standing(f"reserved:{n}", reserved, pricing.reserved, trains=True, rolls_out=both)
            for n in range(reserved.nodes)
        )
    if strategy.places.stays:
        assert pricing.on_demand is not None, "prepared for a strategy that rents on demand"
        # Mixed GPU types would train at the pace of the slowest, so other types only denoise.
        trains = strategy.places is SpotPlaces.ON_DEMAND and spot.gpu_type == reserved.gpu_type
        nodes += (
            _standing(f"on-demand:{n}", spot, pricing.on_demand, trains=trains, rolls_out=True)
            for n in range(spot.nodes)
        )
    return nodes


def _standing(name: str, pool: Pool, tag: PriceTag, *, trains: bool, rolls_out: bool) -> Node:
    gpus, price = pool.gpus_per_node, tag.usd_gpu_h * pool.gpus_per_node
    return Node(NodeId(name), NodeKind.RESERVED, gpus, pool.gpu_type, price, trains, rolls_out)


def _exploration(
    file: ScenarioFile, strategy: Strategy, costs: ProfileCosts, gpu: str, ranks: int
) -> ExplorationConfig | None:
    if strategy.explore is None:
        return None
    section = file.exploration
    if section is None:
        remedy = "Add seeds_per_prompt and steps."
        raise ConfigError(
            file.name, [Problem("exploration", "nothing", f"a section, for {strategy.name}", remedy)]
        )
    shared = {name: getattr(section, name) for name in SeedChoiceConfig.model_fields}
    if section.planner is not None:
        planner = {name: getattr(section.planner, name) for name in BanditConfig.model_fields}
        shared["planner"] = PlannerConfig(**planner, costs=_preview_costs(file, costs, gpu, ranks))
    return _explores(where=strategy.explore, **shared)


def _preview_costs(file: ScenarioFile, costs: ProfileCosts, gpu: str, ranks: int) -> PreviewCostsConfig:
    size, learner = costs.lease_size(gpu, file.pixels, 1), costs.workload.learner_gpu
    updates = file.workload.updates_per_batch * costs.optimizer_s()
    publishes = costs.publish_s(file.workload.publishes)
    training_s = costs.train_s(learner, file.pixels, file.samples, ranks)
    return PreviewCostsConfig(
        step_s=costs.denoise_step_s(gpu, file.pixels, size, 1) / size,
        fixed_s=costs.decode_s(gpu, file.pixels, size) / size,
        reward_s=costs.reward_s(size),
        window_s=costs.prepare_s(file.samples, ranks) + training_s + updates + publishes,
    )


# -- what follows from durations -----------------------------------------------------------------------------


def _cluster_plan(prepared: Prepared, costs: ProfileCosts, gpus: tuple[str, ...]) -> ClusterPlan:
    """Time-outs scale with the step time, since a video step may take half a minute."""
    file = prepared.file
    cluster = file.cluster
    widest = max(cluster.reserved.gpus_per_node, cluster.spot.gpus_per_node)
    allowed = degrees(prepared.profile, gpus, file.pixels, widest)
    publishes = file.workload.publishes
    step_s = max(_step_s(costs, gpu, file.pixels) for gpu in gpus)
    decode_s = max(costs.decode_s(gpu, file.pixels, costs.lease_size(gpu, file.pixels, 1)) for gpu in gpus)
    pull_s = max(costs.pull_s(publishes, peer) for peer in (False, True))
    full_s = costs.worker_start_s() + costs.pull_s(WeightKind.FULL, False)
    return ClusterPlan(
        pixels=file.pixels,
        latent_frames=latent_frames(prepared.profile.frames),
        heads=round(prepared.profile.heads.value),
        degrees=allowed,
        answer_s=max(10.0, 3 * (step_s + decode_s), 3 * pull_s, 3 * costs.group_setup_s(allowed[-1])),
        start_s=max(600.0, 3 * full_s),
        drain_margin_s=max(10.0, 2 * step_s + decode_s),
        publishes=publishes,
    )


def degrees(profile: Profile, gpus: tuple[str, ...], pixels: int, widest: int) -> tuple[int, ...]:
    """SP degrees with figures on every GPU type, ascending. Raises :class:`ConfigError` if there is none."""
    timed = [set(sp_degrees(profile, gpu, pixels)) for gpu in gpus]
    known = sorted(degree for degree in set.intersection(*timed) if degree <= widest)
    if known:
        return tuple(known)
    key = f"gpus.{gpus[0]}.denoise"
    found, expected = f"no sp degree up to {widest} for {pixels} pixels", "one"
    remedy = "Add points of that size with their source, or choose another size or gpus_per_node."
    raise ConfigError(f"the profile {profile.name}", [Problem(key, found, expected, remedy)])


def _step_s(costs: ProfileCosts, gpu: str, pixels: int) -> float:
    return costs.denoise_step_s(gpu, pixels, costs.lease_size(gpu, pixels, 1), 1)


def _lease_s(costs: ProfileCosts, gpus: tuple[str, ...], file: ScenarioFile) -> float:
    test = file.workload.evaluation
    steps = max(file.workload.steps, test.steps if test else 0)
    return max(120.0, *(3 * steps * _step_s(costs, gpu, file.pixels) for gpu in gpus))
