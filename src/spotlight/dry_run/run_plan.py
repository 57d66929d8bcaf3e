"""What a run will do and need, from its configuration alone, for ``spotlight train --dry-run``.

Nothing is loaded: sizes come from headers (``model_plan.py``), counts from arithmetic. Imports no torch.
"""

from __future__ import annotations

import os
from dataclasses import dataclass

from spotlight.config.schema import RunConfig
from spotlight.data.datasets import Prompts, load_prompts
from spotlight.dry_run.fitting import Needs
from spotlight.dry_run.fitting_sizes import FittingSize, fitting_sizes
from spotlight.dry_run.memory_plan import Estimate, disk_parts, host_parts, stored_parts
from spotlight.dry_run.model_checks import require_model, require_prompts
from spotlight.dry_run.model_plan import (
    ModelSizes,
    NotHere,
    TransformerSizes,
    adapted_layers,
    family_of,
    lora_parameters,
    read_sizes,
)
from spotlight.dry_run.reward_plan import RewardPlace, require_rewards, require_scorable, reward_places
from spotlight.store.checkpoints import CheckpointStore
from spotlight.store.manifest import CheckpointHeader
from spotlight.store.run_directory import RunPaths
from spotlight_files.model_errors import ModelError
from spotlight_rewards.base.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Passes:
    """DiT passes per iteration (``evaluation``: per evaluation).

    Attributes:
        rollout: forwards of denoising.
        previews: upper bound without spare prompts; those with ``exploration.step_cache`` count in full.
        policy: forwards of the trained weights, with a graph.
        backward: each costs about two forwards.
        recomputed: forwards repeated by ``learner.recompute``; with ``auto`` at most.
        old: of the old policy (GRPO-Guard: after a batch's first update).
        reference: forwards of the starting model.
        old_log_probs: for the ratio's denominator after a batch's first update.
    """

    rollout: int
    previews: int
    policy: int
    backward: int
    recomputed: int
    old: int
    reference: int
    old_log_probs: int
    evaluation: int

    @property
    def forwards(self) -> int:
        """All forwards of an iteration except evaluation."""
        made = self.rollout + self.previews
        return made + self.policy + self.recomputed + self.old + self.reference + self.old_log_probs


@dataclass(frozen=True, slots=True)
class RunPlan:
    """What a run will do and need.

    Attributes:
        samples, trained_samples: generated and trained per iteration if none is dropped.
        trained_timesteps: forward/backward passes per sample.
        guidance: forwards per velocity: 2 with true classifier-free guidance.
        optimizer_steps, evaluations: of the whole run.
        evaluation_images: per evaluation.
        train_prompts: after ``data.tags``.
        notes: warnings about ranks, settings and prompts.
        model: sizes, or why they are unknown; then ``parameters_trained`` is None, ``memory`` and ``fitting``
            are empty, and ``disk`` lacks checkpoints.
        needs: what its memory depends on; None: the model's sizes are unknown.
        trained: iterations that are in a checkpoint of this run already.
    """

    samples: int
    trained_samples: int
    trained_timesteps: int
    guidance: int
    passes: Passes
    optimizer_steps: int
    evaluations: int
    evaluation_images: int
    train_prompts: int
    test_prompts: int
    notes: tuple[str, ...]
    model: ModelSizes | NotHere
    memory: tuple[Estimate, ...]
    fitting: tuple[FittingSize, ...]
    needs: Needs | None
    disk: tuple[Estimate, ...]
    rewards: tuple[RewardPlace, ...]
    trained: int

    @property
    def parameters_trained(self) -> int | None:
        return None if self.needs is None else self.needs.trained


def make_plan(config: RunConfig, ranks: int | None = None) -> RunPlan:
    """Plan a run; ``ranks`` as for :func:`rank_notes`.

    Raises:
        ConfigError: unset or unreadable prompt file, too few held-out prompts; see :func:`rank_notes`.
        PromptFileError: missing or malformed prompts.
        RewardSetupError, RewardInputError: see :func:`require_rewards` and :func:`require_scorable`.
        ModelError: unusable model directory, LoRA target without match; see :func:`require_supported`.
    """
    notes = rank_notes(config, ranks)
    require_rewards(config)
    require_model(config)
    prompts = load_prompts(config)
    require_prompts(config, prompts)
    require_scorable(config, prompts)
    model = read_sizes(config)
    images = len(prompts.test) * config.evaluation.images_per_prompt
    evaluations = config.evaluation.count(config.iterations)
    rewards = reward_places(config)
    needs = None if isinstance(model, NotHere) else _needs(config, model, prompts, rewards)
    return RunPlan(
        samples=config.rollout.prompts_per_iteration * config.rollout.group_size,
        trained_samples=config.trained_samples,
        trained_timesteps=config.trained_timesteps,
        guidance=forwards_per_velocity(config),
        passes=count_passes(config, images),
        optimizer_steps=config.iterations * config.learner.updates_per_batch,
        evaluations=evaluations,
        evaluation_images=images,
        train_prompts=len(prompts.train),
        test_prompts=len(prompts.test),
        notes=(*notes, *config.every_note(), *prompts.notes(config)),
        model=model,
        memory=() if needs is None else _memory(config, needs, prompts, images if evaluations else 0),
        fitting=() if needs is None else fitting_sizes(config, needs),
        needs=needs,
        disk=(
            *disk_parts(config, None if needs is None else needs.trained, evaluations, images),
            *stored_parts(config, model, stored_tokens(config, prompts)),
        ),
        rewards=rewards,
        trained=newest.iteration if (newest := newest_checkpoint(config)) else 0,
    )


