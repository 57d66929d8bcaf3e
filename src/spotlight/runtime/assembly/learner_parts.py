"""Assemble a learner rank from the configuration, for the inline driver and Ray.

Call :func:`prepare_model`, any checks due before long work, :func:`fill_embeddings`, :func:`assemble`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch

from spotlight.algorithms import Algorithm
from spotlight.config.schema import RunConfig
from spotlight.data.media_size import media_size
from spotlight.dry_run.memory_plan import EMBEDDINGS_BYTES
from spotlight.dry_run.model_checks import require_model, require_supported
from spotlight.models.condition import Condition
from spotlight.models.family import ModelFamily
from spotlight.models.slots import Slot, WeightSlots
from spotlight.rollout.state import Recipe
from spotlight.runtime.assembly import components as build
from spotlight.scheduler.types import Purpose
from spotlight.training.batching.conditions import Conditions
from spotlight.training.batching.feed import BatchFeed
from spotlight.training.learner import Learner, TrainingGuidance
from spotlight.training.sharding import Ranks, is_shared
from spotlight_rewards.base.errors import ConfigError, Problem
from spotlight_rewards.base.prompts import Prompt


@dataclass(frozen=True, slots=True)
class Model:
    """A loaded model checked against the configuration, with its recipes."""

    family: ModelFamily
    algorithm: Algorithm
    recipes: Mapping[Purpose, Recipe]


@dataclass(frozen=True, slots=True)
class Learning:
    """The parts of one learner rank.

    Attributes:
        negative: embedding of the negative prompt.
    """

    model: Model
    slots: WeightSlots
    conditions: Conditions
    negative: Condition
    learner: Learner
    feed: BatchFeed


def prepare_model(config: RunConfig, device: torch.device, held: ModelFamily | None = None) -> Model:
    """Load the model, and check that it can do what the configuration asks for.

    The DiT's weights are read by :func:`assemble`: the text encoder is freed before, and memory need not
    hold both.

    Args:
        held: the model on ``device``, loaded before for the same configuration: it is not loaded again.

    Raises:
        ModelError: it cannot be loaded, or see :func:`require_supported`, or does not support a number of
            steps.
        ConfigError: see :func:`require_supported`; sequence parallelism or preview shortcuts unsupported by
            model or device.
    """
    require_model(config)
    size = media_size(config.rollout)
    family = build.load_family(config, device, deferred=True) if held is None else held
    require_supported(config, family.files)  # again: a model that had to be downloaded was not known yet
    for steps in {config.rollout.steps, config.evaluation.steps, *config.preview_steps}:
        family.sigmas(steps, size)  # raises if the schedule does not support this number of steps
    _require_degrees(config, family)
    _require_shortcuts(config, family)
    algorithm = build.make_algorithm(config)
    return Model(family, algorithm, build.make_recipes(config, algorithm))


def fill_embeddings(config: RunConfig, model: Model, prompts: Iterable[Prompt], ranks: Ranks) -> Conditions:
    """Embeddings of ``prompts`` and the negative prompt, all cached. Collective: every rank must call it."""
    kept = EMBEDDINGS_BYTES // ranks.on_this_node
    negative, size = config.rollout.negative_prompt, media_size(config.rollout)
    conditions = Conditions(model.family, prompts, negative, size, kept_bytes=kept)
    conditions.prefill(ranks)
    return conditions


def assemble(config: RunConfig, model: Model, conditions: Conditions, ranks: Ranks) -> Learning:
    """Read the DiT and build the learner around it. Collective: shards the model over several ranks.

    Raises:
        ModelError: the model lacks what the learner needs, or its weights cannot be read.
    """
    family, algorithm = model.family, model.algorithm
    (negative,) = family.encode([config.rollout.negative_prompt])
    family.free_text_encoder()
    if family.deferred and not is_shared(ranks, config.learner.shard):
        family.read_weights([family.transformer])
    slots = build.make_slots(config, family, algorithm)
    scale = config.rollout.true_cfg_scale
    learner = Learner(
        family,
        slots,
        algorithm,
        config.learner,
        size=media_size(config.rollout),
        guidance=TrainingGuidance(scale, negative, build.embedded_guidance(config)),
        ranks=ranks,
    )
    weights = {reward.curve: reward.weight for reward in config.rewards}
    feed = BatchFeed(learner, conditions, model.recipes[Purpose.TRAIN], weights)
    return Learning(model, slots, conditions, negative, learner, feed)


def rollout_slots(config: RunConfig, algorithm: Algorithm) -> tuple[Slot, ...]:
    """The slots that rollouts use: the behaviour policy's first, then the evaluated weights'."""
    return tuple(dict.fromkeys((algorithm.rollout_slot, config.evaluation.weights)))


def published_slots(config: RunConfig, algorithm: Algorithm, iteration: int) -> tuple[Slot, ...]:
    """Those that workers need of the weights before ``iteration``: evaluated ones where that is due."""
    behaviour, *judged = rollout_slots(config, algorithm)
    return (behaviour, *(judged if config.evaluation.is_due(iteration, config.iterations) else ()))


def _require_degrees(config: RunConfig, family: ModelFamily) -> None:
    asked = config.fleet.sequence_parallel
    degrees = asked.degrees
    if degrees == (1,):
        return
    from spotlight.rollout.sequence_parallel.ulysses import SequenceParallel, SequenceParallelError

    try:
        parallel = SequenceParallel([family.transformer], guidance=asked.guidance)
        for degree in degrees:
            parallel.check(degree)
    except SequenceParallelError as error:
        problem = Problem(
            "fleet.sequence_parallel.degrees", str(list(degrees)), "degrees that suit the model", str(error)
        )
        raise ConfigError("the configuration", [problem]) from error


def _require_shortcuts(config: RunConfig, family: ModelFamily) -> None:
    if (exploration := config.exploration) is None:
        return
    problems: list[Problem] = []
    if exploration.step_cache is not None:
        from spotlight.rollout import step_cache

        try:
            step_cache.require(family.transformer)
        except step_cache.StepCacheError as error:
            problems.append(exploration.step_cache_problem(config.model.path, str(error)))
    cuda = family.device.type == "cuda"
    if exploration.dtype is not None and cuda and not torch.cuda.is_bf16_supported(including_emulation=False):
        name = torch.cuda.get_device_name(family.device)
        problems.append(Problem(
            "exploration.dtype", f"'{exploration.dtype}'", f"a type that {name} computes in",
            "It would be emulated, and slower than float32: leave it out.",
        ))  # fmt: skip
    if problems:
        raise ConfigError("the configuration", problems)
