"""Build the working parts from the configuration.

Configuration, model, prompt and reward errors are raised here, before a run directory is touched.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import torch

from spotlight.algorithms import Algorithm, build_algorithm
from spotlight.config.schema import RunConfig
from spotlight.data.datasets import Prompts as Prompts
from spotlight.data.datasets import load_held_out as load_held_out
from spotlight.data.datasets import load_prompts as load_prompts
from spotlight.data.datasets import read_prompts as read_prompts
from spotlight.data.media_size import media_size
from spotlight.data.section_names import under
from spotlight.diffusion.samplers import ODE, build_sampler
from spotlight.diffusion.schedule import AllSteps, RandomWindow, SdeWindow, SlidingWindow
from spotlight.models.condition import Condition
from spotlight.models.experts import denoisers
from spotlight.models.family import ModelFamily
from spotlight.models.kernels.attention import use_attention
from spotlight.models.kernels.cuda_graphs import capture_forwards
from spotlight.models.kernels.fused import use_fused
from spotlight.models.kernels.regional import compile_blocks
from spotlight.models.peft_layers import LoraSpec, check_targets, fuse
from spotlight.models.shared.transformer_files import weight_sources
from spotlight.models.slots import CopySlots, LoraSlots, Slot, WeightSlots
from spotlight.registry import FAMILIES
from spotlight.rollout.state import Recipe
from spotlight.runtime.assembly.controller_plan import cluster_plan_of as cluster_plan_of
from spotlight.runtime.assembly.controller_plan import plan_of as plan_of
from spotlight.runtime.assembly.preview_settings import preview_recipe
from spotlight.scheduler.seeds import derive_seed
from spotlight.scheduler.types import Purpose
from spotlight.testbed import lora_path, pipeline_directory
from spotlight.training.settings import adapter_type, autocast_type
from spotlight_files.lora_file import read_lora
from spotlight_files.model_errors import ModelError
from spotlight_rewards.base.errors import ConfigError, Problem
from spotlight_rewards.pool.gpu_placement import (
    VISIBLE,
    LocalGpus,
    cpu_environment,
    place_on_gpus,
    visible_names,
)
from spotlight_rewards.pool.reward_lane import ScorerStarter
from spotlight_rewards.pool.reward_pool import RewardPool
from spotlight_rewards.pool.reward_process import RewardProcess, Scorer
from spotlight_rewards.results import require_names
from spotlight_rewards.reward_config import RewardConfig
from spotlight_rewards.reward_registry import differentiable_names

if TYPE_CHECKING:
    from spotlight.rollout.engine import Engine

_COMPARED_MIN = 2


def pick_device(config: RunConfig) -> torch.device:
    """This process's device. Raises ConfigError if CUDA is requested but unavailable."""
    if config.device == "cpu" or (config.device == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    if not torch.cuda.is_available():
        problem = Problem("device", "'cuda'", "a visible CUDA device", "Set device=auto or device=cpu.")
        raise ConfigError("the configuration", [problem])
    return torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))


def load_family(
    config: RunConfig, device: torch.device, *, read_transformer: bool = True, deferred: bool = False
) -> ModelFamily:
    """Load the DiT and its companions; without ``read_transformer``, a peer sends its weights.

    Args:
        deferred: see :meth:`ModelFamily.load`.

    Raises:
        ModelError: it cannot be loaded.
    """
    model = config.model
    return FAMILIES.load(model.family).load(
        pipeline_directory(model.path),
        device=device,
        dtype=torch_dtype(model.dtype),
        revision=model.revision,
        embeddings_cache=config.cache / "embeddings",
        max_text_tokens=model.max_text_tokens,
        text_device=torch.device("cpu") if model.text_encoder == "cpu" else None,
        read_transformer=read_transformer,
        transformer=model.transformer,
        deferred=deferred,
        quantize=model.quantize,
    )


def torch_dtype(name: Literal["float32", "bfloat16"]) -> torch.dtype:
    """Of a configured type."""
    return {"float32": torch.float32, "bfloat16": torch.bfloat16}[name]


def make_window(config: RunConfig) -> SdeWindow | None:
    """The stochastic steps of train rollouts; None for the ODE."""
    window = config.rollout.sde_window
    if config.rollout.sampler == "ode":
        return None
    match window.kind:
        case "all":
            return AllSteps()
        case "random":
            shared = derive_seed(config.run_seed, "sde-window") if window.per == "iteration" else None
            return RandomWindow(window.size, window.low, window.high, shared)
        case "sliding":
            return SlidingWindow(
                window.size, window.every, low=window.low, high=window.high, decay=window.decay
            )


