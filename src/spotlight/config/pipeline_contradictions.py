"""Settings of the pipeline that contradict each other, or what is trained."""

from __future__ import annotations

import math
from collections.abc import Iterator

from spotlight.config.errors import Problem
from spotlight.config.fleet_contradictions import nobody_only_rolls_out
from spotlight.config.schema import FlowGRPOConfig, RunConfig

_SLICE_MIN = 3
"""Of the first slice's samples, each is compared with the mean and the spread of two others."""


def pipeline_problems(config: RunConfig) -> Iterator[Problem]:
    """Every contradiction of ``pipeline``."""
    yield from _parts(config)
    yield from _baseline(config)
    yield from _trainers(config)
    yield from _early(config)


def _parts(config: RunConfig) -> Iterator[Problem]:
    """What cannot be trained before all of it is there."""
    pipeline, group = config.pipeline, config.rollout.group_size
    if pipeline.axis == "none":
        return
    if config.algorithm.advantage.std == "global":
        yield Problem(
            "algorithm.advantage.std", "'global'",
            f"'group' with pipeline.axis={pipeline.axis} and baseline={pipeline.baseline}",
            "The spread of the whole batch is known only when all of it is there: set "
            "algorithm.advantage.std=group, or pipeline.axis=none.",
        )  # fmt: skip
    ranks, learner, rollout = config.fleet.learner_ranks, config.learner, config.rollout
    share = rollout.prompts_per_iteration * group // learner.updates_per_batch // ranks
    if learner.micro_batch_size >= share:
        yield Problem(
            "learner.micro_batch_size", str(learner.micro_batch_size),
            f"less than the {share} samples that a rank trains in an update, with pipeline.axis="
            f"{pipeline.axis}",
            "What is trained at once must be there at once, and this is all: lower it, or set "
            "pipeline.axis=none.",
        )  # fmt: skip
    if pipeline.axis == "generation" and pipeline.slice_size >= group:
        yield Problem(
            "pipeline.slice_size", str(pipeline.slice_size), f"less than rollout.group_size = {group}",
            "A slice is a part of a group: lower it, or set pipeline.axis=prompt for whole groups.",
        )  # fmt: skip


def _baseline(config: RunConfig) -> Iterator[Problem]:
    """What rewards of a slice can be compared with."""
    pipeline, exploration = config.pipeline, config.exploration
    if pipeline.baseline == "group":
        return
    if pipeline.axis != "generation":
        yield Problem(
            "pipeline.baseline", repr(pipeline.baseline), f"'group' with pipeline.axis={pipeline.axis}",
            "Only slices of groups need another baseline: set pipeline.axis=generation, or leave it out.",
        )  # fmt: skip
        return
    if exploration is not None and exploration.undo_selection:
        yield Problem(
            "exploration.undo_selection", "true", f"false with pipeline.baseline={pipeline.baseline}",
            "Weights of samples need their whole group: set pipeline.axis=prompt and baseline=group, or "
            "leave it out.",
        )  # fmt: skip
    if pipeline.baseline == "slice" and pipeline.slice_size < _SLICE_MIN:
        yield Problem(
            "pipeline.slice_size", str(pipeline.slice_size),
            f"at least {_SLICE_MIN} with pipeline.baseline=slice",
            "A sample of the first slice is compared with the mean and spread of the others in it: raise it.",
        )  # fmt: skip
    if pipeline.baseline == "exploration" and exploration is None:
        yield Problem(
            "pipeline.baseline", "'exploration'", "'group' or 'slice' without exploration",
            "No seeds are explored to compare with: set exploration={}, or pipeline.baseline=slice.",
        )  # fmt: skip


def _trainers(config: RunConfig) -> Iterator[Problem]:
    pipeline = config.pipeline
    if pipeline.trainers_generate and config.fleet.driver == "inline":
        yield Problem(
            "pipeline.trainers_generate", "true", "false with fleet.driver=inline",
            "One process trains and denoises in turn already: set fleet.driver=ray, or leave it out.",
        )  # fmt: skip
    learner = config.learner
    measures = learner.timesteps_per_pass == "auto" and learner.pass_memory_gib is None
    if pipeline.trainers_generate and measures:
        yield Problem(
            "learner.pass_memory_gib", "null",
            "a number with pipeline.trainers_generate and learner.timesteps_per_pass=auto",
            "A worker has memory of the same GPU, and later more than when a pass is measured: set what "
            "passes may take, or learner.timesteps_per_pass to a number.",
        )  # fmt: skip
    if pipeline.switch_s and not pipeline.trainers_generate:
        yield Problem(
            "pipeline.switch_s", f"{pipeline.switch_s:g}", "0 with pipeline.trainers_generate=false",
            "Nobody switches: set pipeline.trainers_generate=true, or leave it out.",
        )  # fmt: skip


def _early(config: RunConfig) -> Iterator[Problem]:
    """Rollouts of the next iteration, one version stale."""
    pipeline, algorithm = config.pipeline, config.algorithm
    if not pipeline.next_share:
        return
    share = f"{pipeline.next_share:g}"
    if config.fleet.driver == "inline":
        yield Problem(
            "pipeline.next_share", share, "0 with fleet.driver=inline",
            "One process trains and denoises in turn, so nothing idles meanwhile: set fleet.driver=ray, or "
            "leave it out.",
        )  # fmt: skip
    elif nobody_only_rolls_out(config.fleet):
        yield Problem(
            "pipeline.next_share", share, "0 where all slots train",
            "The learner's slots make nothing for the next iteration: set fleet.local.rollout_slots or "
            "fleet.spot.nodes to at least 1, name a fleet.spot.trace, or leave it out.",
        )  # fmt: skip
    if pipeline.next_share * config.rollout.prompts_per_iteration < 1 - 1e-9:
        yield Problem(
            "pipeline.next_share", share,
            f"at least {math.ceil(1e4 / config.rollout.prompts_per_iteration) / 1e4:g}, one of "
            f"{config.rollout.prompts_per_iteration} groups",
            "This is no whole group: raise it, or set 0.",
        )  # fmt: skip
    if config.exploration is not None and config.exploration.where == "critical_path":
        yield Problem(
            "pipeline.next_share", share, "0 with exploration.where=critical_path",
            "Seeds that are explored first cannot be rolled out early: set exploration.where=idle, or "
            "leave one of the two out.",
        )  # fmt: skip
    elif config.exploration is not None and pipeline.next_share == 1:
        yield Problem(
            "pipeline.next_share", share, "less than 1 with exploration",
            "Groups that start early keep seeds that nobody explored, and these would be all: lower it, or "
            "leave exploration out.",
        )  # fmt: skip
    if algorithm.learns_from_clean_samples:
        return
    if not isinstance(algorithm, FlowGRPOConfig):
        yield Problem(
            "pipeline.next_share", share, f"0 with algorithm.name={algorithm.name}",
            "Its ratio is to the policy that starts the batch, not to the one that made a sample: take "
            "flow-grpo with algorithm.old_log_probs=rollout, or leave it out.",
        )  # fmt: skip
    elif algorithm.old_log_probs != "rollout":
        yield Problem(
            "algorithm.old_log_probs", repr(algorithm.old_log_probs),
            f"'rollout' with pipeline.next_share={share}",
            "Stale samples are weighted by the policy that made them, whose log-probs only the rollout has: "
            "set it, or pipeline.next_share=0.",
        )  # fmt: skip
