"""The controller's plan, from the configuration. No torch, unless an added video family is looked up."""

from __future__ import annotations

import dataclasses
import math

from spotlight.config.schema import RunConfig
from spotlight.registry import FAMILIES
from spotlight.scheduler.plan import ClusterPlan, FleetSettings, Plan, TrainingChoice, latent_frames
from spotlight.scheduler.types import WeightKind

FRAMES_PER_LATENT = {"hunyuan-video": 4, "hunyuan-video-1.5": 4, "wan": 4, "wan-i2v": 4}
"""``usual_frames_per_latent`` of the shipped families of videos, whose modules need torch."""


def plan_of(config: RunConfig, ranks: int = 1, *, compares: bool = False) -> Plan:
    """The controller's plan; ``compares``: some reward compares the samples of a group."""
    policy, explores, pipeline = config.reward_policy, config.exploration, config.pipeline
    return Plan(
        run_seed=config.run_seed,
        iterations=config.iterations,
        prompts_per_iteration=config.rollout.prompts_per_iteration,
        group_size=config.rollout.group_size,
        rollout_steps=config.algorithm.stops_at(config.rollout.steps),
        evaluation=config.evaluation,
        updates_per_batch=config.learner.updates_per_batch,
        micro_batch_size=config.learner.micro_batch_size * ranks,
        checkpoint_every=config.checkpoint.every,
        # One process cannot outlive its own worker, so no reply of the inline driver is ever lost.
        lease_s=math.inf,
        cluster=ClusterPlan(answer_s=math.inf, start_s=math.inf),
        max_drop_share=policy.max_drop_share if policy.on_failure == "drop" else None,
        ranks=ranks,
        exploration=explores,
        keeps_previews=explores is not None and explores.makes_rollouts(config.rollout.true_cfg_scale),
        pipeline=pipeline,
        # Alone, the GPUs of a learner that also makes all rollouts have nothing to decide.
        bounded=pipeline.trainers_generate or pipeline.trains_parts,
        update_split=config.learner.update_split,
        whole_groups=config.algorithm.compares_groups,
        compares=compares,
        added=config.policies,
        choice=TrainingChoice(
            samples=config.algorithm.train_samples,
            policy=config.algorithm.train_policy,
            over=config.algorithm.advantage.over,
            silent_groups=config.algorithm.silent_groups,
        ),
    )


def cluster_plan_of(config: RunConfig, *, compares: bool = False) -> Plan:
    """As :func:`plan_of`, for a cluster: worker groups and timeouts included."""
    fleet = config.fleet
    degrees = fleet.sequence_parallel.degrees
    cluster = ClusterPlan(
        pixels=config.rollout.height * config.rollout.width,
        latent_frames=_latent_frames(config),
        sp_pays_from_pixels=fleet.sequence_parallel.pays_from_pixels,
        # Divisibility of the model's heads by the degrees is checked when the learner loads the model.
        heads=math.lcm(*degrees),
        degrees=degrees,
        answer_s=fleet.answer_s,
        start_s=fleet.start_s,
        drain_margin_s=fleet.drain_margin_s,
        publishes=WeightKind.ADAPTER if config.learner.mode == "lora" else WeightKind.FULL,
        learner_moves=fleet.learner_moves,
        learner_ranks_min=fleet.learner_ranks_min,
    )
    plan = plan_of(config, fleet.learner_ranks, compares=compares)
    every = 1 if cluster.learner_moves else plan.checkpoint_every
    return dataclasses.replace(
        plan, checkpoint_every=every, lease_s=fleet.lease_s, cluster=cluster, fleet=_fleet_plan_of(config)
    )


def _fleet_plan_of(config: RunConfig) -> FleetSettings:
    fleet = config.fleet
    return FleetSettings(
        ranks_roll_out=config.pipeline.trainers_generate,
        even_ranks=config.learner.shard == "node",
        grows_after_s=fleet.learner_grows_after_s,
        on_demand=fleet.on_demand if fleet.learner_placement == "spot_then_on_demand" else None,
        target=fleet.target if fleet.target.is_set else None,
        spot_gpus=fleet.spot.slots,
        spot_usd_h=fleet.spot.slots * fleet.spot.price_usd_h,
        move_s=fleet.start_s + fleet.learner_s,
        drain_s=fleet.lease_s,
    )


def _latent_frames(config: RunConfig) -> int:
    if config.rollout.frames == 1:
        return 1
    family = config.model.family
    per_latent = FRAMES_PER_LATENT.get(family) or FAMILIES.load(family).usual_frames_per_latent
    return latent_frames(config.rollout.frames, per_latent)