def newest_checkpoint(config: RunConfig) -> CheckpointHeader | None:
    """Where the run goes on, unless a file of its newest checkpoint is damaged; None: at the beginning."""
    checkpoints = RunPaths(config.runs_dir / config.name).checkpoints
    return CheckpointStore(checkpoints, 1).newest_header() if checkpoints.is_dir() else None


def _memory(config: RunConfig, needs: Needs, prompts: Prompts, evaluated: int) -> tuple[Estimate, ...]:
    everyone = len(prompts.train) + len(prompts.test)
    held = host_parts(config, needs.model, needs.text_tokens, prompts=everyone, evaluated=evaluated)
    return (*needs.parts(config), *held)


def needs_of(config: RunConfig) -> Needs:
    """For ``--fit``. Raises as :func:`make_plan`, and ModelError if the model's sizes are not known here."""
    require_rewards(config)
    require_model(config)
    prompts, model = load_prompts(config), read_sizes(config)
    if isinstance(model, NotHere):
        raise ModelError(
            f"--fit with model.path={config.model.path}, which is not here, so its sizes are unknown: "
            f"{model.remedy}"
        )
    return _needs(config, model, prompts, reward_places(config))


def _needs(config: RunConfig, model: ModelSizes, prompts: Prompts, rewards: tuple[RewardPlace, ...]) -> Needs:
    return Needs(model, parameters_trained(config, model), text_tokens(config, prompts), rewards)


def rank_notes(config: RunConfig, ranks: int | None) -> list[str]:
    """What does not fit one process, though it may fit several.

    Args:
        ranks: processes that share the work without Ray; None: as many as torchrun has started, if it has.

    Raises:
        ConfigError: the ranks are chosen, and the configuration does not fit them.
    """
    chosen = ranks or int(os.environ.get("WORLD_SIZE", "0"))
    problems = list(config.rank_problems(chosen or 1, ())) if config.fleet.driver == "inline" else []
    if problems and chosen:
        raise ConfigError(f"this configuration on {chosen} ranks", problems)
    return [f"In one process: {each} Other numbers of --ranks may do." for each in problems]


def forwards_per_velocity(config: RunConfig) -> int:
    """1, or 2 with true classifier-free guidance."""
    return 2 if config.rollout.true_cfg_scale > 1 else 1


def count_passes(config: RunConfig, evaluation_images: int) -> Passes:
    """Passes per iteration: samples x steps (or trained timesteps) x forwards per velocity."""
    algorithm, guidance = config.algorithm, forwards_per_velocity(config)
    samples = config.rollout.prompts_per_iteration * config.rollout.group_size * guidance
    trained = config.trained_samples * guidance * config.trained_timesteps
    updates = config.learner.updates_per_batch  # divides the samples
    later = trained - trained // updates
    return Passes(
        rollout=0 if algorithm.trains_on_stored else samples * algorithm.stops_at(config.rollout.steps),
        previews=_preview_passes(config),
        policy=trained,
        backward=trained,
        recomputed=_recomputed(config, trained),
        # At a query the rollout itself tells the old policy's prediction.
        old=(later if algorithm.old_policy_starts_batch else trained)
        if algorithm.uses_old_policy and not algorithm.needs_gradients
        else 0,
        reference=trained if algorithm.uses_reference else 0,
        old_log_probs=later if algorithm.recomputes_log_probs else 0,
        evaluation=evaluation_images * config.evaluation.steps * guidance,
    )


def _recomputed(config: RunConfig, trained: int) -> int:
    every = config.learner.recompute
    return trained // every if isinstance(every, int) else trained * (every in ("blocks", "auto"))


def _preview_passes(config: RunConfig) -> int:
    if (exploration := config.exploration) is None:
        return 0
    seeds, steps = exploration.arms(config.rollout.group_size, config.rollout.steps)
    scale = config.rollout.true_cfg_scale if exploration.guidance is None else exploration.guidance
    forwards = config.rollout.prompts_per_iteration * max(seeds) * max(steps)
    return forwards * (2 if scale > 1 else 1)


def text_tokens(config: RunConfig, prompts: Prompts) -> int:
    """Estimated tokens of the longest prompt, and of the most reference pictures."""
    every, family = (*prompts.train, *prompts.test), family_of(config)
    words = max(len(prompt.text.split()) for prompt in every)
    shown = max(len(prompt.references) for prompt in every)
    text = family.planned_text_tokens(words, config.model.max_text_tokens)
    return text + shown * family.reference_tokens


def stored_tokens(config: RunConfig, prompts: Prompts) -> int:
    """Estimated tokens of all prompts that the run uses; of reference pictures there are more."""
    family, most = family_of(config), config.model.max_text_tokens
    train, test = (
        sum(family.planned_text_tokens(len(prompt.text.split()), most) for prompt in some)
        for some in (prompts.train, prompts.test)
    )
    spare = config.exploration.spare_prompts if config.exploration else 0
    drawn = config.iterations * (config.rollout.prompts_per_iteration + spare)
    return round(train * min(1.0, drawn / len(prompts.train))) + test


def parameters_trained(config: RunConfig, model: TransformerSizes) -> int:
    """Parameters that the optimizer updates. Raises ModelError if a LoRA target matches nothing."""
    if config.learner.mode == "full":
        return model.parameters
    return lora_parameters(adapted_layers(config, model), config.learner.lora.rank)