def make_algorithm(config: RunConfig) -> Algorithm:
    """The RL algorithm, with the sampler of train rollouts."""
    name = config.rollout.sampler
    sampler = build_sampler(name, 0.0 if name == "ode" else config.rollout.noise_level)
    return build_algorithm(config.algorithm, sampler)


def make_slots(config: RunConfig, family: ModelFamily, algorithm: Algorithm) -> WeightSlots:
    """The trained weights and their companions, on the kernels asked for.

    Raises:
        ModelError: targets, dtype, a compiler or an attention implementation.
    """
    if config.model.attention is not None:
        splits = config.fleet.sequence_parallel.degrees != (1,)
        use_attention(family.transformer, config.model.attention, family.device, splits_sequence=splits)
    fused = fuses(config, family.device) and use_fused(
        family.transformer, family.device, asked=config.model.kernels == "fused"
    )
    slots = _make_slots(config, family, algorithm)
    if fused:
        fuse(family.transformer)
    if config.model.compile == "regional":
        for module in slots.modules().values():
            compile_blocks(module, family.device)
    if config.model.cuda_graphs:
        capture_forwards(slots, family.device)
    return slots


def fuses(config: RunConfig, device: torch.device) -> bool:
    """Whether fused operators are to run, by ``model.kernels`` or its default."""
    model, learner = config.model, config.learner
    if model.kernels is not None:
        return model.kernels == "fused"
    mixed = model.dtype == "float32" and learner.autocast == "bfloat16"
    return device.type == "cuda" and model.compile == "none" and learner.mode == "lora" and not mixed


def _make_slots(config: RunConfig, family: ModelFamily, algorithm: Algorithm) -> WeightSlots:
    extra: list[Slot] = [*algorithm.extra_slots]
    if config.learner.ema is not None:
        extra.append("ema")
    if config.learner.mode == "full":
        return CopySlots(family.transformer, extra)
    lora = config.learner.lora
    spec = LoraSpec(
        rank=lora.rank,
        alpha=lora.alpha,
        targets=family.lora_targets if lora.targets is None else lora.targets,
        seed=derive_seed(config.run_seed, "lora"),
        init=lora.init,
    )
    with under("learner.lora"):
        check_targets(family.transformer, spec.targets)
    compute = adapter_type(config.learner, family.dtype)
    names = list(denoisers(family.transformer))
    files = weight_sources(family.files, names, config.model.transformer).reader()
    if config.model.lora is None:
        return LoraSlots(family.transformer, spec, extra, compute=compute, files=files)
    initial = read_lora(family.pipeline_class, lora_path(config.model.lora), names)
    if lora.rank != initial.rank:
        raise ModelError(
            f"learner.lora.rank is {lora.rank}; expected {initial.rank}, that of model.lora "
            f"({config.model.lora})"
        )
    layers = initial.with_alpha(lora.alpha).layers
    try:
        return LoraSlots(family.transformer, spec, extra, layers, compute=compute, files=files)
    except ModelError as error:
        raise ModelError(f"model.lora={config.model.lora}: {error}") from error


def make_recipes(config: RunConfig, algorithm: Algorithm) -> dict[Purpose, Recipe]:
    """How rollouts of each purpose are denoised.

    Train rollouts and their previews use the algorithm's sampler; evaluation uses the ODE.
    """
    rollout = config.rollout
    size, scale, embedded = media_size(rollout), rollout.true_cfg_scale, embedded_guidance(config)
    train = Recipe(
        size,
        algorithm.sampler,
        make_window(config),
        scale,
        algorithm.keeps,
        embedded,
        group_noise=config.run_seed if rollout.initial_noise == "group" else None,
        schedule_steps=rollout.steps if algorithm.keeps == "query" else None,
    )
    judged = Recipe(size, ODE(), None, scale, "final", embedded)
    return {Purpose.TRAIN: train, Purpose.EXPLORE: preview_recipe(config, train), Purpose.EVAL: judged}


def embedded_guidance(config: RunConfig) -> float | None:
    """The input of a guidance-distilled model; None for others."""
    configured = config.rollout.embedded_guidance
    return FAMILIES.load(config.model.family).embedded_guidance if configured is None else configured


