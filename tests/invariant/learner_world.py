"""A tiny real world for the learner's tests: a Qwen-Image DiT, real rollouts, made-up rewards."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from spotlight.algorithms import Algorithm, build_algorithm
from spotlight.algorithms.advantages import advantages
from spotlight.algorithms.base import Slot
from spotlight.config.sections.algorithm import AdvantageConfig
from spotlight.config.sections.learner_section import EmaConfig, LearnerConfig
from spotlight.diffusion.samplers import CPS, ODE, FlowSDE
from spotlight.diffusion.schedule import AllSteps, RandomWindow, SdeWindow
from spotlight.models.condition import Condition, ModelInput
from spotlight.models.families.qwen_image import QwenImage
from spotlight.models.family import ModelFamily
from spotlight.models.media import MediaSize
from spotlight.models.peft_layers import LoraSpec
from spotlight.models.slots import CopySlots, LoraSlots, WeightSlots
from spotlight.registry import ALGORITHMS
from spotlight.rollout.engine import Engine
from spotlight.rollout.state import FinishedRollout, Recipe
from spotlight.scheduler.types import PolicyVersion, Purpose, Rollout, RolloutId
from spotlight.training.learner import Learner, TrainingGuidance, TrainingSample
from spotlight.training.recompute import is_saved
from spotlight.training.settings import adapter_type
from spotlight.training.sharding import Ranks
from spotlight.training.step_metrics import UpdateSums
from spotlight_rewards.base.prompts import PromptId

SIZE = MediaSize(16, 16)
STEPS = 4
PROMPTS = ("a photo of a red circle", "a blue square left of a green triangle", "two yellow circles")
GROUP = 2
WEIGHTS = {"quality": 1.0}
LORA = LoraSpec(rank=4, alpha=8.0, targets=QwenImage.lora_targets, seed=3)


class FamilyWorld:
    """A model and its embeddings."""

    def __init__(
        self,
        family: ModelFamily,
        size: MediaSize,
        inputs: Callable[[Sequence[str]], Sequence[ModelInput]] = list,
    ) -> None:
        self.family, self.size = family, size
        *self.conditions, self.negative = self.family.encode([*inputs(PROMPTS), " "])

    def fresh(self, dtype: torch.dtype = torch.float32) -> ModelFamily:
        """The family with a transformer of its own, without adapters."""
        family = copy.copy(self.family)
        family.transformer = copy.deepcopy(self.family.transformer)
        if dtype != family.dtype:
            family.transformer, family.dtype = family.transformer.to(dtype), dtype
        return family


class World(FamilyWorld):
    """The tiny Qwen-Image, read once. ``layers``: keep only the first blocks, for speed."""

    def __init__(self, pipeline: Path, cache: Path, layers: int | None = None) -> None:
        family = QwenImage.load(pipeline, device="cpu", dtype=torch.float32, embeddings_cache=cache)
        family.transformer.transformer_blocks = family.transformer.transformer_blocks[:layers]
        super().__init__(family, SIZE)


def algorithm(name: str, **params: Any) -> Algorithm:
    section = ALGORITHMS.load(name)
    if section().learns_from_clean_samples:
        return build_algorithm(section(**{"train_timesteps": 2, **params}), ODE())
    sampler = CPS(0.8) if name == "flow-grpo-fast" else FlowSDE(0.7)
    return build_algorithm(section(**params), sampler)


def make_slots(
    family: ModelFamily,
    algo: Algorithm,
    mode: str,
    extra: Sequence[Slot] = (),
    compute: torch.dtype | None = None,
) -> WeightSlots:
    wanted = [*algo.extra_slots, *extra]
    if mode == "full":
        return CopySlots(family.transformer, wanted)
    lora = replace(LORA, targets=family.lora_targets)
    slots = LoraSlots(family.transformer, lora, wanted, compute=compute)
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():  # adapters that already do something: with B = 0 the gradient of A is 0
        for name, parameter in slots.parameters("policy").items():
            if ".lora_B." in name:
                parameter.copy_(0.05 * torch.randn(parameter.shape, generator=generator))
    for slot in slots.slots:
        if slot not in ("policy", "reference"):
            slots.copy(slot, "policy")
    return slots


def make_learner(
    world: FamilyWorld,
    algo: Algorithm,
    mode: str = "lora",
    *,
    ranks: Ranks | None = None,
    guidance: float = 1.0,
    dtype: torch.dtype = torch.float32,
    ema_cap: float | None = None,
    ema_every: int = 1,
    pass_memory_bytes: int | None = None,
    **settings: Any,
) -> Learner:
    ema = None if ema_cap is None else EmaConfig(cap=ema_cap, every=ema_every)
    budget = None if pass_memory_bytes is None else pass_memory_bytes / 2**30
    learner_config = LearnerConfig(
        **{"learning_rate": 1e-3, "ema": ema, "pass_memory_gib": budget, **settings}
    )
    family = world.fresh(dtype)
    extra: tuple[Slot, ...] = () if ema is None else ("ema",)
    return Learner(
        family,
        make_slots(family, algo, mode, extra, adapter_type(learner_config, dtype)),
        algo,
        learner_config,
        size=world.size,
        guidance=TrainingGuidance(guidance, world.negative, family.embedded_guidance),
        ranks=ranks,
    )


def roll_out(
    world: FamilyWorld,
    learner: Learner,
    *,
    guidance: float = 1.0,
    iteration: int = 0,
    batch: int = 4,
    autocast: torch.dtype | None = None,
    around: Callable[[nn.Module], AbstractContextManager[None]] = nullcontext,
) -> list[TrainingSample]:
    """Real rollouts of every prompt by the learner's own weights, with made-up rewards."""
    algo = learner.algorithm
    windows: dict[str, SdeWindow] = {
        "flow-grpo": AllSteps(),
        "flow-grpo-fast": RandomWindow(2, high=STEPS - 1),
        "grpo-guard": AllSteps(),
        "flow-dppo": AllSteps(),
    }
    window, embedded = windows.get(algo.name), world.family.embedded_guidance
    recipe = Recipe(world.size, algo.sampler, window, guidance, algo.keeps, embedded)
    rollouts = [
        Rollout(
            id=RolloutId(f"{p}/{member}"),
            purpose=Purpose.TRAIN,
            iteration=iteration,
            prompt_id=PromptId(str(p)),
            member=member,
            seed=1000 * iteration + 10 * p + member,
            steps=STEPS,
            version=PolicyVersion(learner.steps),
        )
        for p in range(len(PROMPTS))
        for member in range(GROUP)
    ]
    conditions = [world.conditions[int(rollout.prompt_id)] for rollout in rollouts]
    engine = Engine(learner.family, max_batch=batch, negative=world.negative, autocast=autocast)
    with learner.slots.use(algo.rollout_slot) as model, around(model):
        states = engine.start(rollouts, conditions, recipe)
        while not all(state.done for state in states):
            states = engine.step(model, states)
        finished = engine.finish(states)
    firsts = [state.window.start for state in states]
    rewards = list(rewards_of(rollouts).values())
    groups = [rewards[i : i + GROUP] for i in range(0, len(rewards), GROUP)]
    scaled = [value for group in advantages(groups, WEIGHTS, AdvantageConfig()) for value in group]
    return [
        _sample(result, condition, first, advantage)
        for result, condition, first, advantage in zip(finished, conditions, firsts, scaled, strict=True)
        if isinstance(result, FinishedRollout)
    ]


