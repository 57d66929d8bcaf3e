"""The model, its prompts, rollouts and learners: the one place that knows the model's interface.

Weights are random, drawn on the device from a seed, so every process of a row can make the same ones without
a file. Zero-initialised layers are drawn as well: nothing can agree by being constant.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from diffusers import AutoencoderKLQwenImage
from torch import Tensor, nn

from spotlight.algorithms import build_algorithm
from spotlight.config.sections.algorithm import FlowGRPOConfig
from spotlight.config.sections.learner_section import LearnerConfig
from spotlight.diffusion.samplers import ODE, FlowSDE
from spotlight.diffusion.schedule import AllSteps
from spotlight.models import peft_layers
from spotlight.models.condition import Condition, ConditionBatch
from spotlight.models.families.qwen_image import QwenImage
from spotlight.models.kernels.fused import use_fused, use_reference
from spotlight.models.media import MediaSize
from spotlight.models.shared.quantised import Quantize, as_stored
from spotlight.models.skeleton import filling
from spotlight.models.slots import LoraSlots
from spotlight.rollout.engine import Engine
from spotlight.rollout.serialization import pack_condition, unpack_condition
from spotlight.rollout.state import FinishedRollout, Recipe, RolloutState
from spotlight.scheduler.types import PolicyVersion, Purpose, Rollout, RolloutId
from spotlight.testbed import PIPELINE_DIR
from spotlight.training.learner import Learner, TrainingSample
from spotlight.training.sharding import Ranks
from spotlight_kernels.fuse import fuse
from spotlight_plan.commands.gpu.random_blocks import draw, random_adapters
from spotlight_rewards.base.prompts import PromptId

CLIP_RANGE = 1e-5
"""Of the published recipes for few steps: what a log-prob of replay must agree with."""
SEED = 7
_EXACT_LEVELS = (0.5, 0.25, 0.125)
"""Noise levels whose timesteps bfloat16 holds exactly. Others are rounded by up to 2 of 1000, in the pipeline
too: a difference of the input, which would hide that of the arithmetic."""

_PUBLISHED = QwenImage.published["Qwen/Qwen-Image"].configs


@dataclass(frozen=True, slots=True)
class Shape:
    """Pictures of one forward: their side in pixels, how many, and text tokens of each prompt."""

    side_px: int
    batch: int
    text: int = 64


@dataclass(frozen=True, slots=True)
class Scale:
    """How large everything is.

    Attributes:
        layers: of the whole model.
        few_layers: where a CPU computes the same in float32, or processes hold several copies.
        small, large: pictures that are denoised.
        train_small, train_large: pictures of a micro-batch.
        exact: pictures compared with the CPU.
        rank: of the adapters.
    """

    layers: int
    few_layers: int
    small: Shape
    large: Shape
    train_small: Shape
    train_large: Shape
    exact: Shape
    rank: int


FULL = Scale(60, 8, Shape(512, 16), Shape(1280, 4), Shape(512, 4), Shape(1280, 1), Shape(256, 2), rank=64)
TINY = Scale(
    2, 2, Shape(16, 4, 8), Shape(32, 2, 8), Shape(16, 2, 8), Shape(32, 1, 8), Shape(16, 2, 8), rank=4
)


class Lab:
    """A process's device, and the model on it.

    Args:
        home: models and sockets; shared by the processes of a row.
        device: with an index if it is a GPU.
        model: family that part D trains; empty: by the device's memory.

    Attributes:
        budget_s: of the row that runs.
    """

    def __init__(self, home: Path, device: torch.device, *, tiny: bool, model: str = "") -> None:
        self.home, self.device, self.tiny, self.model = home, device, tiny, model
        self.scale = TINY if tiny else FULL
        self.budget_s = 30.0
        self._family: QwenImage | None = None
        self._slots: LoraSlots | None = None
        self._layers = 0

    # -- the model -------------------------------------------------------------------------------------

    def pipeline(self, layers: int) -> Path:
        """A pipeline directory without the transformer's weights; made once."""
        directory = self.home / f"layers{layers}"
        if not directory.exists():
            aside = self.home / f"writing{layers}"
            shutil.copytree(PIPELINE_DIR, aside)
            _configure(aside, layers, tiny=self.tiny)
            aside.rename(directory)
        return directory

    def empty(
        self, layers: int, dtype: torch.dtype = torch.bfloat16, quantize: Quantize = "none"
    ) -> QwenImage:
        """A family whose transformer waits to be filled."""
        directory = self.pipeline(layers)
        return QwenImage.load(
            directory,
            device=self.device,
            dtype=dtype,
            embeddings_cache=self.home / "embeddings",
            read_transformer=False,
            quantize=quantize,
        )

    def fresh(
        self, layers: int, dtype: torch.dtype = torch.bfloat16, quantize: Quantize = "none"
    ) -> QwenImage:
        """A family with random weights and without adapters, the caller's own. Each is drawn, then held."""
        family = self.empty(layers, dtype, quantize)
        with filling(family.transformer) as targets:
            if quantize == "none":
                draw(targets, SEED)
                return family
            for at, (name, target) in enumerate(as_stored(family.transformer, targets).items()):
                whole = torch.empty(target.shape, dtype=dtype, device=self.device)
                draw({name: whole}, SEED + at)
                target.copy_(whole)
        return family

    def family(self, layers: int | None = None) -> QwenImage:
        """The shared family in bfloat16 (default: whole), with adapters in :meth:`slots`; on GPUs fused."""
        wanted = self.scale.layers if layers is None else layers
        if self._family is None or self._layers != wanted:
            self.drop()
            self._family, self._layers = self.fresh(wanted), wanted
            self._slots = self.adapted(self._family)
        return self._family

    def adapted(self, family: QwenImage) -> LoraSlots:
        """Random adapters, on GPUs with fused operators."""
        transformer = family.transformer
        fused = self.device.type == "cuda" and use_fused(transformer, self.device, asked=True)
        slots = random_adapters(family, self.scale.rank)
        if fused:
            peft_layers.fuse(transformer)
        return slots

    def slots(self, layers: int | None = None) -> LoraSlots:
        """The slots of :meth:`family`: ``policy``, and ``reference`` for the model without adapters."""
        self.family(layers)
        assert self._slots is not None
        return self._slots

    def drop(self) -> None:
        """Release the shared family."""
        self._family = self._slots = None
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    # -- what it is given ------------------------------------------------------------------------------

    def condition(self, family: QwenImage, tokens: int, seed: int = 0) -> Condition:
        """Embeddings of a made-up prompt."""
        generator = torch.Generator().manual_seed(1000 + seed)
        shapes = family.condition_shapes(tokens)
        made = {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}
        return unpack_condition(pack_condition(Condition(made)))  # as from the store

    def conditions(self, family: QwenImage, shape: Shape, *, prompts: int = 1) -> list[Condition]:
        """One per picture, of equal length; pictures of a prompt follow one another."""
        texts = [self.condition(family, shape.text, seed) for seed in range(prompts)]
        return [texts[i * prompts // shape.batch] for i in range(shape.batch)]

    def latents(self, family: QwenImage, shape: Shape) -> tuple[Tensor, Tensor]:
        """Pure noise [batch, tokens, channels], and noise levels [batch]."""
        generator = torch.Generator().manual_seed(SEED)
        noise = torch.randn(shape.batch, *family.latent_shape(size(shape)), generator=generator)
        levels = [_EXACT_LEVELS[i % len(_EXACT_LEVELS)] for i in range(shape.batch)]
        return noise.to(self.device), torch.tensor(levels, device=self.device)

    def velocity(
        self, family: QwenImage, model: nn.Module, shape: Shape, conditions: Sequence[Condition] | None = None
    ) -> Tensor:
        """One forward as the engine makes it."""
        latents, sigma = self.latents(family, shape)
        text = family.collate(self.conditions(family, shape) if conditions is None else conditions)
        return forward(family, model, latents, sigma, text, shape)

    # -- rollouts and training -------------------------------------------------------------------------

    def engine(self, family: QwenImage, shape: Shape) -> Engine:
        """Of one forward for the shape's whole batch."""
        return Engine(family, max_batch=shape.batch)

    def start(
        self,
        family: QwenImage,
        engine: Engine,
        shape: Shape,
        steps: int,
        *,
        stochastic: bool = False,
        prompts: int = 1,
    ) -> list[RolloutState]:
        """Rollouts at step 0."""
        rollouts = [_rollout(i, steps) for i in range(shape.batch)]
        return engine.start(
            rollouts, self.conditions(family, shape, prompts=prompts), recipe(shape, stochastic)
        )

    def samples(self, family: QwenImage, slots: LoraSlots, shape: Shape, steps: int) -> list[TrainingSample]:
        """Stochastic rollouts of the policy, with made-up advantages."""
        engine = self.engine(family, shape)
        conditions = self.conditions(family, shape)
        with slots.use("policy", merged=True) as model:
            results = engine.run(model, self.start(family, engine, shape, steps, stochastic=True))
        lost = [result for result in results if not isinstance(result, FinishedRollout)]
        if lost:
            raise RuntimeError(f"rollout failed: {lost[0]}")
        return [
            TrainingSample(
                key=result.rollout.id,
                group=result.rollout.prompt_id,
                advantage=1.0 if i % 2 else -1.0,
                condition=conditions[i],
                seed=result.rollout.seed,
                version=0,
                tensors=result.tensors,
            )
            for i, result in enumerate(results)
            if isinstance(result, FinishedRollout)
        ]

    def learner(
        self,
        family: QwenImage,
        slots: LoraSlots,
        shape: Shape,
        *,
        ranks: Ranks | None = None,
        **settings: Any,
    ) -> Learner:
        """Flow-GRPO with the recipe's clip range; ``settings`` are of ``learner``."""
        algorithm = build_algorithm(
            FlowGRPOConfig(clip_range=CLIP_RANGE, old_log_probs="recompute"), FlowSDE(0.7)
        )
        config = LearnerConfig.model_validate({"learning_rate": 1e-6, "autocast": "bfloat16", **settings})
        return Learner(family, slots, algorithm, config, size=size(shape), ranks=ranks)


def size(shape: Shape) -> MediaSize:
    """Of each picture."""
    return MediaSize(shape.side_px, shape.side_px)


def recipe(shape: Shape, stochastic: bool = False) -> Recipe:
    """How the rollouts are made: an ODE, or all steps stochastic."""
    if stochastic:
        return Recipe(size(shape), FlowSDE(0.7), AllSteps(), 1.0, "trajectory")
    return Recipe(size(shape), ODE(), None, 1.0, "final")


@torch.no_grad()
def forward(
    family: QwenImage, model: nn.Module, latents: Tensor, sigma: Tensor, text: ConditionBatch, shape: Shape
) -> Tensor:
    """The family's velocity, in the dtype of its weights."""
    return family.velocity(model, latents, sigma, text, None, size(shape))


def all_steps(engine: Engine, model: nn.Module, states: Sequence[RolloutState]) -> list[RolloutState]:
    """Denoise to the end."""
    current = list(states)
    while not all(state.done for state in current):
        current = engine.step(model, current)
    return current


def train(learner: Learner, samples: Sequence[TrainingSample], *, step: bool = True) -> dict[str, float]:
    """One update with all samples in one micro-batch, as if the learner's weights had made them."""
    accumulate(learner, samples)
    if not step:
        return {}
    report = learner.step()
    learner.finish_batch()
    return report.flat()


def accumulate(learner: Learner, samples: Sequence[TrainingSample]) -> None:
    """Gradients of one micro-batch, not applied."""
    now = [replace(sample, version=learner.steps) for sample in samples]
    keys = [sample.key for sample in now]
    learner.prepare(now, [keys])
    learner.accumulate(keys, len(keys))


def dealt(samples: Sequence[TrainingSample], rank: int, world: int) -> list[TrainingSample]:
    """Every sample, those of other ranks without tensors."""
    return [s if i % world == rank else replace(s, tensors=None) for i, s in enumerate(samples)]


@contextmanager
def reference(module: nn.Module) -> Iterator[None]:
    """Operators of diffusers and peft within, where fused ones were put."""
    fused = any("forward" in vars(part) for part in module.modules())
    use_reference(module)
    try:
        yield
    finally:
        if fused:
            fuse(module, next(module.parameters()).device, compare=False)
            peft_layers.fuse(module)


def using(slots: LoraSlots, *, lora: bool) -> AbstractContextManager[nn.Module]:
    """The module with or without its adapters."""
    return slots.use("policy", merged=True) if lora else slots.use("reference")


def _rollout(index: int, steps: int) -> Rollout:
    return Rollout(
        id=RolloutId(f"r{index}"),
        purpose=Purpose.TRAIN,
        iteration=0,
        prompt_id=PromptId("p"),
        member=index,
        seed=index,
        steps=steps,
        version=PolicyVersion(0),
    )


def _configure(directory: Path, layers: int, *, tiny: bool) -> None:
    """Turn a copy of the embedded pipeline into one of ``layers`` layers without transformer weights."""
    path = directory / "transformer" / "config.json"
    for weights in path.parent.glob("*.safetensors"):
        weights.unlink()
    config = {**(_config(path) if tiny else _PUBLISHED["transformer"]), "num_layers": layers}
    path.write_text(json.dumps(config), encoding="utf-8")
    if tiny:
        return
    text = directory / "text_encoder" / "config.json"
    described = _config(text)
    described["text_config"] = {
        **dict(described["text_config"]),  # type: ignore[call-overload]
        "hidden_size": config["joint_attention_dim"],
    }
    text.write_text(json.dumps(described), encoding="utf-8")
    shutil.rmtree(directory / "vae")
    AutoencoderKLQwenImage.from_config(dict(_PUBLISHED["vae"])).save_pretrained(directory / "vae")


def _config(path: Path) -> dict[str, object]:
    content: dict[str, object] = json.loads(path.read_text(encoding="utf-8"))
    return content