def make_reward_pool(
    config: RunConfig,
    *,
    merges: bool = False,
    starter: ScorerStarter | None = None,
    run_directory: Path | None = None,
) -> RewardPool:
    """Start the reward processes; arguments as of :class:`RewardPool`.

    Args:
        run_directory: passed to rewards, unless ``starter`` is given; default: where training makes it.

    Raises:
        RewardSetupError: a reward cannot be loaded.
        ConfigError: a reward compares groups, which this run does not score whole, or which are of one; or
            has no gradient where the algorithm needs it.
    """
    policy = config.reward_policy
    require_names(config.rewards)
    starter = local_starter(config, run_directory) if starter is None else starter
    pool = RewardPool(
        config.rewards,
        policy.workers,
        start_deadline_s=policy.start_deadline_s,
        merges=merges,
        starter=starter,
    )
    problems = [
        *_group_problems(config, pool.compares_groups),
        *_gradient_problems(config, pool.without_gradient, pool.compares_groups),
    ]
    if problems:
        pool.close()
        raise ConfigError("the configuration", problems)
    return pool


def _group_problems(config: RunConfig, comparing: Sequence[str]) -> Iterator[Problem]:
    """Of the rewards that compare the samples of a group, by curve."""
    evaluation, alone = config.evaluation, {each.curve for each in config.rewards if each.scores_one}
    names = " and ".join(map(repr, comparing))
    two = " and ".join(repr(curve) for curve in comparing if curve not in alone)
    if comparing and config.exploration is not None:
        yield Problem(
            "rewards", f"{names}, which compares the samples of a group, with exploration",
            "rewards that score each sample by itself",
            "Leave out exploration: its previews are scored one by one, as they come.",
        )  # fmt: skip
    if two and evaluation.count(config.iterations) and evaluation.images_per_prompt < _COMPARED_MIN:
        yield Problem(
            "evaluation.images_per_prompt", str(evaluation.images_per_prompt), f"at least {_COMPARED_MIN}",
            f"Raise it: {two} compares the pictures of a prompt.",
        )  # fmt: skip


def _gradient_problems(
    config: RunConfig, without: Sequence[str], comparing: Sequence[str]
) -> Iterator[Problem]:
    """Of the rewards that weigh in and cannot be differentiated, and of those that compare, by curve."""
    if not config.algorithm.needs_gradients:
        return
    if comparing:
        yield Problem(
            "rewards", f"{' and '.join(map(repr, comparing))}, which compares the samples of a group",
            f"rewards that score each sample by itself, with algorithm.name={config.algorithm.name}",
            "A gradient is made where its sample is: leave it out.",
        )  # fmt: skip
    if without:
        yield Problem(
            "rewards", " and ".join(map(repr, without)),
            f"rewards with a gradient, with algorithm.name={config.algorithm.name}: "
            f"{', '.join(differentiable_names())}, or a class with `gradient`",
            "Give others a weight of 0, to watch them, or take an algorithm for any reward.",
        )  # fmt: skip


def run_directory_of(config: RunConfig) -> Path:
    """Where the run's directory is or will be, absolute: processes elsewhere have other current ones."""
    return Path.cwd() / config.runs_dir / config.name


def local_starter(config: RunConfig, run_directory: Path | None = None) -> ScorerStarter:
    """Starts reward processes on this machine, each with its GPU. Raises ConfigError if there are too few."""
    directory = str(run_directory_of(config) if run_directory is None else run_directory.absolute())
    ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    count = torch.cuda.device_count()
    gpus = LocalGpus(
        visible_names(os.environ, count),
        int(os.environ.get("LOCAL_RANK", "0")),
        ranks,
        trained_on=config.device != "cpu" and count > 0,
    )
    placed = place_on_gpus(config.rewards, config.reward_policy.workers or 1, gpus)

    def start(reward: RewardConfig, start_deadline_s: float, replica: int, replicas: int) -> Scorer:
        # A trainer without a GPU has none to share.
        on_cpu = reward.device == "cpu" or (reward.device == "learner" and not gpus.trained_on)
        environment = cpu_environment(replicas) if on_cpu else {}
        gpu = placed.get((reward.curve, replica), gpus.of_rank if reward.device == "auto" else None)
        if gpu is not None:
            environment = {VISIBLE: gpu}
        return RewardProcess(reward, start_deadline_s, replica, replicas, environment, directory)

    return start


def make_engine(config: RunConfig, family: ModelFamily, negative: Condition) -> Engine:
    """This process's denoising engine."""
    from spotlight.rollout.engine import Engine

    return Engine(
        family,
        max_batch=config.rollout.batch_size,
        negative=negative,
        autocast=autocast_type(config.learner, family.dtype),
    )