def rewards_of(rollouts: Sequence[Rollout]) -> dict[RolloutId, dict[str, float]]:
    """Made up, of their seeds."""
    return {rollout.id: {"quality": float((rollout.seed * 7919) % 13)} for rollout in rollouts}


def _sample(
    result: FinishedRollout, condition: Condition, first_step: int, advantage: float
) -> TrainingSample:
    rollout = result.rollout
    return TrainingSample(
        key=rollout.id,
        group=rollout.prompt_id,
        advantage=advantage,
        condition=condition,
        seed=rollout.seed,
        version=rollout.version,
        tensors=result.tensors,
        first_step=first_step,
    )


def cut(samples: Sequence[TrainingSample], size: int) -> list[list[str]]:
    keys = [sample.key for sample in samples]
    return [keys[i : i + size] for i in range(0, len(keys), size)]


def train_batch(
    learner: Learner, samples: Sequence[TrainingSample], size: int, *, held: Sequence[str] | None = None
) -> Any:
    """One update over all samples in micro-batches of ``size``, as if the learner's weights had made them.

    Args:
        held: keys this rank has tensors of.
    """
    samples = [replace(sample, version=learner.steps) for sample in samples]
    if held is not None:
        samples = [s if s.key in held else replace(s, tensors=None) for s in samples]
    micro_batches = cut(samples, size)
    learner.prepare(samples, micro_batches)
    for keys in micro_batches:
        learner.accumulate(keys, len(samples))
    report = learner.step()
    learner.finish_batch()
    return report


def gradients(learner: Learner, samples: Sequence[TrainingSample], size: int) -> dict[str, torch.Tensor]:
    """The accumulated gradients of one update, not applied."""
    micro_batches = cut(samples, size)
    learner.prepare(samples, micro_batches)
    for keys in micro_batches:
        learner.accumulate(keys, len(samples))
    return gathered(learner)


def gathered(learner: Learner) -> dict[str, torch.Tensor]:
    """Copies of the gradients accumulated so far."""
    parameters = learner.slots.trainable_parameters().items()
    return {name: p.grad.clone() for name, p in parameters if p.grad is not None}


def first_update(
    learner: Learner, samples: Sequence[TrainingSample], size: int, *, evaluated: bool
) -> tuple[dict[str, torch.Tensor], UpdateSums]:
    """Gradients and metrics; with ``evaluated`` ratios to log-probs of a pass of their own, as later ones."""
    micro_batches = cut(samples, size)
    learner.prepare(samples, micro_batches)
    if evaluated:
        learner._compute_old_log_probs(micro_batches)
        learner._stepped = True
    for keys in micro_batches:
        learner.accumulate(keys, len(samples))
    return gathered(learner), learner.step().sums


class Wide(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts products with an inner dimension above ``narrow``, and attention."""

    def __init__(self, narrow: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.narrow, self.count = narrow, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += is_saved(func, args, self.narrow)
        return func(*args, **(kwargs or {}))
